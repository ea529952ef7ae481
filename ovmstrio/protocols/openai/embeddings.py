"""Endpoints ``/embeddings`` (OpenAI) and ``/pooling`` (vLLM): embeddings of text or token ids."""

from __future__ import annotations

import time
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast
from uuid import uuid4

import orjson
import trio

from ovmstrio.core.errors import ErrorList, InvalidField
from ovmstrio.core.generation import Task
from ovmstrio.core.http_messages import HttpAnswer
from ovmstrio.encoding.json_output import array_pieces
from ovmstrio.protocols.openai.api import PREFIXES
from ovmstrio.protocols.openai.fields import MAX_PROMPT_TOKENS, Fields, are_token_ids, read_truncation, shown
from ovmstrio.protocols.openai.known_fields import EMBEDDINGS, POOLING, KnownFields
from ovmstrio.protocols.openai.text_endpoint import parse_off_loop
from ovmstrio.serving.generation_calls import charge_tokens
from ovmstrio.transport.http.responses import JSON_TYPE
from ovmstrio.util.truncation import MAX_ITEMS

if TYPE_CHECKING:
    from ovmstrio.core.generation import Embedder, Embeddings, TokenIds
    from ovmstrio.core.http_messages import HttpRequest
    from ovmstrio.protocols.openai.api import OpenAIApi
    from ovmstrio.transport.http.router import Rule

_TOKEN_ID_LIMIT: Final = 2**31
_FORMATS: Final = ("float", "base64")
_MAX_ONE_CALL_BYTES: Final = 256 * 1024  # Size of vectors that is encoded within one or two milliseconds
_INVALID_FORMAT: Final = "encoding_format should either base64 or float"
_INVALID_INPUT: Final = "should be string, array of strings or array of integers"


class _Form(NamedTuple):
    """Form of a response: its first fields, and the kind and the field of a vector."""

    head: Callable[[], Mapping[str, Any]]
    kind: str
    field: str
    known: KnownFields


def embedding_rules(api: OpenAIApi) -> list[Rule]:
    """Return the routes."""

    async def embed(form: _Form, request: HttpRequest) -> HttpAnswer:
        body = await api.body(request, form.known, needs_model=form is not _POOLING)
        parsed = await parse_off_loop(partial(_read, body.document, form.known), body)
        with await api.call(request, body.model, Task.EMBEDDINGS) as call:
            embeddings = await cast("Embedder", call.service).embed(parsed.inputs, **parsed.options)
            charge_tokens(embeddings.tokens)
            check_dimensions(embeddings, parsed.dimensions)
            write = partial(_write, form, embeddings, body.model, is_base64=parsed.is_base64)
            content = await write_vectors(embeddings, write)
            call.event.sent = len(content)
        return HttpAnswer(200, JSON_TYPE, content)

    return [
        *api.rules("/embeddings", "POST", partial(embed, _EMBEDDINGS)),
        *api.rules("/pooling", "POST", partial(embed, _POOLING), prefixes=("", *PREFIXES)),
    ]


_EMBEDDINGS: Final = _Form(lambda: {"object": "list"}, "embedding", "embedding", EMBEDDINGS)
_POOLING: Final = _Form(
    lambda: {"id": f"pool-{uuid4().hex}", "object": "list", "created": int(time.time())}, "pooling", "data", POOLING
)


class _ParsedRequest(NamedTuple):
    inputs: Sequence[str | TokenIds]
    is_base64: bool
    dimensions: int | None
    options: Mapping[str, Any]


def _read(document: Mapping[str, Any], known: KnownFields) -> _ParsedRequest:
    errors = ErrorList()
    fields = Fields(document, errors)
    form = fields.get("encoding_format")
    if form is not None and form not in _FORMATS:
        fields.refuse("encoding_format", _INVALID_FORMAT, got=shown(form))
    dimensions = fields.unsigned("dimensions", minimum=1)
    prompt_name = fields.text("prompt_name")
    inputs = read_inputs(fields)
    options = read_truncation(fields)
    if known is POOLING:
        fields.choice("task", ("embed",))
    known.check(fields)
    errors.raise_if_any()
    return _ParsedRequest(inputs, form == "base64", dimensions, {**options, "prompt_name": prompt_name})


def check_dimensions(embeddings: Embeddings, dimensions: int | None) -> None:
    """Raise ``InvalidField`` if vectors do not have the requested size."""
    if dimensions not in (None, embeddings.vectors.shape[1]):
        message = f"this model supports only {embeddings.vectors.shape[1]} dimensions"
        raise InvalidField(message, field="dimensions", got=str(dimensions))


async def write_vectors(embeddings: Embeddings, write: Callable[[], bytes]) -> bytes:
    """Encode a response, one with many vectors in a worker thread."""
    return write() if embeddings.vectors.nbytes <= _MAX_ONE_CALL_BYTES else await trio.to_thread.run_sync(write)


def read_inputs(fields: Fields, name: str = "input") -> Sequence[str | TokenIds]:
    """Return the texts or token lists of a field."""
    given = fields.get(name)
    match given:
        case None:
            fields.refuse(name, f"{name} field is required", code="missing_required_parameter")
            return []
        case str():
            return [given]
        case [int(), *_]:
            return _read_tokens(fields, name, given)
        case list() if 1 <= len(given) <= MAX_ITEMS:
            tokens = sum(len(each) for each in given if isinstance(each, list))
            if tokens > MAX_PROMPT_TOKENS:
                fields.refuse(name, f"{name}: expected at most {MAX_PROMPT_TOKENS} tokens in all", got=str(tokens))
                return []
            return [parsed for at, each in enumerate(given) for parsed in _read_one(fields, f"{name}[{at}]", each)]
        case list():
            fields.refuse(name, f"{name}: expected 1 to {MAX_ITEMS} items", got=str(len(given)))
        case _:
            fields.refuse(name, f"{name} {_INVALID_INPUT}", got=shown(given))
    return []


def _read_one(fields: Fields, name: str, given: Any) -> Sequence[str | TokenIds]:
    if isinstance(given, str):
        return [given]
    if isinstance(given, list):
        return _read_tokens(fields, name, given)
    fields.refuse(name, f"{name} is neither a string nor an array of token ids", got=shown(given))
    return []


def _read_tokens(fields: Fields, name: str, given: list[Any]) -> Sequence[TokenIds]:
    if len(given) > MAX_PROMPT_TOKENS:
        fields.refuse(name, f"{name}: expected at most {MAX_PROMPT_TOKENS} tokens", got=str(len(given)))
        return []
    if given and not are_token_ids(given, _TOKEN_ID_LIMIT):
        invalid = next(each for each in given if type(each) is not int or not 0 <= each < _TOKEN_ID_LIMIT)
        fields.refuse(name, f"{name}: expected token ids", got=shown(invalid))
        return []
    return [tuple(given)]


def _write(form: _Form, embeddings: Embeddings, model: str, *, is_base64: bool) -> bytes:
    """Encode the response; many vectors are encoded in several short calls."""
    pieces = [orjson.dumps(form.head())[:-1], b',"data":[']
    begin = b'{"object":"%b","%b":' % (form.kind.encode(), form.field.encode())
    for index, vector in enumerate(embeddings.vectors):
        pieces.append(b"," + begin if index else begin)
        pieces += [b'"%b"' % b64encode(vector.astype("<f4").tobytes())] if is_base64 else array_pieces(vector)
        pieces.append(b',"index":%d}' % index)
    usage = {"prompt_tokens": embeddings.tokens, "total_tokens": embeddings.tokens}
    pieces.append(b'],"model":%b,"usage":%b}' % (orjson.dumps(model), orjson.dumps(usage)))
    return b"".join(pieces)
