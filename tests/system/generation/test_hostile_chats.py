"""A server that makes text, among clients that leave, do not read or come all at once, and without its engine."""

from __future__ import annotations

import json
import os
import signal
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

    @property
    def pid(self) -> int:
        """Of the engine."""
        pid = self.model._process.pid
        assert pid is not None
        return pid

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

    async def made(self) -> None:
        """Return when the engine has made all that it was asked for, whoever has it."""
        with trio.fail_after(PATIENCE_SECONDS):
            while not all(answer.is_over for answer in self.model._link._answers.values()):
                await self.client.get("/v2/health/live")

    async def idle(self) -> None:
        """Return when no request is open any more."""
        with trio.fail_after(PATIENCE_SECONDS):
            while self.model.open_requests:
                await self.client.get("/v2/health/live")


@asynccontextmanager
async def serving_chat(folder: Path | None, *, drains: bool = False, **settings: Any) -> AsyncIterator[Served]:
    """Serve the model of a folder, or what the settings name.

    There is no cache of prefixes, and nothing is computed in bfloat16: which of two tokens that are all but
    equally likely comes next must not depend on what else is in the batch.
    """
    loopback: dict[str, Any] = {"grpc_bind_address": "127.0.0.1", "rest_bind_address": "127.0.0.1"}
    exact = '{"INFERENCE_PRECISION_HINT": "f32"}'
    task = {"task": "text_generation", "enable_prefix_caching": False, "plugin_config": exact}
    given = {"model_name": "chat", "model_path": folder, **task} if folder else {}
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


async def test_clients_that_leave_at_every_chunk_leave_nothing_and_change_nobodys_text(folder: Path) -> None:
    """One leaves without having read anything, one after the first bytes, and so on."""
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


async def test_fifty_streams_at_once_each_get_what_they_would_alone(folder: Path) -> None:
    """However they are mixed in the batch."""
    async with serving_chat(folder) as served:
        alone = [await served.text(f"number {number}") for number in range(50)]
        texts = [""] * 50

        async def talk(number: int) -> None:
            async with await served.begun(f"number {number}", 60) as stream:
                texts[number] = _text(await _events(stream))

        async with trio.open_nursery() as nursery:
            for number in range(50):
                nursery.start_soon(talk, number)
        assert texts == alone
        await served.idle()


async def test_readers_that_do_not_read_hold_up_nobody_and_get_all_of_it_later(folder: Path) -> None:
    """What they are sent waits for them, and the batch does not."""
    async with serving_chat(folder) as served:
        alone = await served.text("slow", 1500)
        slow = [await served.begun("slow", 1500) for _ in range(4)]
        try:
            fast = [await served.text(f"number {number}") for number in range(8)]
            # Their texts are made to the end, though nothing of them has been read.
            await served.made()
            late = [_text(await _events(stream)) for stream in slow]
        finally:
            for stream in slow:
                await stream.aclose()
        assert late == [alone] * 4
        assert fast == [await served.text(f"number {number}") for number in range(8)]


async def test_an_engine_that_is_killed_ends_its_own_streams_alone_and_comes_back(folder: Path) -> None:
    """They are told so by an event; the server goes on, and the next process makes the same text."""
    async with serving_chat(folder) as served:
        alone = await served.text("of the barn")
        streams = [await served.begun(f"number {number}", 1900) for number in range(6)]
        for stream in streams:
            assert await stream.receive_some(64)
        pid = served.pid
        os.kill(pid, signal.SIGKILL)
        told = [await _events(stream) for stream in streams]
        for stream in streams:
            await stream.aclose()
        assert (await served.client.get("/v2/health/live")).status_code == 200
        assert all('"error"' in each and "SIGKILL" in each and "[DONE]" not in each for each in told)
        await served.idle()
        body = {"model": "chat", "prompt": "x", "max_tokens": 1}
        with trio.fail_after(PATIENCE_SECONDS):
            while (answer := await served.client.post("/v3/completions", json=body)).status_code != 200:
                assert answer.status_code == 503, answer.text
                await trio.lowlevel.checkpoint()
        assert served.pid != pid
        assert await served.text("of the barn") == alone


async def test_a_drain_lets_streams_come_to_their_ends(folder: Path) -> None:
    """The server ends gently behind them."""
    async with serving_chat(folder, drains=True, drain_seconds=PATIENCE_SECONDS) as served:
        alone = await served.text("of the barn", 1000)
        async with await served.begun("of the barn", 1000) as stream:
            begun = (await stream.receive_some(64)).decode()
            served.server.drain()
            rest = await _events(stream)
    assert "[DONE]" in rest
    assert _text((begun + rest).replace("\r\n", "\n")) == alone


async def test_a_reload_leaves_streams_to_the_engine_that_they_began_with(tmp_path: Path) -> None:
    """The new one answers what comes from then on; the old one ends with its last stream."""
    model = write_tiny_folder(tmp_path / "model")
    config = tmp_path / "config.json"
    entry = {"name": "chat", "base_path": str(model), "task": "text_generation", "enable_prefix_caching": False}
    config.write_text(json.dumps({"model_config_list": [], "text_model_config_list": [{"config": entry}]}))
    async with serving_chat(None, config_path=config) as served:
        alone = await served.text("of the barn", 1900)
        first, old = served.pid, served.model
        async with await served.begun("of the barn", 1900) as stream:
            begun = (await stream.receive_some(64)).decode()
            (model / "generation_config.json").write_text('{"max_new_tokens": 7}')
            answer = await served.client.post("/v1/config/reload")
            assert answer.status_code == 201, answer.text
            assert served.pid != first
            assert await served.text("of the barn", 8)
            rest = await _events(stream)
        assert _text((begun + rest).replace("\r\n", "\n")) == alone
        with trio.fail_after(PATIENCE_SECONDS):
            while old._process.pid is not None:
                await served.client.get("/v2/health/live")
