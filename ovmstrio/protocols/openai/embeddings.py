"""``/embeddings``: vectors of texts, or of the numbers of their tokens."""

from __future__ import annotations

from base64 import b64encode
from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast

import orjson
import trio

from ovmstrio.core.errors import Gathered, InvalidField
from ovmstrio.core.generation import Task
from ovmstrio.core.http import HttpAnswer
from ovmstrio.encoding.json_output import array_pieces
from ovmstrio.protocols.openai.fields import MAX_PROMPT_TOKENS, Fields, are_tokens, shown
from ovmstrio.protocols.openai.text_endpoint import read_apart
from ovmstrio.serving.calls import charge_caller
from ovmstrio.transport.http.responses import JSON_TYPE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ovmstrio.core.generation import Embedder, Embeddings, TokenIds
    from ovmstrio.core.http import HttpRequest
    from ovmstrio.protocols.openai.api import OpenAIApi
    from ovmstrio.transport.http.router import Rule

__all__ = ["embedding_rules"]

_MOST_INPUTS: Final = 500
_MOST_TOKEN_NUMBER: Final = 2**31
_FORMS: Final = ("float", "base64")
_AT_ONCE: Final = 256 * 1024
"""Bytes of vectors that are written within a millisecond or two."""
_FORM_WANTED: Final = "encoding_format should either base64 or float"
_INPUT_WANTED: Final = "input should be string, array of strings or array of integers"


def embedding_rules(api: OpenAIApi) -> list[Rule]:
    """Make the rules."""

    async def embed(request: HttpRequest) -> HttpAnswer:
        body = await api.body(request)
        inputs, is_base64, dimensions = await read_apart(partial(_read, body.document), body)
        with await api.call(request, body.model, Task.EMBEDDINGS) as call:
            made = await cast("Embedder", call.service).embed(inputs)
            charge_caller(made.tokens)
            if dimensions not in (None, made.vectors.shape[1]):
                message = f"this model gives vectors of {made.vectors.shape[1]} numbers, and none that could be cut"
                raise InvalidField(message, field="dimensions", got=str(dimensions))
            write = partial(_write, made, body.model, is_base64=is_base64)
            content = write() if made.vectors.nbytes <= _AT_ONCE else await trio.to_thread.run_sync(write)
            call.event.sent = len(content)
        return HttpAnswer(200, JSON_TYPE, content)

    return api.rules("/embeddings", "POST", embed)


def _read(document: Mapping[str, Any]) -> tuple[Sequence[str | TokenIds], bool, int | None]:
    """Read what vectors are wanted of, whether as base64, and of how many numbers.

    Raises:
        InvalidField: it is not what it should be; of several things that are wrong all are told.
    """
    wrong = Gathered()
    fields = Fields(document, wrong)
    form = fields.get("encoding_format")
    if form is not None and form not in _FORMS:
        fields.refuse("encoding_format", _FORM_WANTED, got=shown(form))
    dimensions = fields.unsigned("dimensions", least=1)
    fields.text("user")
    inputs = _read_inputs(fields)
    wrong.tell()
    return inputs, form == "base64", dimensions


def _read_inputs(fields: Fields) -> Sequence[str | TokenIds]:
    given = fields.get("input")
    match given:
        case None:
            fields.refuse("input", "input field is required", code="missing_required_parameter")
            return []
        case str():
            return [given]
        case [int(), *_]:
            return _read_tokens(fields, "input", given)
        case list() if 1 <= len(given) <= _MOST_INPUTS:
            tokens = sum(len(each) for each in given if isinstance(each, list))
            if tokens > MAX_PROMPT_TOKENS:
                fields.refuse("input", f"input: expected at most {MAX_PROMPT_TOKENS} tokens in all", got=str(tokens))
                return []
            return [found for at, each in enumerate(given) for found in _read_one(fields, f"input[{at}]", each)]
        case list():
            fields.refuse("input", f"input should have 1 to {_MOST_INPUTS} texts", got=str(len(given)))
        case _:
            fields.refuse("input", _INPUT_WANTED, got=shown(given))
    return []


def _read_one(fields: Fields, name: str, given: Any) -> Sequence[str | TokenIds]:
    if isinstance(given, str):
        return [given]
    if isinstance(given, list):
        return _read_tokens(fields, name, given)
    fields.refuse(name, f"{name} is neither a text nor an array of tokens", got=shown(given))
    return []


def _read_tokens(fields: Fields, name: str, given: list[Any]) -> Sequence[TokenIds]:
    if len(given) > MAX_PROMPT_TOKENS:
        fields.refuse(name, f"{name}: expected at most {MAX_PROMPT_TOKENS} tokens", got=str(len(given)))
        return []
    if given and not are_tokens(given, _MOST_TOKEN_NUMBER):
        wrong = next(each for each in given if type(each) is not int or not 0 <= each < _MOST_TOKEN_NUMBER)
        fields.refuse(name, f"{name} should have the numbers of tokens alone", got=shown(wrong))
        return []
    return [tuple(given)]


def _write(made: Embeddings, model: str, *, is_base64: bool) -> bytes:
    """Write the answer; of many vectors without a call that takes long."""
    pieces = [b'{"object":"list","data":[']
    for index, vector in enumerate(made.vectors):
        pieces.append(b',{"object":"embedding","embedding":' if index else b'{"object":"embedding","embedding":')
        pieces += _encoded(vector) if is_base64 else array_pieces(vector)
        pieces.append(b',"index":%d}' % index)
    usage = {"prompt_tokens": made.tokens, "total_tokens": made.tokens}
    pieces.append(b'],"model":%b,"usage":%b}' % (orjson.dumps(model), orjson.dumps(usage)))
    return b"".join(pieces)


def _encoded(vector: Any) -> Iterator[bytes]:
    yield b'"%b"' % b64encode(vector.astype("<f4").tobytes())
