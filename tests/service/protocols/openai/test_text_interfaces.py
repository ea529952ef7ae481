"""Behaviour that all interfaces of text generation share, over scripted services."""

from __future__ import annotations

from typing import Any, Final

import pytest
import trio

from ovmstrio.core.generation import GenerationChunk
from tests.service.protocols.openai.servers import CHAT, chat_body, expect_cancelled_on_disconnect, post_of, service_of
from tests.unit.protocols.servers import Serving

_BODIES: Final[dict[str, dict[str, Any]]] = {
    "/v3/chat/completions": chat_body(),
    "/v3/completions": {"model": CHAT, "prompt": "one two"},
    "/v3/responses": {"model": CHAT, "input": "one two"},
    "/v1/messages": chat_body(max_tokens=9),
    "/api/chat": chat_body(),
    "/api/generate": {"model": CHAT, "prompt": "one two"},
}
_EACH_PATH: Final = pytest.mark.parametrize("path", _BODIES)


@_EACH_PATH
@pytest.mark.parametrize("stream", [False, True])
async def test_a_disconnected_client_cancels_its_request(serving: Serving, path: str, stream: bool) -> None:
    service_of(serving).script = lambda _: (GenerationChunk(text="a"), trio.Event())
    await expect_cancelled_on_disconnect(serving, CHAT, post_of(path, _BODIES[path] | {"stream": stream}))


@pytest.mark.parametrize(("path", "api"), [("/v1/messages", "Anthropic"), ("/api/chat", "Ollama")])
async def test_calls_count_in_the_metrics_of_the_api(serving: Serving, path: str, api: str) -> None:
    for stream in (False, True):
        assert (await serving.post(path, json=_BODIES[path] | {"stream": stream})).status_code == 200
    text = (await serving.get("/metrics")).text
    for method in ("Unary", "Stream"):
        labels = f'api="{api}",interface="REST",method="{method}",name="{CHAT}",version="1"'
        assert f"ovms_requests_success{{{labels}}} 1" in text
