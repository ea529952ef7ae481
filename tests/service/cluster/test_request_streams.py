"""Streams of requests that one group passes on to another, without Ray between them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from grpclib.const import Status

from ovmstrio.cluster.ray.group_server import GroupServer, ReplicaPlan
from ovmstrio.cluster.ray.request_streams import OpenStreams, answer_stream, pass_stream
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
    def __init__(self, streams: OpenStreams, guest: TrioGuest, server: GroupServer) -> None:
        self.streams = streams
        self.guest = guest
        self.server = server

    async def call_once(self, method: str, *arguments: Any, **options: Any) -> Any:
        assert method == "push_to_stream"
        return await self.streams.push(*arguments, **options)

    async def stream(self, method: str, *arguments: Any) -> AsyncGenerator[Any]:
        assert (method, arguments) == ("open_stream", ())
        async with aclosing(self.streams.open(self.guest, self.server.grpc)) as replies:
            async for reply in replies:
                yield reply


async def _nobody(*_: Any) -> Any:
    raise NotReady("there is no other group")


@asynccontextmanager
async def _linked(root: Path, most: int = 8, **options: float) -> AsyncIterator[_NearLink]:
    ir.save(ir.dummy(), root, "m")
    settings = {"trial_load": "off", "file_system_poll_wait_seconds": 0}
    guest = TrioGuest()
    plan = ReplicaPlan("far", (ModelSpec(name="m", base_path=root / "m"),), settings=settings)
    server = GroupServer(plan, _nobody)
    async with asyncio.timeout(PATIENCE_SECONDS):
        await guest.start(server.run)
        try:
            yield _NearLink(OpenStreams("r1", most, **options), guest, server)
        finally:
            await guest.aclose()


def _request(number: int) -> bytes:
    message = Request(model_name="m", id=str(number))
    message.inputs.add(name="b", datatype="FP32", shape=(1, 10))
    message.raw_input_contents.append(np.full((1, 10), number, np.float32).tobytes())
    data: bytes = message.SerializeToString()
    return data


def _on_link(
    most: int = 8, **options: float
) -> Callable[[Callable[[_NearLink], Awaitable[None]]], Callable[..., None]]:
    """Decorate a test that gets a link to a replica, and runs on an asyncio loop of its own."""

    def decorate(test: Callable[[_NearLink], Awaitable[None]]) -> Callable[..., None]:
        async def run(root: Path) -> None:
            async with _linked(root, most, **options) as link:
                await test(link)

        # Pytest would take the parameter of a wrapped function for a fixture.
        return lambda tmp_path: asyncio.run(run(tmp_path))

    return decorate


def _sending(*numbers: int) -> Callable[[], Awaitable[bytes | None]]:
    left = iter(numbers)

    async def next_request() -> bytes | None:
        number = next(left, None)
        return None if number is None else _request(number)

    return next_request


def _id(reply: Any) -> str:
    assert isinstance(reply, bytes)
    found: str = Reply.FromString(reply).infer_response.id
    return found


@_on_link()
async def test_the_requests_of_a_stream_are_answered_in_order(link: _NearLink) -> None:
    found = []
    async for reply in pass_stream(link, _sending(*range(COUNT))):
        assert isinstance(reply, bytes)
        response = Reply.FromString(reply).infer_response
        found.append((response.id, float(np.frombuffer(response.raw_output_contents[0], np.float32)[0])))
    assert link.streams.keys == []
    assert found == [(str(number), number + 1.0) for number in range(COUNT)]


@_on_link()
async def test_closing_the_replies_ends_the_stream_at_the_replica(link: _NearLink) -> None:
    given = [_request(0)]

    async def next_request() -> bytes | None:
        if not given:
            await asyncio.Event().wait()
        return given.pop()

    async with aclosing(pass_stream(link, next_request)) as replies:
        assert isinstance(await anext(replies), bytes)
        (key,) = link.streams.keys
    assert link.streams.keys == []
    assert replica_of(key) == "r1"
    assert not await link.call_once("push_to_stream", key, _request(1), is_last=False)


@_on_link()
async def test_a_stream_that_is_closed_before_its_first_request_is_removed(link: _NearLink) -> None:
    opened = link.stream("open_stream")
    key = await anext(opened)
    assert key in link.streams.keys
    await opened.aclose()
    assert link.streams.keys == []


@_on_link(silence_seconds=1)
async def test_a_silent_stream_ends_as_unavailable(link: _NearLink) -> None:
    async with aclosing(link.stream("open_stream")) as replies:
        assert await link.call_once("push_to_stream", await anext(replies), _request(0), is_last=False)
        reply, end = [reply async for reply in replies]
    assert _id(reply) == "0"
    assert (end.status, "nothing was heard for 1 s" in end.text) == (Status.UNAVAILABLE.value, True)


@_on_link()
async def test_heartbeats_keep_a_stream_without_requests_open(link: _NearLink) -> None:
    beats: list[Any] = []
    enough = asyncio.Event()
    push = link.streams.push
    given = [_request(0)]

    async def record(key: str, message: bytes | None, *, is_last: bool) -> bool:
        beats.append((message, is_last))
        if len(beats) > 2:
            enough.set()
        return await push(key, message, is_last=is_last)

    async def next_request() -> bytes | None:
        await enough.wait()
        return given.pop() if given else None

    link.streams.push = record  # type: ignore[method-assign]
    replies = [reply async for reply in pass_stream(link, next_request, beat_seconds=0.01)]
    assert len(replies) == 1
    assert beats[:3] == [(None, False)] * 3
    assert beats[-1] == (None, True)


@_on_link()
async def test_a_request_that_cannot_be_passed_on_ends_the_stream(link: _NearLink) -> None:
    found: list[str] = []
    push = link.streams.push
    answered = asyncio.Event()

    async def fail_second(key: str, message: bytes | None, *, is_last: bool) -> bool:
        if message == _request(1):
            await answered.wait()
            raise NotReady("the connection is broken")
        return await push(key, message, is_last=is_last)

    async def receive() -> None:
        async for reply in pass_stream(link, _sending(0, 1, 2)):
            found.append(_id(reply))
            answered.set()

    link.streams.push = fail_second  # type: ignore[method-assign]
    with pytest.raises(NotReady, match="the connection is broken"):
        await receive()
    assert link.streams.keys == []
    assert found == ["0"]


@_on_link()
async def test_a_request_that_reaches_another_replica_ends_the_stream(link: _NearLink) -> None:
    # Ray sends no more calls to a replica that is being replaced, though its streams are still open.
    other = OpenStreams("r2", 8)

    async def next_request() -> bytes | None:
        link.streams = other
        return _request(0)

    with pytest.raises(NotReady, match="begin the stream anew"):
        async with aclosing(pass_stream(link, next_request)) as replies:
            await anext(replies)


@_on_link()
async def test_requests_that_break_off_end_the_stream_with_the_reason(link: _NearLink) -> None:
    given = [_request(0)]

    async def next_request() -> bytes | None:
        if not given:
            raise NotReady("the client's door has ended")
        return given.pop()

    reply, end = [reply async for reply in answer_stream(link.guest, link.server.grpc, next_request)]
    assert isinstance(reply, bytes)
    assert _id(reply) == "0"
    assert end == (b"", Status.UNAVAILABLE.value, "the client's door has ended", ())


@_on_link(1)
async def test_streams_beyond_the_limit_are_refused_until_one_ends(link: _NearLink) -> None:
    async with aclosing(link.stream("open_stream")) as first:
        assert isinstance(await anext(first), str)
        (refused,) = [reply async for reply in pass_stream(link, _sending(0))]
    assert not isinstance(refused, bytes)
    assert refused.status == Status.RESOURCE_EXHAUSTED.value
    assert "half of the max_ongoing_requests" in refused.text
    (reply,) = [reply async for reply in pass_stream(link, _sending(0))]
    assert _id(reply) == "0"
