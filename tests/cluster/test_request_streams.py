"""Streams of requests that one group passes on to another, without Ray between them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ovmstrio.cluster.ray import request_streams
from ovmstrio.cluster.ray.group_server import GroupServer, ReplicaPlan
from ovmstrio.cluster.ray.request_streams import OpenStreams, pass_stream
from ovmstrio.cluster.ray.stream_keys import replica_of
from ovmstrio.cluster.ray.trio_guest import TrioGuest
from ovmstrio.config.specs import ModelSpec
from ovmstrio.core.errors import NotReady
from ovmstrio.protocol.descriptors import message_class
from tests.support import ir

Request = message_class("inference.ModelInferRequest")
Reply = message_class("inference.ModelStreamInferResponse")

PATIENCE_SECONDS = 60
COUNT = 40


class _NearLink:
    """A link to a replica in this process."""

    def __init__(self, streams: OpenStreams, guest: TrioGuest, server: GroupServer) -> None:
        self.streams = streams
        self._guest = guest
        self._server = server

    async def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Push to a stream."""
        assert method == "push_to_stream"
        return await self.streams.push(*arguments, **options)

    async def stream(self, method: str, *arguments: Any) -> AsyncGenerator[Any]:
        """Open one."""
        assert (method, arguments) == ("open_stream", ())
        async with aclosing(self.streams.open(self._guest, self._server.grpc)) as replies:
            async for reply in replies:
                yield reply


async def _nobody(*_: Any) -> Any:
    raise NotReady("there is no other group")


@asynccontextmanager
async def _linked(root: Path) -> AsyncIterator[_NearLink]:
    """Serve a model that adds one, as another group's replica."""
    ir.save(ir.dummy(), root, "m")
    settings = {"trial_load": "off", "file_system_poll_wait_seconds": 0}
    guest = TrioGuest()
    plan = ReplicaPlan("far", (ModelSpec(name="m", base_path=root / "m"),), settings=settings)
    server = GroupServer(plan, _nobody)
    async with asyncio.timeout(PATIENCE_SECONDS):
        await guest.start(server.run)
        try:
            yield _NearLink(OpenStreams("r1"), guest, server)
        finally:
            await guest.aclose()


def _request(number: int) -> bytes:
    message = Request(model_name="m", id=str(number))
    message.inputs.add(name="b", datatype="FP32", shape=(1, 10))
    message.raw_input_contents.append(np.full((1, 10), number, np.float32).tobytes())
    data: bytes = message.SerializeToString()
    return data


def test_each_request_of_a_stream_is_answered_in_its_turn(tmp_path: Path) -> None:
    """However many wait; nothing of it is left behind its end."""

    async def run() -> list[tuple[str, float]]:
        numbers = iter(range(COUNT))

        async def next_request() -> bytes | None:
            number = next(numbers, None)
            return None if number is None else _request(number)

        async with _linked(tmp_path) as link:
            found = []
            async for reply in pass_stream(link, next_request):
                assert isinstance(reply, bytes)
                told = Reply.FromString(reply).infer_response
                found.append((told.id, float(np.frombuffer(told.raw_output_contents[0], np.float32)[0])))
            assert link.streams._inboxes == {}
            return found

    assert asyncio.run(run()) == [(str(number), number + 1.0) for number in range(COUNT)]


def test_who_closes_the_replies_has_the_stream_ended_there(tmp_path: Path) -> None:
    """While its next request has not come, and a later one hears that it is over."""

    async def run() -> bool:
        given = [_request(0)]

        async def next_request() -> bytes | None:
            if not given:
                await asyncio.Event().wait()
            return given.pop()

        async with _linked(tmp_path) as link:
            async with aclosing(pass_stream(link, next_request)) as replies:
                assert isinstance(await anext(replies), bytes)
                (key,) = link.streams._inboxes
            assert link.streams._inboxes == {}
            assert replica_of(key) == "r1"
            is_open: bool = await link.call("push_to_stream", key, _request(1), is_last=False)
            return is_open

    assert not asyncio.run(run())


def test_a_stream_of_which_nothing_is_heard_any_more_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the group that has passed it on may be gone."""
    monkeypatch.setattr(request_streams, "_SILENCE_SECONDS", 0.01)

    async def run() -> int:
        async with _linked(tmp_path) as link, aclosing(link.stream("open_stream")) as replies:
            assert await link.call("push_to_stream", await anext(replies), _request(0), is_last=False)
            return len([reply async for reply in replies])

    assert asyncio.run(run()) == 1


def test_who_passes_a_stream_on_says_that_it_is_still_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that one without requests for long is kept."""
    monkeypatch.setattr(request_streams, "_BEAT_SECONDS", 0.01)
    beats: list[Any] = []

    async def run() -> list[Any]:
        async with _linked(tmp_path) as link:
            enough = asyncio.Event()
            push = link.streams.push

            async def noted(key: str, message: bytes | None, *, is_last: bool) -> bool:
                beats.append((message, is_last))
                if len(beats) > 2:
                    enough.set()
                return await push(key, message, is_last=is_last)

            monkeypatch.setattr(link.streams, "push", noted)

            given = [_request(0)]

            async def next_request() -> bytes | None:
                await enough.wait()
                return given.pop() if given else None

            return [reply async for reply in pass_stream(link, next_request)]

    assert len(asyncio.run(run())) == 1
    assert beats[:3] == [(None, False)] * 3
    assert beats[-1] == (None, True)
