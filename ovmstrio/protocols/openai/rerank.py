"""Endpoint ``/rerank``: relevance of documents to a query, in Cohere's API."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast
from uuid import uuid4

import orjson
import trio

from ovmstrio.core.errors import ErrorList
from ovmstrio.core.generation import Task
from ovmstrio.core.http_messages import HttpAnswer
from ovmstrio.encoding.json_output import text_pieces
from ovmstrio.protocols.openai.api import PREFIXES
from ovmstrio.protocols.openai.fields import Fields, read_truncation, shown
from ovmstrio.protocols.openai.known_fields import RERANK
from ovmstrio.protocols.openai.text_endpoint import parse_off_loop
from ovmstrio.serving.generation_calls import charge_tokens
from ovmstrio.transport.http.responses import JSON_TYPE
from ovmstrio.util.truncation import AT_ONCE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ovmstrio.core.generation import Reranker
    from ovmstrio.core.http_messages import HttpRequest
    from ovmstrio.protocols.openai.api import OpenAIApi
    from ovmstrio.transport.http.router import Rule

_VERSION: Final = "2"  # Version of Cohere's API


class _RerankRequest(NamedTuple):
    """Parsed request; ``top_n`` None returns all documents."""

    query: str
    documents: Sequence[str]
    top_n: int | None
    returns_documents: bool
    options: Mapping[str, int]


def rerank_rules(api: OpenAIApi) -> list[Rule]:
    """Return the routes."""

    async def rerank(request: HttpRequest) -> HttpAnswer:
        body = await api.body(request, RERANK, needs_model=False)
        parsed = await parse_off_loop(partial(_read, body.document), body)
        with await api.call(request, body.model, Task.RERANK) as call:
            scores, tokens = await cast("Reranker", call.service).rerank(
                parsed.query, parsed.documents, **parsed.options
            )
            charge_tokens(tokens)
            write = partial(_write, body.model, parsed, scores, tokens)
            returned = sum(map(len, parsed.documents)) if parsed.returns_documents else 0
            content = write() if returned <= AT_ONCE else await trio.to_thread.run_sync(write)
            call.event.sent = len(content)
        return HttpAnswer(200, JSON_TYPE, content)

    # Cohere's clients append the API version to the configured URL.
    paths = ("/rerank", "/v2/rerank")
    return [rule for path in paths for rule in api.rules(path, "POST", rerank, prefixes=("", *PREFIXES))]


def _read(document: Mapping[str, Any]) -> _RerankRequest:
    errors = ErrorList()
    fields = Fields(document, errors)
    query = fields.text("query", "query is not a string")
    if document.get("query") is None:
        fields.refuse("query", "query is missing in request", code="missing_required_parameter")
    documents = _read_documents(fields)
    top_n = fields.unsigned("top_n") or None  # vLLM's clients send its default 0 for all documents.
    returns = fields.flag("return_documents")
    options = read_truncation(fields)
    RERANK.check(fields)
    errors.raise_if_any()
    return _RerankRequest(query or "", documents, top_n, bool(returns), options)


def _read_documents(fields: Fields) -> list[str]:
    given = fields.items("documents", "documents is not an array of strings")
    if fields.get("documents") is None:
        fields.refuse("documents", "documents is missing in request", code="missing_required_parameter")
    if given is None:
        return []
    if not given:
        fields.refuse("documents", "documents: expected at least 1", got="0")
    texts = []
    for at, each in enumerate(given):
        # Earlier versions of Cohere's API sent documents as objects.
        text = each.get("text") if isinstance(each, dict) else each
        if not isinstance(text, str):
            fields.refuse(
                f"documents[{at}]", f"documents[{at}] is neither a string nor an object with a text", got=shown(each)
            )
            continue
        texts.append(text)
    return texts


def _write(model: str, request: _RerankRequest, scores: Sequence[float], tokens: int) -> bytes:
    """Encode the response, best documents first, ties in input order."""
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[: request.top_n]
    pieces = [b'{"id":%b,"model":%b,"results":[' % (orjson.dumps(str(uuid4())), orjson.dumps(model))]
    for place, index in enumerate(order):
        head = b"," if place else b""
        pieces.append(head + b'{"index":%d,"relevance_score":%b' % (index, orjson.dumps(scores[index])))
        if request.returns_documents:
            pieces += (b',"document":{"text":', *text_pieces(request.documents[index]), b"}")
        pieces.append(b"}")
    account = {
        "meta": {
            "api_version": {"version": _VERSION},
            "billed_units": {"search_units": 1},
            "tokens": {"input_tokens": tokens},
        },
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }
    pieces.append(b"],%b" % orjson.dumps(account)[1:])
    return b"".join(pieces)
