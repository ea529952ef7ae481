"""Streams of requests: answered by the trio side, and passed on to the replica of another group that has the service.

::

    group with the doors ── open ──────────────> a replica of the other group ──> the key of the stream, and its replies
                         ── push(key, request) ──────────^  the same replica, by the key

A replica that has ended takes its streams with it, and so does one that no call finds any more, as it is being
replaced.  Whatever keeps a request from its replica ends the stream at once with what it was.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any, Final, Protocol

import trio

from ovmstrio.cluster.ray.grpc import GrpcAnswer
from ovmstrio.cluster.ray.grpc_paths import STREAM
from ovmstrio.cluster.ray.stream_keys import make_key, replica_of
from ovmstrio.core.errors import NotReady, Overloaded, ServerError

if TYPE_CHECKING:
    from ovmstrio.cluster.ray.grpc import GrpcDoor
    from ovmstrio.cluster.ray.trio_guest import TrioGuest

__all__ = ["OpenStreams", "StreamReply", "answer_stream", "pass_stream"]

StreamReply = bytes | GrpcAnswer
"""A message of the answer, or in the end the status that is not OK."""
NextRequest = Callable[[], Awaitable[bytes | None]]
"""Gives the next request of a stream; None behind the last one."""

_WAITING: Final = 8
"""How many requests of a stream may wait for their replica's server."""
_BEAT_SECONDS: Final = 20.0
_SILENCE_SECONDS: Final = 90.0
"""Who passes a stream on says at times that it is still there; where nothing comes for this long, it is not."""
_FULL: Final = (
    "{} streams of requests are open at this replica, and no more may be: half of the max_ongoing_requests of its "
    "placement, as each of their requests needs a place, too; raise that, or the number of replicas"
)


class StreamLink(Protocol):
    """A way to the replicas of another group."""

    async def call_once(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Call a method of one of them, and no other one when that is lost."""
        ...

    def stream(self, method: str, *arguments: Any) -> AsyncGenerator[Any]:
        """Call a method that gives one thing after the other."""
        ...


async def answer_stream(guest: TrioGuest, door: GrpcDoor, next_request: NextRequest) -> AsyncGenerator[StreamReply]:
    """Have the trio side answer a stream.

    Cancellation: of both directions, when it is closed.
    """
    send_request, receive_request = trio.open_memory_channel[bytes](0)
    send_reply, receive_reply = trio.open_memory_channel[bytes](0)
    broken: list[ServerError] = []

    async def pass_on() -> None:
        try:
            with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                while (message := await next_request()) is not None:
                    await guest.call(send_request.send, message)
        except ServerError as error:
            broken.append(error)
        finally:
            await guest.call(send_request.aclose)

    answering = asyncio.ensure_future(guest.call(door.stream, receive_request, send_reply))
    passing = asyncio.ensure_future(pass_on())
    try:
        with suppress(trio.EndOfChannel):
            while True:
                yield await guest.call(receive_reply.receive)
        failure = await answering
        if failure is None and broken:
            # What has come so far is not to be taken for all.
            failure = door.refuse(broken[0], STREAM)
    except ServerError as error:
        failure = door.refuse(error, STREAM)
    finally:
        answering.cancel()
        passing.cancel()
        await asyncio.gather(answering, passing, return_exceptions=True)
    if failure is not None:
        yield failure


async def pass_stream(
    link: StreamLink, next_request: NextRequest, *, beat_seconds: float = _BEAT_SECONDS
) -> AsyncGenerator[StreamReply]:
    """Have a replica of another group answer a stream.

    Args:
        link: leads to the replicas of that group.
        next_request: returns the next request of the stream.
        beat_seconds: interval of the signs of life while no request comes.

    Raises:
        NotReady: there is no replica, or it has ended under the stream, or is being replaced.
        Exception: what kept a request from it.

    Cancellation: of both directions, and there, too, when it is closed.
    """
    async with aclosing(link.stream("open_stream")) as replies:
        key = await anext(replies)
        passing = asyncio.ensure_future(_push_all(link, key, next_request, beat_seconds))
        try:
            while (reply := await _next_reply(replies, passing)) is not None:
                yield reply
        finally:
            passing.cancel()
            await asyncio.gather(passing, return_exceptions=True)


async def _next_reply(replies: AsyncGenerator[Any], passing: asyncio.Future[None]) -> Any:
    """Give the next reply; None behind the last one.

    Raises:
        Exception: what ended the replies, or what kept a request from its replica, so that none would come.
    """

    async def receive() -> Any:
        return await anext(replies, None)

    coming = asyncio.ensure_future(receive())
    try:
        if not passing.done():
            await asyncio.wait({coming, passing}, return_when=asyncio.FIRST_COMPLETED)
        if passing.done() and not coming.done():
            passing.result()
        return await coming
    finally:
        coming.cancel()
        await asyncio.gather(coming, return_exceptions=True)


async def _push_all(link: StreamLink, key: str, next_request: NextRequest, beat_seconds: float) -> None:
    is_open = True
    while is_open:
        coming = asyncio.ensure_future(next_request())
        try:
            while is_open and not (await asyncio.wait({coming}, timeout=beat_seconds))[0]:
                is_open = await link.call_once("push_to_stream", key, None, is_last=False)
            if not is_open:
                return
            message = await coming
        finally:
            coming.cancel()
        is_taken = await link.call_once("push_to_stream", key, message, is_last=message is None)
        is_open = is_taken and message is not None


class OpenStreams:
    """The streams that other groups have opened at this replica; on the asyncio side.

    Args:
        replica: its name for Ray.
        most: how many of them there may be.
        silence_seconds: timeout of a stream whose other side sends nothing, not even a sign of life.
    """

    def __init__(self, replica: str, most: int, *, silence_seconds: float = _SILENCE_SECONDS) -> None:
        self._replica = replica
        self._most = most
        self._silence_seconds = silence_seconds
        self._inboxes: dict[str, asyncio.Queue[tuple[bytes | None, bool]]] = {}

    @property
    def keys(self) -> list[str]:
        """Keys of the open streams."""
        return list(self._inboxes)

    async def open(self, guest: TrioGuest, door: GrpcDoor) -> AsyncGenerator[str | StreamReply]:
        """Give the key of a new stream, and then its replies; or its status, where there are as many as may be."""
        key = make_key(self._replica)
        if len(self._inboxes) >= self._most:
            yield key
            yield door.refuse(Overloaded(_FULL.format(self._most)), STREAM)
            return
        inbox = self._inboxes[key] = asyncio.Queue(_WAITING)

        async def next_request() -> bytes | None:
            while True:
                try:
                    async with asyncio.timeout(self._silence_seconds):
                        message, is_last = await inbox.get()
                except TimeoutError:
                    raise NotReady(
                        f"nothing was heard for {self._silence_seconds:g} s of who passes the stream on"
                    ) from None
                if is_last or message is not None:
                    return message

        try:
            yield key
            async with aclosing(answer_stream(guest, door, next_request)) as replies:
                async for reply in replies:
                    yield reply
        finally:
            del self._inboxes[key]
            # Who waits for room has to hear that there is nobody any more.
            while not inbox.empty():
                inbox.get_nowait()

    async def push(self, key: str, message: bytes | None, *, is_last: bool) -> bool:
        """Take a request of a stream, or its end, or a sign of life; gives whether the stream is still open.

        Raises:
            NotReady: it is another replica's, which is not found any more.

        Cancellation: while there is no room.
        """
        if replica_of(key) != self._replica:
            raise NotReady("the replica of this stream has ended, or is being replaced; begin the stream anew")
        inbox = self._inboxes.get(key)
        if inbox is not None:
            await inbox.put((message, is_last))
        return key in self._inboxes
