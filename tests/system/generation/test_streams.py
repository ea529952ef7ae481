"""Streams of an engine whose clients leave, or whose server drains."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import httpx
import pytest
import trio

from ovmstrio.server.plan import read_plan
from ovmstrio.server.settings import ServerSettings
from tests.support.served_plans import serving_plan
from tests.support.tiny_llm import write_tiny_folder

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from ovmstrio.runtimes.generation.text_model import TextModel
    from tests.support.served_plans import ServedPlan

pytestmark = pytest.mark.slow

PATIENCE_SECONDS = 120


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the model once."""
    return write_tiny_folder(tmp_path_factory.mktemp("tiny") / "model")


class Served:
    """A server in this process, and a client of it."""

    def __init__(self, server: ServedPlan, client: httpx.AsyncClient) -> None:
        self.server = server
        self.client = client
        self.address = server.rest[0]

    @property
    def model(self) -> TextModel:
        """What makes the text."""
        return cast("TextModel", self.server.plane.registry.peek("chat"))

    async def text(self, prompt: str, tokens: int = 60, **more: Any) -> str:
        """Ask for a whole text."""
        body = {"model": "chat", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **more}
        answer = await self.client.post("/v3/completions", json=body)
        assert answer.status_code == 200, answer.text
        told: str = answer.json()["choices"][0]["text"]
        return told

    async def begun(self, prompt: str, tokens: int = 1500, **more: Any) -> trio.SocketStream:
        """Ask for events on a connection of its own, of which nothing has been read yet."""
        body = {"model": "chat", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **more}
        data = json.dumps({**body, "stream": True}).encode()
        host, _, port = self.address.rpartition(":")
        stream = await trio.open_tcp_stream(host, int(port))
        head = f"POST /v3/completions HTTP/1.1\r\nHost: h\r\nContent-Length: {len(data)}\r\n\r\n"
        await stream.send_all(head.encode() + data)
        return stream

    async def idle(self) -> None:
        """Return when no request is open any more."""
        with trio.fail_after(PATIENCE_SECONDS):
            while self.model.open_requests:
                await self.client.get("/v2/health/live")


@asynccontextmanager
async def serving_chat(folder: Path, *, drains: bool = False, **settings: Any) -> AsyncIterator[Served]:
    """Serve the model of a folder.

    There is no cache of prefixes, and nothing is computed in bfloat16: which of two tokens that are all but
    equally likely comes next must not depend on what else is in the batch.
    """
    loopback: dict[str, Any] = {"grpc_bind_address": "127.0.0.1", "rest_bind_address": "127.0.0.1"}
    exact = '{"INFERENCE_PRECISION_HINT": "f32"}'
    task = {"task": "text_generation", "enable_prefix_caching": False, "plugin_config": exact}
    given = {"model_name": "chat", "model_path": folder, **task}
    plan = await read_plan(ServerSettings(**{**loopback, "trial_load": "off", **given, **settings}))
    plan = replace(plan, grpc=("127.0.0.1:0",), rest=("127.0.0.1:0",))
    async with serving_plan(plan, drains=drains) as server:
        with trio.fail_after(PATIENCE_SECONDS):
            await server.plane.registry.wait_loaded()
        url = f"http://{server.rest[0]}"
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_SECONDS, trust_env=False) as client:
            yield Served(server, client)


async def _events(stream: trio.SocketStream) -> str:
    data = b""
    with trio.fail_after(PATIENCE_SECONDS):
        while b"[DONE]" not in data and b'"error"' not in data:
            more = await stream.receive_some()
            if not more:
                break
            data += more
    return data.decode()


def _text(events: str) -> str:
    documents = (json.loads(line[6:]) for line in events.splitlines() if line.startswith("data: {"))
    return "".join(choice["text"] for each in documents for choice in each.get("choices", ()))


async def test_clients_that_leave_change_no_other_text(folder: Path) -> None:
    """Clients leave after different counts of bytes, and no request of theirs stays open."""
    async with serving_chat(folder) as served:
        alone = await served.text("of the barn", 400)
        beside: list[str] = []

        async def stay() -> None:
            beside.append(await served.text("of the barn", 400))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(stay)
            for chunk in range(40):
                async with await served.begun(f"number {chunk}") as stream:
                    for _ in range(chunk):
                        assert await stream.receive_some(256)
        await served.idle()
        assert beside == [alone]
        assert await served.text("of the barn", 400) == alone


async def test_a_drain_waits_for_streams(folder: Path) -> None:
    """The stream is complete, and the server ends."""
    async with serving_chat(folder, drains=True, drain_seconds=PATIENCE_SECONDS) as served:
        alone = await served.text("of the barn", 1000)
        async with await served.begun("of the barn", 1000) as stream:
            begun = (await stream.receive_some(64)).decode()
            served.server.drain()
            rest = await _events(stream)
    assert "[DONE]" in rest
    assert _text((begun + rest).replace("\r\n", "\n")) == alone
