"""The short way over HTTP/1.1: read the request, have it answered, write the answer, without any framework.

Only plain requests whose routes are hot go this way.  At the first request that
is anything else, the connection leaves the lane for good, with every byte that has been read, so that all judging of
odd input is done by one careful parser.

::

    socket ─> buffer ─> head, body ─> what the router found ─> socket
                                          │ waits for something
                                          └─> reader task ─> end of stream: the call in progress is cancelled

Calls that never wait are read, answered and sent in one step of one task.

A client that closes its sending side while it waits cannot be told from one that is gone; its call is cancelled.  A
request that was complete before that is answered.

A connection is closed for want of a request only if no byte of one has come, to the lane or to the system.
"""

from __future__ import annotations

import re
from enum import Enum, auto
from typing import TYPE_CHECKING, Final, NamedTuple

import trio

from ovmstrio.core.callers import leave_caller
from ovmstrio.core.connection import UNKNOWN_PEER, Peer
from ovmstrio.core.http import HttpAnswer, HttpRequest
from ovmstrio.core.limits import leave_place
from ovmstrio.transport.direct_stream import DirectStream, carry_on, has_unread, told_of_waiting
from ovmstrio.transport.http.buffered_stream import send_answer, send_bounded
from ovmstrio.transport.http.responses import error_answer, has_bare_line_feed, plain_answer, slowness_refusal
from ovmstrio.transport.http.shutdown import IDLE_GRACE_SECONDS, Ending
from ovmstrio.util.buffers import memory_to_fill

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from ovmstrio.transport.http.router import RoutedRequest, Router

__all__ = ["METHODS", "FastLane", "Head", "read_head"]

# ----------------------------------------------------------------------
# Heads of plain requests over HTTP/1.1, read in one step; all others are for a careful parser
# ----------------------------------------------------------------------

METHODS: Final = ("POST", "GET", "PUT", "PATCH", "DELETE")

_HEAD: Final = re.compile(
    rb"(%b) (/[^#\x00-\x20\x7f-\xff]*) HTTP/1\.1\r\n"
    rb"((?:[!#$%%&'*+\-.^_`|~0-9A-Za-z]+:[^\r\n\x00\x0b\x0c\x7f]*\r\n)+)\r\n" % "|".join(METHODS).encode()
)
"""What is taken is a part of what the application's parser takes."""
_LENGTH: Final = re.compile(r"[0-9]{1,15}")
_UNUSUAL: Final = frozenset({"transfer-encoding", "content-encoding", "expect", "upgrade", "trailer", "te"})
_SINGLE: Final = frozenset({"host", "content-length", "connection", "content-type", "inference-header-content-length"})
_WITHOUT_BODY: Final = frozenset({"GET", "DELETE"})
"""Verbs that need not say the length of a body, having none as a rule."""


class Head(NamedTuple):
    """A request without its body; the names of ``headers`` are in small letters, ``target`` is as it was sent."""

    method: str
    target: str
    headers: tuple[tuple[str, str], ...]
    body_length: int
    keep_alive: bool


def read_head(head: bytes) -> Head | None:
    """Read a head, blank line included; None for one that is not plain."""
    match = _HEAD.fullmatch(head)
    if match is None:
        return None
    lines = (line.partition(":") for line in match[3].decode("latin-1").split("\r\n")[:-1])
    headers = tuple((name.lower(), value.strip(" \t")) for name, _, value in lines)
    found = dict(headers)
    if not _UNUSUAL.isdisjoint(found) or "host" not in found:
        return None
    if len(found) < len(headers) and any(name in _SINGLE for name in _repeated(headers)):
        return None
    method, target = match[1].decode(), match[2].decode("latin-1")
    length = found.get("content-length", "0" if method in _WITHOUT_BODY else "")
    connection = found.get("connection", "keep-alive").lower()
    if not _LENGTH.fullmatch(length) or connection not in {"keep-alive", "close"}:
        return None
    return Head(method, target, headers, int(length), connection == "keep-alive")


def _repeated(headers: tuple[tuple[str, str], ...]) -> set[str]:
    names = [name for name, _ in headers]
    return {name for name in names if names.count(name) > 1}


# ----------------------------------------------------------------------
# The short way over HTTP/1.1: read the request, have it answered, write the answer, without any framework
# ----------------------------------------------------------------------

MAX_HEAD_BYTES: Final = 16 * 1024

_KNOWN_HEAD_BYTES: Final = 1024
"""A client sends the same head again and again, so small ones are remembered with what answers them."""
_MOST_KNOWN_HEADS: Final = 1024
_END_OF_HEAD: Final = b"\r\n\r\n"
_BEGINNINGS: Final = tuple(f"{method} /".encode() for method in METHODS)
_LONGEST: Final = max(map(len, _BEGINNINGS))

MAX_WAITING_BYTES: Final = 64 * 1024
"""Bytes of later, pipelined requests that may wait while one is answered."""

_LARGE_BODY_BYTES: Final = 64 * 1024
IDLE_SECONDS: Final = 75.0
_IDLE_SECONDS_AT_LEAST: Final = IDLE_SECONDS - 1
"""After which an idle connection may be closed: to move a deadline takes as long as a fiftieth of a request."""
RECEIVE_SECONDS: Final = 120.0
"""Time that a request may take from its first byte to its last, unless said otherwise."""


class _Phase(Enum):
    """What a lane is doing; only the first two end by time."""

    IDLE = auto()
    RECEIVING = auto()
    ANSWERING = auto()
    OVER = auto()


_IDLE, _RECEIVING, _ANSWERING, _OVER = _Phase
"""By name: to ask the class for one takes as long as a call of a function."""


class FastLane:
    """One connection for as long as it stays in the lane.

    Args:
        router: finds what answers requests.
        stream: the connection, which stays the caller's.
        max_body_bytes: larger bodies leave the lane.
        ending: how the front end ends.
        receive_seconds: what a request may take from its first byte to its last.
        peer: the other end of the connection.

    Attributes:
        receive_until: when the request that is being received must be complete.
        is_finished: whether the client has said that it will send no more.
    """

    def __init__(
        self,
        router: Router,
        stream: trio.abc.Stream,
        max_body_bytes: int,
        *,
        ending: Ending | None = None,
        receive_seconds: float = RECEIVE_SECONDS,
        peer: Peer = UNKNOWN_PEER,
    ) -> None:
        self._router = router
        self._heads = router.heads
        self._stream = stream
        self._direct = stream if isinstance(stream, DirectStream) else None
        self._now: Callable[[], float] = trio.current_time
        self._peer = peer
        self._max_body_bytes = max_body_bytes
        self._ending = ending or Ending()
        self._receive_seconds = receive_seconds
        self._buffer = bytearray()
        self._come: bytes | bytearray = b""
        self._whole_body = b""
        self._wanted = 0
        self._ended = False
        self._phase = _IDLE
        self._grace_until = 0.0
        self._asked: RoutedRequest | None = None
        self._arrived = trio.Event()
        self._room = trio.Event()
        self._tasks: trio.Nursery | None = None
        self._lane: trio.CancelScope | None = None
        self._deadline = float("inf")
        self._is_calling = False
        self._is_reading = False
        self._has_waited = False
        self.receive_until = 0.0
        self.is_finished = False

    @property
    def has_request(self) -> bool:
        """Whether a request has come, if only in part, that is not answered."""
        return self._phase in {_RECEIVING, _ANSWERING}

    async def run(self) -> bytes | None:
        """Answer requests until the connection is over; the bytes of a request that is not for the lane are given.

        Raises:
            trio.BrokenResourceError: the connection broke while an answer was sent.

        Cancellation: at any checkpoint; a call in progress is cancelled with it.
        """
        # What trio's own function asks, by way of two more.
        self._now = trio.lowlevel.current_clock().current_time
        self._grant_time()
        while True:
            leaves = False
            async with trio.open_nursery() as nursery:
                self._tasks = nursery
                self._lane = nursery.cancel_scope
                self._deadline = self._lane.deadline
                leaves = await self._serve()
                nursery.cancel_scope.cancel()
            self._is_reading = False
            # Only now: the reader may have held bytes when it was told to end, and has put them into the buffer since.
            if leaves:
                return bytes(self._buffer)
            if self._phase is _RECEIVING and not self._ended:
                await self._refuse_slowness()
            elif self._phase is _IDLE and not self._ended and (self._buffer or has_unread(self._stream)):
                # A request was on its way when the connection's time was over.
                self._grant_time()
                continue
            # One that nothing has come on can be closed at once: there is no answer that might be lost.
            self.is_finished = self.is_finished or self._ended or self._phase is _IDLE
            self._phase = _OVER
            return None

    def _grant_time(self) -> None:
        """Let the next request come, whatever the ending says."""
        self._grace_until = self._now() + IDLE_GRACE_SECONDS

    def hurry(self) -> None:
        """Close the connection at the time that the ending says, if it has no request by then."""
        if self._phase is _IDLE and self._lane is not None:
            self._set_deadline(min(self._deadline, max(self._ending.next_end(), self._grace_until)))

    async def _refuse_slowness(self) -> None:
        error = slowness_refusal(self._receive_seconds)
        if self._asked is None:
            answer = error_answer(error)
        else:
            origin = next((value for name, value in self._asked.head.headers if name == "origin"), "")
            answer = self._router.shared(self._asked.route.refuse(error), origin)
        await send_answer(self._stream, answer, keep_alive=False)

    # Reading

    def _watch(self) -> None:
        """Give an answer that has to wait all the time, and read meanwhile: the client may leave."""
        self._set_deadline(float("inf"))
        self._has_waited = True
        if self._is_calling and not self._is_reading and not self._ended and self._tasks is not None:
            self._is_reading = True
            self._tasks.start_soon(self._read)

    async def _read(self) -> None:
        """Read for as long as calls wait, and then until the next request has come."""
        while not self._ended and (self._is_calling or self._has_waited):
            if len(self._buffer) >= max(self._wanted, MAX_WAITING_BYTES):
                self._room = trio.Event()
                await self._room.wait()
                continue
            await self._receive()
            self._has_waited = self._is_calling
            self._arrived.set()
        self._is_reading = False
        if self._ended and self._is_calling and self._lane is not None:
            self._lane.cancel()

    async def _receive(self) -> None:
        try:
            data = await self._stream.receive_some()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            data = b""
        self._buffer += data
        self._ended = not data

    async def _more(self, deadline: float) -> bool:
        """Wait for bytes until a deadline; False when there will be none."""
        if self._ended:
            return False
        known = len(self._buffer)
        if deadline != self._deadline:
            self._set_deadline(deadline)
        if self._is_reading:
            self._arrived = trio.Event()
            self._room.set()
            await self._arrived.wait()
        else:
            await self._receive()
        return len(self._buffer) > known

    # Serving

    async def _serve(self) -> bool:
        """Answer until the connection is over (False) or leaves the lane (True)."""
        while True:
            if not self._buffer:
                self._phase = _IDLE
                if not await self._next():
                    return False
            self._phase = _RECEIVING
            asked = self._asked = self._known() or await self._head()
            if asked is None:
                return True
            if not self._router.lets_in(asked.route):
                answering = self._answer_at_once(asked)
                keeps = answering if isinstance(answering, bool) else await answering
            elif self._router.admit_now(asked.route, asked.head.headers):
                try:
                    answering = self._answer_at_once(asked)
                    keeps = answering if isinstance(answering, bool) else await answering
                finally:
                    leave_caller()
            else:
                keeps = await self._answer_admitted(asked)
            if not keeps:
                return False
            if self._buffer:
                # Others have their turn between requests that have come together.
                self._set_deadline(float("inf"))
                await trio.lowlevel.checkpoint()

    async def _next(self) -> bool:
        """Wait for the first bytes of a request; False when there will be none."""
        left = self._deadline - self._now()
        if not _IDLE_SECONDS_AT_LEAST <= left <= IDLE_SECONDS or self._ending.idle_until < self._deadline:
            self._set_deadline(self._idle_deadline())
        if self._is_reading or self._ended:
            return await self._more(self._deadline)
        if self._direct is not None:
            self._direct.expect()
        try:
            self._come = await self._stream.receive_some()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self._come = b""
        self._ended = not self._come
        return not self._ended

    def _known(self) -> RoutedRequest | None:
        """Take a head that has come before off what has come; None, with all of that in the buffer, for any other.

        The body of a request that has come as a whole, as most do, is taken with it.
        """
        buffer = self._buffer
        come, self._come = self._come or buffer, b""
        end = come.find(_END_OF_HEAD, 0, _KNOWN_HEAD_BYTES) + 4
        asked = self._heads.get(bytes(come[:end]))
        is_known = asked is not None and asked.head.body_length <= self._max_body_bytes
        if asked is not None and is_known and len(come) == asked.size <= _LARGE_BODY_BYTES:
            self._whole_body = bytes(come[end:])
            if buffer:
                buffer.clear()
            return asked
        if come is not buffer:
            buffer += come
        if asked is None or not is_known:
            return None
        del buffer[:end]
        if len(buffer) < asked.head.body_length:
            self.receive_until = self._now() + self._receive_seconds
        return asked

    def _answer_at_once(self, asked: RoutedRequest) -> bool | Awaitable[bool]:
        """Answer a request, or give what does where something has to be waited for; False if the connection ends."""
        body = self._whole_body
        if not body or asked.route.has_tasks:
            return self._answer_read(asked)
        self._whole_body = b""
        if self._is_reading:
            self._room.set()
        self._phase = _ANSWERING
        running = self._answer_within(None, asked, body)
        try:
            trap = running.send(None)
        except StopIteration as done:
            return bool(done.value)
        self._watch()
        return carry_on(running, trap)

    async def _answer_read(self, asked: RoutedRequest) -> bool:
        """Read the body of a request and answer it; False if the connection ends with it."""
        body = await self._body(asked.head.body_length)
        if body is None:
            return False
        self._phase = _ANSWERING
        return await told_of_waiting(self._answer(asked, body), self._watch)

    def _idle_deadline(self) -> float:
        """Tell when the connection is closed if nothing comes."""
        deadline, limit = self._now() + IDLE_SECONDS, self._ending.idle_until
        return deadline if limit >= deadline else min(deadline, max(limit, self._grace_until))

    async def _answer_admitted(self, asked: RoutedRequest) -> bool:
        """Answer a request, or refuse it before its body is read, once it is let in; False as :meth:`_answer`."""
        self._phase = _ANSWERING
        head, query, route, _, _ = asked
        request = HttpRequest(head.method, route.path, query, head.headers, b"", self._peer, head.target, route.mount)
        try:
            self._is_calling = True
            refusal = await told_of_waiting(self._router.admit(route, request), self._watch)
            self._is_calling = False
            if refusal is not None:
                return await self._refuse(head, refusal)
            self._phase = _RECEIVING
            # What it has waited is no fault of the client's.
            self.receive_until = self._now() + self._receive_seconds
            body = await self._body(head.body_length)
            if body is None:
                return False
            self._phase = _ANSWERING
            return await told_of_waiting(self._answer(asked, body), self._watch)
        finally:
            self._is_calling = False
            leave_place()
            leave_caller()

    async def _refuse(self, head: Head, refusal: HttpAnswer) -> bool:
        """Refuse a request; what follows of a small body is passed over, and a large one ends the connection."""
        keep_alive = head.keep_alive and head.body_length <= MAX_WAITING_BYTES and not self._ending.is_near
        await send_answer(self._stream, refusal, keep_alive=keep_alive)
        return keep_alive and await self._body(head.body_length) is not None

    async def _head(self) -> RoutedRequest | None:
        """Take the head off the buffer; None, with the buffer as it is, for a request that is not for the lane."""
        buffer, self._asked = self._buffer, None
        self.receive_until = self._now() + self._receive_seconds
        while True:
            if not self._begins_plainly():
                return None
            end = buffer.find(_END_OF_HEAD)
            if end >= 0:
                break
            if len(buffer) > MAX_HEAD_BYTES or has_bare_line_feed(buffer):
                return None
            if not await self._more(self.receive_until):
                return None
        head = read_head(bytes(buffer[: end + 4])) if end <= MAX_HEAD_BYTES else None
        if head is None or head.body_length > self._max_body_bytes:
            return None
        target, _, query = head.target.partition("?")
        route = self._router.find(head.method, target)
        if isinstance(route, HttpAnswer) or not route.is_hot:
            return None
        asked = self._router.routed(head, query, route, end + 4 + head.body_length)
        if end + 4 <= _KNOWN_HEAD_BYTES:
            if len(self._heads) >= _MOST_KNOWN_HEADS:
                self._heads.clear()
            self._heads[bytes(buffer[: end + 4])] = asked
        del buffer[: end + 4]
        return asked

    def _begins_plainly(self) -> bool:
        buffer = self._buffer
        if len(buffer) >= _LONGEST:
            return buffer.startswith(_BEGINNINGS)
        return any(buffer.startswith(beginning[: len(buffer)]) for beginning in _BEGINNINGS)

    async def _body(self, length: int) -> bytes | memoryview | None:
        """Take a body off what has come and comes; a large one is read into memory of its own."""
        whole, self._whole_body = self._whole_body, b""
        if whole:
            self._room.set()
            return whole
        if length > _LARGE_BODY_BYTES:
            return await self._large_body(length)
        self._wanted = length
        while len(self._buffer) < length:
            if not await self._more(self.receive_until):
                return None
        self._wanted = 0
        body = bytes(self._buffer) if len(self._buffer) == length else bytes(self._buffer[:length])
        del self._buffer[:length]
        self._room.set()
        return body

    async def _large_body(self, length: int) -> memoryview | None:
        whole, filled, stream = memory_to_fill(length), 0, self._stream
        while filled < length:
            if self._buffer:
                size = min(len(self._buffer), length - filled)
                with memoryview(self._buffer) as come:
                    whole[filled : filled + size] = come[:size]
                del self._buffer[:size]
                filled += size
            elif isinstance(stream, DirectStream) and not self._is_reading and not self._ended:
                self._set_deadline(self.receive_until)
                filled += (size := await self._receive_into(stream, whole[filled:]))
                self._ended = not size
            elif not await self._more(self.receive_until):
                return None
        self._room.set()
        return whole.toreadonly()

    async def _receive_into(self, stream: DirectStream, target: memoryview) -> int:
        try:
            return await stream.receive_into(target)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return 0

    async def _answer(self, asked: RoutedRequest, body: bytes | memoryview) -> bool:
        """Answer a request; False if the connection ends with it.

        A stream of an answer ends with its client, as the call does that has not been answered.
        """
        if not asked.route.has_tasks:
            return await self._answer_within(None, asked, body)
        broken = None
        async with trio.open_nursery() as tasks:
            try:
                keeps = await self._answer_within(tasks, asked, body)
            except trio.BrokenResourceError as error:
                broken = error
            tasks.cancel_scope.cancel()
        if broken is not None:
            raise broken
        return keeps

    async def _answer_within(self, tasks: trio.Nursery | None, asked: RoutedRequest, body: bytes | memoryview) -> bool:
        (_, _, headers, _, keep_alive), _, route, _, view = asked
        answer = None
        self.is_finished = not keep_alive
        try:
            self._is_calling = True
            if view is None:
                answer = await self._router.answer(route, self._whole(asked, body, tasks))
            else:
                try:
                    answer = await view(body)
                except Exception as error:  # noqa: BLE001 - the border of one request
                    answer = self._router.failed(route, headers, error)
            # One that was whole when its client left is sent; a stream ends with its client.
            self._is_calling = type(answer.body) is not bytes and answer.stream is not None
            if keep_alive and self._ending.is_near:
                keep_alive = not self._ending.is_last(self._now(), has_more=bool(self._buffer))
            plain = plain_answer(answer) if keep_alive and self._direct is not None else None
            if plain is None:
                await send_answer(self._stream, answer, keep_alive=keep_alive)
            elif self._direct is not None and (sent := self._direct.send_now(plain)) < len(plain):
                await send_bounded(self._direct, memoryview(plain)[sent:])
        finally:
            self._is_calling = False
            if answer is not None:
                for callback in answer.after:
                    callback()
        return keep_alive

    def _whole(self, asked: RoutedRequest, body: bytes | memoryview, tasks: trio.Nursery | None) -> HttpRequest:
        """Make the request that a head and a body are."""
        (method, target, headers, _, _), query, route, _, _ = asked
        view = body if type(body) is memoryview and route.takes_views else None
        whole = b"" if view is not None else bytes(body)
        return HttpRequest(method, route.path, query, headers, whole, self._peer, target, route.mount, tasks, view)

    def _set_deadline(self, deadline: float) -> None:
        self._deadline = deadline
        if self._lane is not None:
            self._lane.deadline = deadline
