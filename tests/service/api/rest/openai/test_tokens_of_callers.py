"""Tokens a minute of a caller, as its clients meet them wherever tokens are read or made."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from ovmstrio.access.allowance import CallerAllowance
from ovmstrio.observability.metrics import Metrics
from tests.service.api.rest.openai.talking import chat_body
from tests.support.callers import bearer, gate_of
from tests.support.text_encoders import WORDS, load_encoder
from tests.support.text_generators import CHAT, load_generator, text_spec
from tests.unit.api.rest.servers import Serving, serving_rest

PATH = "/v3/chat/completions"
SHOP = bearer("shop")


def _serving(
    folder: Path, name: str, loader: Any, allowance: CallerAllowance, **options: Any
) -> AbstractAsyncContextManager[Serving]:
    front_end = {"gate": gate_of({"shop": "infer:*"}, allowance)}
    models = (text_spec(folder / "text", name),)
    return serving_rest(folder, models=models, loader=loader, front_end=front_end, **options)


def _assert_refused(answer: httpx.Response, used: str, seconds: int) -> None:
    assert answer.status_code == 429, answer.text
    assert answer.headers["retry-after"] == str(seconds)
    error = answer.json()["error"]
    assert error["code"] == "rate_limit_exceeded"
    assert f"'shop' may use {used} tokens a minute" in error["message"]


@pytest.mark.parametrize("is_stream", [False, True])
async def test_tokens_that_are_read_and_made_count(
    tmp_path: Path, mock_clock: trio.testing.MockClock, is_stream: bool
) -> None:
    """The request that goes beyond them ends; the next one is refused until they have come in again."""
    async with _serving(tmp_path, CHAT, load_generator, CallerAllowance("shop", tokens_per_minute=6)) as serving:
        body = chat_body("one two", stream=is_stream)
        for _ in range(2):
            assert (await serving.post(PATH, json=body, headers=SHOP)).status_code == 200
        _assert_refused(await serving.post(PATH, json=body, headers=SHOP), "6", 30)
        mock_clock.jump(30)
        assert (await serving.post(PATH, json=body, headers=SHOP)).status_code == 200
        _assert_refused(await serving.post(PATH, json=body, headers=SHOP), "6", 40)


@pytest.mark.parametrize(
    ("path", "more"),
    [("/v3/embeddings", {"input": "banana"}), ("/v3/rerank", {"query": "banana", "documents": ["a"]})],
)
async def test_tokens_of_vectors_and_scores_count(
    tmp_path: Path, mock_clock: trio.testing.MockClock, path: str, more: dict[str, Any]
) -> None:
    """What only counts tokens is free of that; a refusal is counted as those of other limits are."""
    del mock_clock
    allowance, metrics = CallerAllowance("shop", tokens_per_minute=6), Metrics()
    async with _serving(tmp_path, WORDS, load_encoder, allowance, metrics=metrics) as serving:
        assert (await serving.post(path, json={"model": WORDS, **more}, headers=SHOP)).status_code == 200
        answer = await serving.post(path, json={"model": WORDS, **more}, headers=SHOP)
        assert answer.status_code == 429
        body = {"model": WORDS, "text": "banana"}
        assert (await serving.post("/v3/tokenize", json=body, headers=SHOP)).status_code == 200
    assert 'ovmstrio_refused_callers_total{reason="limit"} 1.0' in metrics.render().decode()
