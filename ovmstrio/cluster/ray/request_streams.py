"""Inference streams: answered on the trio side, and forwarded to a replica of another group.

::

    ingress group ── open ─────────────────────> replica of the other group ──> stream key, then replies
                  ── push(key, request) ──────^  the same replica, by key

A stream ends with its replica, also when the replica is being replaced.  An error in forwarding a request ends the
stream
with that error.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any, Final, Protocol

import trio

from ovmstrio.cluster.ray.controller import make_key, replica_of
from ovmstrio.cluster.ray.grpc import GrpcResult
from ovmstrio.cluster.ray.grpc_services import STREAM
from ovmstrio.core.errors import NotReady, Overloaded, ServerError

if TYPE_CHECKING:
    from ovmstrio.cluster.ray.grpc import ClusterGrpcHandler
    from ovmstrio.cluster.ray.trio_guest import TrioGuest

StreamReply = bytes | GrpcResult
"""A reply, or at the end a status other than OK."""
NextRequest = Callable[[], Awaitable[bytes | None]]
"""Returns the next request, or None at the end."""

_MAX_BUFFERED_REQUESTS: Final = 8
"""Maximum buffered requests per stream."""
_BEAT_SECONDS: Final = 20.0
_SILENCE_SECONDS: Final = 90.0
"""A stream without requests or heartbeats for this time is closed."""
_FULL: Final = (
    "{} streams are open at this replica, the limit (half of the max_ongoing_requests of its "
    "placement); raise it, or the number of replicas"
)


class StreamLink(Protocol):
    """Connection to the replicas of another group."""

    async def call_once(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Call a method of a replica without repetition."""

    def stream(self, method: str, *arguments: Any) -> AsyncGenerator[Any]:
        """Call a streaming method."""


async def answer_stream(
    guest: TrioGuest, handler: ClusterGrpcHandler, next_request: NextRequest
) -> AsyncGenerator[StreamReply]:
    """Answer a stream on the trio side."""
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

    answering = asyncio.ensure_future(guest.call(handler.stream, receive_request, send_reply))
    passing = asyncio.ensure_future(pass_on())
    try:
        with suppress(trio.EndOfChannel):
            while True:
                yield await guest.call(receive_reply.receive)
        failure = await answering
        if failure is None and broken:
            # The replies so far are incomplete.
            failure = handler.refuse(broken[0], STREAM)
    except ServerError as error:
        failure = handler.refuse(error, STREAM)
    finally:
        answering.cancel()
        passing.cancel()
        await asyncio.gather(answering, passing, return_exceptions=True)
    if failure is not None:
        yield failure


async def pass_stream(
    link: StreamLink, next_request: NextRequest, *, beat_seconds: float = _BEAT_SECONDS
) -> AsyncGenerator[StreamReply]:
    """Forward a stream to a replica of another group.

    Args:
        link: connection to the group.
        next_request: returns the next request.
        beat_seconds: heartbeat interval while there are no requests.

    Raises:
        NotReady: there is no replica, or it was lost or is being replaced.
        Exception: a request could not be forwarded.
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
    """Streams that other groups have opened at this replica; on the asyncio side.

    Args:
        replica: Ray's replica id.
        silence_seconds: timeout without requests or heartbeats.
    """

    def __init__(self, replica: str, max_streams: int, *, silence_seconds: float = _SILENCE_SECONDS) -> None:
        self._replica = replica
        self._most = max_streams
        self._silence_seconds = silence_seconds
        self._inboxes: dict[str, asyncio.Queue[tuple[bytes | None, bool]]] = {}

    @property
    def keys(self) -> list[str]:
        """Keys of the open streams."""
        return list(self._inboxes)

    async def open(self, guest: TrioGuest, handler: ClusterGrpcHandler) -> AsyncGenerator[str | StreamReply]:
        """Yield the key of a new stream, then its replies; a status if the limit is reached."""
        key = make_key(self._replica)
        if len(self._inboxes) >= self._most:
            yield key
            yield handler.refuse(Overloaded(_FULL.format(self._most)), STREAM)
            return
        inbox = self._inboxes[key] = asyncio.Queue(_MAX_BUFFERED_REQUESTS)

        async def next_request() -> bytes | None:
            while True:
                try:
                    async with asyncio.timeout(self._silence_seconds):
                        message, is_last = await inbox.get()
                except TimeoutError:
                    raise NotReady(
                        f"stream timed out: no request or heartbeat for {self._silence_seconds:g} s"
                    ) from None
                if is_last or message is not None:
                    return message

        try:
            yield key
            async with aclosing(answer_stream(guest, handler, next_request)) as replies:
                async for reply in replies:
                    yield reply
        finally:
            del self._inboxes[key]
            # Wake up senders that wait for room.
            while not inbox.empty():
                inbox.get_nowait()

    async def push(self, key: str, message: bytes | None, *, is_last: bool) -> bool:
        """Add a request, the end or a heartbeat to a stream; return whether the stream is open.

        Raises:
            NotReady: the stream belongs to another replica, which cannot be reached any more.
        """
        if replica_of(key) != self._replica:
            raise NotReady("the replica of this stream has stopped; restart the stream")
        inbox = self._inboxes.get(key)
        if inbox is not None:
            await inbox.put((message, is_last))
        return key in self._inboxes
