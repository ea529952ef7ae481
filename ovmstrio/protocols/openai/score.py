"""Endpoint ``/score``: similarity of pairs of texts, in vLLM's API.

A rerank model reads each pair; for an embedding model the score is the cosine of the two embeddings.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from uuid import uuid4

import numpy as np
import trio

from ovmstrio.core.errors import ErrorList, NotSupported, ServerError
from ovmstrio.core.generation import Task
from ovmstrio.protocols.openai.api import PREFIXES
from ovmstrio.protocols.openai.fields import Fields, read_truncation, shown
from ovmstrio.protocols.openai.known_fields import SCORE
from ovmstrio.protocols.openai.text_endpoint import parse_off_loop
from ovmstrio.serving.generation_calls import charge_tokens
from ovmstrio.transport.http.responses import json_response
from ovmstrio.util.truncation import MAX_ITEMS, cut

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ovmstrio.core.generation import Embedder, Reranker
    from ovmstrio.core.http_messages import HttpAnswer, HttpRequest
    from ovmstrio.protocols.openai.api import OpenAIApi
    from ovmstrio.transport.http.router import Rule

_NAMES: Final = (("text_1", "data_1", "queries"), ("text_2", "data_2", "documents"))
"""Names of the first and the second texts in versions of vLLM."""
_CONCURRENT_QUERIES: Final = 8
_NORM_EPSILON: Final = 1e-12


class _ScoreRequest(NamedTuple):
    """Pairs of texts; ``options`` are those of encoders."""

    pairs: Sequence[tuple[str, str]]
    options: Mapping[str, Any]


def score_rules(api: OpenAIApi) -> list[Rule]:
    """Return the routes."""

    async def score(request: HttpRequest) -> HttpAnswer:
        body = await api.body(request, SCORE, needs_model=False)
        parsed = await parse_off_loop(partial(_read, body.document), body)
        with await api.call(request, body.model, None) as call:
            service: Any = call.service
            if Task.RERANK in service.tasks:
                scores, tokens = await _rerank_pairs(service, parsed)
            elif Task.EMBEDDINGS in service.tasks:
                scores, tokens = await _compare_embeddings(service, parsed)
            else:
                raise NotSupported(f'the service "{cut(body.model, 80)}" is no rerank and no embedding model')
            charge_tokens(tokens)
            document = {
                "id": f"score-{uuid4().hex}",
                "object": "list",
                "created": int(time.time()),
                "model": body.model,
                "data": [{"index": at, "object": "score", "score": each} for at, each in enumerate(scores)],
                "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
            }
            answer = json_response(document)
            call.event.sent = len(answer.content)
        return answer

    return api.rules("/score", "POST", score, prefixes=("", *PREFIXES))


async def _rerank_pairs(model: Reranker, parsed: _ScoreRequest) -> tuple[list[float], int]:
    """Return the score of each pair; the documents of a query are one call of the model."""
    places: dict[str, list[int]] = {}
    for place, (query, _) in enumerate(parsed.pairs):
        places.setdefault(query, []).append(place)
    scores = [0.0] * len(parsed.pairs)
    tokens = 0
    failures: list[ServerError] = []
    pending = iter(places.items())

    async def work() -> None:
        nonlocal tokens
        for query, own in pending:
            try:
                made, used = await model.rerank(query, [parsed.pairs[place][1] for place in own], **parsed.options)
            except ServerError as error:
                failures.append(error)
                nursery.cancel_scope.cancel()
                return
            tokens += used
            for place, each in zip(own, made, strict=True):
                scores[place] = each

    async with trio.open_nursery() as nursery:
        for _ in range(min(_CONCURRENT_QUERIES, len(places))):
            nursery.start_soon(work)
    if failures:
        raise failures[0]
    return scores, tokens


async def _compare_embeddings(model: Embedder, parsed: _ScoreRequest) -> tuple[list[float], int]:
    """Return the cosine of each pair; each text is embedded once."""
    places = {text: place for place, text in enumerate(dict.fromkeys(text for pair in parsed.pairs for text in pair))}
    made = await model.embed(list(places), **parsed.options)
    vectors = made.vectors / np.maximum(np.linalg.norm(made.vectors, axis=1, keepdims=True), _NORM_EPSILON)
    left, right = ([places[pair[side]] for pair in parsed.pairs] for side in (0, 1))
    return np.sum(vectors[left] * vectors[right], axis=1).tolist(), made.tokens


def _read(document: Mapping[str, Any]) -> _ScoreRequest:
    errors = ErrorList()
    fields = Fields(document, errors)
    first, second = (_read_texts(fields, names) for names in _NAMES)
    fields.choice("encoding_format", ("float",))
    if first and second and len(first) not in {1, len(second)}:
        message = f"{_NAMES[0][0]}: expected one text, or as many as {_NAMES[1][0]} has ({len(second)})"
        fields.refuse(_NAMES[0][0], message, got=str(len(first)))
    options = read_truncation(fields)
    SCORE.check(fields)
    errors.raise_if_any()
    return _ScoreRequest(list(zip(first if len(first) > 1 else first * len(second), second, strict=True)), options)


def _read_texts(fields: Fields, names: Sequence[str]) -> list[str]:
    given = [name for name in names if fields.get(name) is not None]
    if not given:
        fields.refuse(names[0], f"{names[0]} is missing in request", code="missing_required_parameter")
        return []
    name = given[0]
    if len(given) > 1:
        fields.refuse(given[1], f"{' and '.join(given)} exclude each other")
    value = fields.get(name)
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(each, str) for each in texts):
        fields.refuse(name, f"{name} should be a string or an array of strings", got=shown(value))
    elif not 1 <= len(texts) <= MAX_ITEMS:
        fields.refuse(name, f"{name}: expected 1 to {MAX_ITEMS} texts", got=str(len(texts)))
    else:
        return texts
    return []
