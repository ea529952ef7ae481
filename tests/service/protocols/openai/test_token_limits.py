from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from ovmstrio.auth.quota import CallerQuota
from ovmstrio.telemetry.metrics import Metrics
from tests.service.protocols.openai.servers import EARS, VOICE, WORDS, chat_body, serve_openai
from tests.support.callers import bearer, gate_of
from tests.unit.protocols.servers import Serving

CHATS, SHOP = "/v3/chat/completions", bearer("shop")


def _gate(tokens_per_minute: int) -> dict[str, Any]:
    return {"gate": gate_of({"shop": "infer:*"}, CallerQuota("shop", tokens_per_minute=tokens_per_minute))}


async def _post(serving: Serving, path: str, body: dict[str, Any]) -> httpx.Response:
    return await serving.post(path, json=body, headers=SHOP)


def _check_refused(answer: httpx.Response, used: str, seconds: int) -> None:
    assert (answer.status_code, answer.headers["retry-after"]) == (429, str(seconds)), answer.text
    error = answer.json()["error"]
    assert error["code"] == "rate_limit_exceeded"
    assert f"'shop' is limited to {used} tokens per minute" in error["message"]


@pytest.mark.parametrize("is_stream", [False, True])
async def test_tokens_of_chats_count(tmp_path: Path, mock_clock: trio.testing.MockClock, is_stream: bool) -> None:
    body = chat_body("one two", stream=is_stream)
    async with serve_openai(tmp_path, front_end=_gate(6)) as serving:
        # The request that exceeds the limit is answered, and the next one is refused.
        for _ in range(2):
            assert (await _post(serving, CHATS, body)).status_code == 200
        _check_refused(await _post(serving, CHATS, body), "6", 30)
        mock_clock.jump(30)
        assert (await _post(serving, CHATS, body)).status_code == 200
        _check_refused(await _post(serving, CHATS, body), "6", 40)


@pytest.mark.parametrize(
    ("path", "more"),
    [("/v3/embeddings", {"input": "banana"}), ("/v3/rerank", {"query": "banana", "documents": ["a"]})],
)
async def test_tokens_of_embeddings_and_ranks_count(
    tmp_path: Path, mock_clock: trio.testing.MockClock, path: str, more: dict[str, Any]
) -> None:
    metrics = Metrics()
    async with serve_openai(tmp_path, front_end=_gate(6), metrics=metrics) as serving:
        assert [(await _post(serving, path, {"model": WORDS, **more})).status_code for _ in range(2)] == [200, 429]
        assert (await _post(serving, "/v3/tokenize", {"model": WORDS, "text": "banana"})).status_code == 200
    assert 'ovmstrio_auth_failures_total{reason="limit"} 1.0' in metrics.render().decode()


async def test_speech_and_recordings_do_not_count(tmp_path: Path, mock_clock: trio.testing.MockClock) -> None:
    async with serve_openai(tmp_path, front_end=_gate(1)) as serving:
        assert [(await _post(serving, CHATS, chat_body())).status_code for _ in range(2)] == [200, 429]
        spoken = await _post(serving, "/v3/audio/speech", {"model": VOICE, "input": "three"})
        form: dict[str, Any] = {"data": {"model": EARS}, "files": {"file": ("a.wav", b"sound", "audio/wav")}}
        heard = await serving.post("/v3/audio/transcriptions", headers=SHOP, **form)
    assert (spoken.status_code, heard.status_code) == (200, 200)
