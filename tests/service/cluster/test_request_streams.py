"""Streams of requests that one group passes on to another, without Ray between them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
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
    """A link to a replica in this process."""

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
            assert link.streams.keys == []
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
                (key,) = link.streams.keys
            assert link.streams.keys == []
            assert replica_of(key) == "r1"
            is_open: bool = await link.call_once("push_to_stream", key, _request(1), is_last=False)
            return is_open

    assert not asyncio.run(run())


def test_a_stream_that_is_closed_before_its_first_request_leaves_nothing(tmp_path: Path) -> None:
    """Whoever has opened it was gone before it could use its key."""

    async def run() -> list[str]:
        async with _linked(tmp_path) as link:
            opened = link.stream("open_stream")
            key = await anext(opened)
            assert key in link.streams.keys
            await opened.aclose()
            return link.streams.keys

    assert asyncio.run(run()) == []


def test_a_stream_of_which_nothing_is_heard_any_more_ends(tmp_path: Path) -> None:
    """As the group that has passed it on may be gone; one that is not must not take what has come for all."""

    async def run() -> list[Any]:
        async with _linked(tmp_path, silence_seconds=1) as link, aclosing(link.stream("open_stream")) as replies:
            assert await link.call_once("push_to_stream", await anext(replies), _request(0), is_last=False)
            return [reply async for reply in replies]

    reply, end = asyncio.run(run())
    assert Reply.FromString(reply).infer_response.id == "0"
    assert (end.status, "nothing was heard for 1 s" in end.text) == (Status.UNAVAILABLE.value, True)


def test_who_passes_a_stream_on_says_that_it_is_still_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that one without requests for long is kept."""
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

            return [reply async for reply in pass_stream(link, next_request, beat_seconds=0.01)]

    assert len(asyncio.run(run())) == 1
    assert beats[:3] == [(None, False)] * 3
    assert beats[-1] == (None, True)


def test_what_keeps_a_request_from_its_replica_ends_the_stream_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What came before it is answered; no more replies would come, and nobody is to wait for them."""

    async def run() -> list[bytes]:
        found: list[bytes] = []
        async with _linked(tmp_path) as link:
            push = link.streams.push
            answered = asyncio.Event()
            numbers = iter(range(3))

            async def broken(key: str, message: bytes | None, *, is_last: bool) -> bool:
                if message == _request(1):
                    await answered.wait()
                    raise NotReady("the way is broken")
                return await push(key, message, is_last=is_last)

            async def next_request() -> bytes | None:
                return _request(next(numbers))

            async def receive() -> None:
                async for reply in pass_stream(link, next_request):
                    assert isinstance(reply, bytes)
                    found.append(reply)
                    answered.set()

            monkeypatch.setattr(link.streams, "push", broken)
            with pytest.raises(NotReady, match="the way is broken"):
                await receive()
            assert link.streams.keys == []
        return found

    assert [Reply.FromString(reply).infer_response.id for reply in asyncio.run(run())] == ["0"]


def test_a_request_that_reaches_another_replica_tells_that_the_stream_is_lost(tmp_path: Path) -> None:
    """Ray gives no more calls to one that is being replaced, though its streams are still open."""

    async def run() -> None:
        async with _linked(tmp_path) as link:
            other = OpenStreams("r2", 8)

            async def next_request() -> bytes | None:
                link.streams = other
                return _request(0)

            with pytest.raises(NotReady, match="begin the stream anew"):
                async with aclosing(pass_stream(link, next_request)) as replies:
                    await anext(replies)

    asyncio.run(run())


def test_requests_that_break_off_are_not_taken_for_all(tmp_path: Path) -> None:
    """The stream ends with why they did, behind the replies to those that came."""

    async def run() -> list[Any]:
        given = [_request(0)]

        async def next_request() -> bytes | None:
            if not given:
                raise NotReady("the client's door has ended")
            return given.pop()

        async with _linked(tmp_path) as link:
            return [reply async for reply in answer_stream(link.guest, link.server.grpc, next_request)]

    reply, end = asyncio.run(run())
    assert Reply.FromString(reply).infer_response.id == "0"
    assert end == (b"", Status.UNAVAILABLE.value, "the client's door has ended", ())


def test_more_streams_than_may_be_are_refused(tmp_path: Path) -> None:
    """Whose requests would have no place at the replica; one that ends makes room."""

    async def run() -> list[list[Any]]:
        async def answers(link: _NearLink) -> list[Any]:
            given = [_request(0)]

            async def next_request() -> bytes | None:
                return given.pop() if given else None

            return [reply async for reply in pass_stream(link, next_request)]

        async with _linked(tmp_path, 1) as link:
            async with aclosing(link.stream("open_stream")) as first:
                assert isinstance(await anext(first), str)
                refused = await answers(link)
            return [refused, await answers(link)]

    (refused,), (reply,) = asyncio.run(run())
    assert refused.status == Status.RESOURCE_EXHAUSTED.value
    assert "half of the max_ongoing_requests" in refused.text
    assert Reply.FromString(reply).infer_response.id == "0"
