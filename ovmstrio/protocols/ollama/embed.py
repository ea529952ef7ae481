"""Ollama's endpoints ``/api/embed``, and the older ``/api/embeddings`` for one text."""

from __future__ import annotations

from functools import partial
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, Final, cast

import orjson

from ovmstrio.core.errors import ErrorList
from ovmstrio.core.generation import Task
from ovmstrio.core.http_messages import HttpAnswer
from ovmstrio.encoding.json_output import array_pieces
from ovmstrio.protocols.ollama.api import OPTIONS, check_keep_alive, read_body
from ovmstrio.protocols.openai.embeddings import check_dimensions, read_inputs, write_vectors
from ovmstrio.protocols.openai.fields import Fields, PromptSize
from ovmstrio.protocols.openai.known_fields import KnownFields
from ovmstrio.protocols.openai.text_endpoint import parse_off_loop
from ovmstrio.serving.generation_calls import charge_tokens
from ovmstrio.transport.http.responses import JSON_TYPE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ovmstrio.core.generation import Embedder, Embeddings, TokenIds
    from ovmstrio.core.http_messages import HttpRequest
    from ovmstrio.protocols.openai.api import OpenAIApi
    from ovmstrio.transport.http.router import Rule

_ONE: Final = "prompt"  # Field of the older endpoint
_IGNORED: Final = {"keep_alive": check_keep_alive}
_WHOLE: Final = -1  # As many tokens as the model takes
EMBED: Final = KnownFields(frozenset({"model", "input", "dimensions", "truncate", "options"}), _IGNORED, {})
EMBED_NOTES: Final = {
    "dimensions": "the model's own; its option `normalize` decides the length of vectors",
    "truncate": "false refuses inputs that the model cannot take completely; the default is true, as in Ollama",
    "options": "checked; options of sampling have no effect on vectors",
}
EMBEDDINGS: Final = KnownFields(frozenset({"model", _ONE, "options"}), _IGNORED, {})


def embed_rules(api: OpenAIApi) -> list[Rule]:
    """Return the routes."""

    async def answer(
        known: KnownFields, name: str, write: Callable[[Embeddings, str, int], bytes], request: HttpRequest
    ) -> HttpAnswer:
        body = await read_body(api, request, known)
        began = perf_counter_ns()
        inputs, dimensions, max_tokens = await parse_off_loop(partial(_read, body.document, known, name), body)
        with await api.call(request, body.model, Task.EMBEDDINGS) as call:
            embeddings = await cast("Embedder", call.service).embed(inputs, max_tokens=max_tokens)
            charge_tokens(embeddings.tokens)
            check_dimensions(embeddings, dimensions)
            content = await write_vectors(embeddings, partial(write, embeddings, body.document["model"], began))
            call.event.sent = len(content)
        return HttpAnswer(200, JSON_TYPE, content)

    return [
        *api.rules("/embed", "POST", partial(answer, EMBED, "input", _write_all), prefixes=("/api",)),
        *api.rules("/embeddings", "POST", partial(answer, EMBEDDINGS, _ONE, _write_first), prefixes=("/api",)),
    ]


def _read(
    document: Mapping[str, Any], known: KnownFields, name: str
) -> tuple[Sequence[str | TokenIds], int | None, int | None]:
    """Return the inputs, the dimensions, and the limit of tokens, beyond which Ollama truncates by default."""
    errors = ErrorList()
    fields = Fields(document, errors)
    dimensions = fields.unsigned("dimensions", minimum=1)
    max_tokens = None if fields.flag("truncate") is False else _WHOLE
    inputs = read_inputs(fields, name)
    if name == _ONE and not isinstance(fields.get(name), str | None):
        fields.refuse(name, f"{name} is not a string")
    # Options of sampling have no effect on vectors.
    OPTIONS.check(fields.within("options") or fields.translated({}, PromptSize()))
    known.check(fields)
    errors.raise_if_any()
    return inputs, dimensions, max_tokens


def _write_all(embeddings: Embeddings, model: str, began: int) -> bytes:
    pieces = [b'{"model":%b,"embeddings":[' % orjson.dumps(model)]
    for index, vector in enumerate(embeddings.vectors):
        pieces.append(b"," if index else b"")
        pieces += array_pieces(vector)
    figures = (perf_counter_ns() - began, embeddings.tokens)
    pieces.append(b'],"total_duration":%d,"load_duration":0,"prompt_eval_count":%d}' % figures)
    return b"".join(pieces)


def _write_first(embeddings: Embeddings, model: str, began: int) -> bytes:
    del model, began
    return b"".join((b'{"embedding":', *array_pieces(embeddings.vectors[0]), b"}"))
