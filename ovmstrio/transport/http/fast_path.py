"""HTTP/1.1 fast path: reads plain requests of hot routes and sends their responses without a framework.

::

    socket ─> buffer ─> head, body ─> handler from the router ─> socket
                                          │ blocks
                                          └─> reader task ─> EOF: the running call is cancelled

Calls that never block are read, answered and sent in one step of one task. At the first other request the connection
moves to the Quart application for good, with all bytes read so far, so that only one strict parser judges unusual
input.

EOF while a call runs is treated as a disconnect, because a half-close looks the same; the call is cancelled. A
connection is closed as idle only if no byte of a request has arrived, here or in the socket.
"""

from __future__ import annotations

import re
from enum import Enum, auto
from typing import TYPE_CHECKING, Final, NamedTuple

import trio

from ovmstrio.core.callers import release_caller
from ovmstrio.core.connection import UNKNOWN_PEER, Peer
from ovmstrio.core.events import RequestId, current_request_id
from ovmstrio.core.http_messages import HttpAnswer, HttpRequest
from ovmstrio.core.limits import release_current_ticket
from ovmstrio.transport.direct_stream import DirectStream, has_unread, resume, run_eagerly
from ovmstrio.transport.http.bounded_send import send_bounded, send_response
from ovmstrio.transport.http.responses import (
    encode_plain_json,
    error_response,
    has_bare_line_feed,
    leading_empty_lines,
    request_timeout_error,
    with_request_id,
)
from ovmstrio.transport.http.shutdown import IDLE_GRACE_SECONDS, ShutdownState
from ovmstrio.util.aligned_memory import memory_to_fill

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from ovmstrio.core.http_messages import Headers
    from ovmstrio.transport.http.router import BodyView, Route, Router

# -- Request heads -----------------------------------------------------------------------------------------------------

_METHODS: Final = ("POST", "GET", "PUT", "PATCH", "DELETE")
_HEAD: Final = re.compile(
    rb"(%b) (/[^#\x00-\x20\x7f-\xff]*) HTTP/1\.1\r\n"
    rb"((?:[!#$%%&'*+\-.^_`|~0-9A-Za-z]+:[^\r\n\x00\x0b\x0c\x7f]*\r\n)+)\r\n" % "|".join(_METHODS).encode()
)
"""Accepts a subset of what the application's parser accepts."""
_LENGTH: Final = re.compile(r"[0-9]{1,15}")
_UNUSUAL: Final = frozenset({"transfer-encoding", "content-encoding", "expect", "upgrade", "trailer", "te"})
_UNREPEATABLE: Final = frozenset(
    {"host", "content-length", "connection", "content-type", "inference-header-content-length"}
)
_BODILESS_METHODS: Final = frozenset({"GET", "DELETE"})
"""Methods whose requests may omit content-length, because they usually have no body."""


class RequestHead(NamedTuple):
    """Request without its body; header names are in lower case, ``target`` is as sent."""

    method: str
    target: str
    headers: tuple[tuple[str, str], ...]
    body_length: int
    keep_alive: bool


def parse_head(head: bytes) -> RequestHead | None:
    """Parse a request head, including its blank line; None if it is not plain."""
    match = _HEAD.fullmatch(head)
    if match is None:
        return None
    lines = (line.partition(":") for line in match[3].decode("latin-1").split("\r\n")[:-1])
    headers = tuple((name.lower(), value.strip(" \t")) for name, _, value in lines)
    found = dict(headers)
    if not _UNUSUAL.isdisjoint(found) or "host" not in found:
        return None
    if len(found) < len(headers) and any(name in _UNREPEATABLE for name in _repeated(headers)):
        return None
    method, target = match[1].decode(), match[2].decode("latin-1")
    length = found.get("content-length", "0" if method in _BODILESS_METHODS else "")
    connection = found.get("connection", "keep-alive").lower()
    if not _LENGTH.fullmatch(length) or connection not in {"keep-alive", "close"}:
        return None
    return RequestHead(method, target, headers, int(length), connection == "keep-alive")


def _repeated(headers: tuple[tuple[str, str], ...]) -> set[str]:
    names = [name for name, _ in headers]
    return {name for name in names if names.count(name) > 1}


class RoutedRequest(NamedTuple):
    """Request before its body has arrived.

    Attributes:
        size: bytes of head and body.
        view: answers from the body alone and raises errors for :meth:`Router.failed`; None if the request is needed.
    """

    head: RequestHead
    query: str
    route: Route
    size: int
    view: BodyView | None = None


# -- Connection --------------------------------------------------------------------------------------------------------

MAX_HEAD_BYTES: Final = 16 * 1024

_MAX_CACHED_HEAD_BYTES: Final = 1024
"""Clients repeat the same head, so small heads are cached with their route."""
_MAX_CACHED_HEADS: Final = 1024
_END_OF_HEAD: Final = b"\r\n\r\n"
_REQUEST_LINE_PREFIXES: Final = tuple(f"{method} /".encode() for method in _METHODS)
_MAX_PREFIX_BYTES: Final = max(map(len, _REQUEST_LINE_PREFIXES))

MAX_PIPELINED_BYTES: Final = 64 * 1024
"""Limit of pipelined bytes that are buffered while a request is answered."""

_LARGE_BODY_BYTES: Final = 64 * 1024
IDLE_SECONDS: Final = 75.0
_MIN_IDLE_SECONDS: Final = IDLE_SECONDS - 1
"""Idle timeouts between this and IDLE_SECONDS are not renewed: moving a deadline costs 2 % of a request."""
RECEIVE_SECONDS: Final = 120.0
"""Default time limit from the first to the last byte of a request."""


class _Phase(Enum):
    """State of a connection; timeouts apply to the first two only."""

    IDLE = auto()
    RECEIVING = auto()
    ANSWERING = auto()
    OVER = auto()


_IDLE, _RECEIVING, _ANSWERING, _OVER = _Phase
"""Module constants, because enum member access costs as much as a function call."""


class FastPathConnection:
    """One connection while it stays on the fast path; the caller closes the stream.

    Attributes:
        receive_until: deadline of the request that is being received.
        is_finished: the client will send nothing more.
    """

    def __init__(
        self,
        router: Router,
        stream: trio.abc.Stream,
        max_body_bytes: int,
        *,
        shutdown: ShutdownState | None = None,
        receive_seconds: float = RECEIVE_SECONDS,
        peer: Peer = UNKNOWN_PEER,
    ) -> None:
        self._router = router
        self._heads: dict[bytes, RoutedRequest] = router.heads
        self._stream = stream
        self._direct = stream if isinstance(stream, DirectStream) else None
        self._now: Callable[[], float] = trio.current_time
        self._peer = peer
        self._max_body_bytes = max_body_bytes
        self._ending = shutdown or ShutdownState()
        self._receive_seconds = receive_seconds
        self._buffer = bytearray()
        self._received: bytes | bytearray = b""
        self._complete_body = b""
        self._wanted_bytes = 0
        self._is_eof = False
        self._phase = _IDLE
        self._grace_until = 0.0
        self._current_request: RoutedRequest | None = None
        self._arrived = trio.Event()
        self._buffer_has_room = trio.Event()
        self._tasks: trio.Nursery | None = None
        self._scope: trio.CancelScope | None = None
        self._deadline = float("inf")
        self._has_running_call = False
        self._is_reading = False
        self._has_waited = False
        self.receive_until = 0.0
        self.is_finished = False

    @property
    def has_request(self) -> bool:
        """True if an unanswered request has arrived, at least in part."""
        return self._phase in {_RECEIVING, _ANSWERING}

    async def run(self) -> bytes | None:
        """Answer requests until the connection ends; return the bytes of a request for the application, else None.

        Raises ``BrokenResourceError`` if the connection broke while a response was sent.
        """
        # Same as trio.current_time(), without two function calls.
        self._now = trio.lowlevel.current_clock().current_time
        self._extend_grace()
        while True:
            moves = False
            async with trio.open_nursery() as nursery:
                self._tasks = nursery
                self._scope = nursery.cancel_scope
                self._deadline = self._scope.deadline
                moves = await self._serve()
                nursery.cancel_scope.cancel()
            self._is_reading = False
            # Only after the nursery has ended: its reader may have added bytes to the buffer.
            if moves:
                return bytes(self._buffer)
            if self._phase is _RECEIVING and not self._is_eof:
                await self._refuse_slow_request()
            elif self._phase is _IDLE and not self._is_eof and (self._buffer or has_unread(self._stream)):
                # A request arrived just before the idle timeout.
                self._extend_grace()
                continue
            # An idle connection can be closed without lingering: no response could be lost.
            self.is_finished = self.is_finished or self._is_eof or self._phase is _IDLE
            self._phase = _OVER
            return None

    def _extend_grace(self) -> None:
        """Allow time for the next request, regardless of the shutdown state."""
        self._grace_until = self._now() + IDLE_GRACE_SECONDS

    def apply_shutdown_deadline(self) -> None:
        """Apply the shutdown deadline, if the connection has no request."""
        if self._phase is _IDLE and self._scope is not None:
            self._set_deadline(min(self._deadline, max(self._ending.next_close_time(), self._grace_until)))

    async def _refuse_slow_request(self) -> None:
        error = request_timeout_error(self._receive_seconds)
        headers: Headers = ()
        if self._current_request is None:
            answer = error_response(error)
        else:
            headers = self._current_request.head.headers
            answer = self._router.shared(self._current_request.route.refuse(error), headers)
        await send_response(self._stream, with_request_id(answer, RequestId(headers)), keep_alive=False)

    # -- Reading -------------------------------------------------------------------------------------------------------

    def _on_block(self) -> None:
        """Disable the deadline for a handler that blocks, and start reading to detect a disconnect."""
        self._set_deadline(float("inf"))
        self._has_waited = True
        if self._has_running_call and not self._is_reading and not self._is_eof and self._tasks is not None:
            self._is_reading = True
            self._tasks.start_soon(self._read)

    async def _read(self) -> None:
        """Read while calls block, and then until the next request arrives."""
        while not self._is_eof and (self._has_running_call or self._has_waited):
            if len(self._buffer) >= max(self._wanted_bytes, MAX_PIPELINED_BYTES):
                self._buffer_has_room = trio.Event()
                await self._buffer_has_room.wait()
                continue
            await self._receive()
            self._has_waited = self._has_running_call
            self._arrived.set()
        self._is_reading = False
        if self._is_eof and self._has_running_call and self._scope is not None:
            self._scope.cancel()

    async def _receive(self) -> None:
        try:
            data = await self._stream.receive_some()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            data = b""
        self._buffer += data
        self._is_eof = not data

    async def _receive_more(self, deadline: float) -> bool:
        """Wait until the deadline for bytes; return False if there will be none."""
        if self._is_eof:
            return False
        known = len(self._buffer)
        if deadline != self._deadline:
            self._set_deadline(deadline)
        if self._is_reading:
            self._arrived = trio.Event()
            self._buffer_has_room.set()
            await self._arrived.wait()
        else:
            await self._receive()
        return len(self._buffer) > known

    # -- Serving -------------------------------------------------------------------------------------------------------

    async def _serve(self) -> bool:
        """Answer requests until the connection ends (False) or moves to the application (True)."""
        while True:
            if not self._buffer:
                self._phase = _IDLE
                if not await self._wait_for_request():
                    return False
            self._phase = _RECEIVING
            routed = self._current_request = self._cached_head() or await self._head()
            if routed is None:
                return bool(self._buffer)
            if not self._router.needs_admission(routed.route):
                answering = self._answer_eagerly(routed)
                stays_open = answering if isinstance(answering, bool) else await answering
            elif self._router.try_admit(routed.route, routed.head.headers):
                try:
                    answering = self._answer_eagerly(routed)
                    stays_open = answering if isinstance(answering, bool) else await answering
                finally:
                    release_caller()
            else:
                stays_open = await self._answer_admitted(routed)
            if not stays_open:
                return False
            if self._buffer:
                # Other tasks run between pipelined requests.
                self._set_deadline(float("inf"))
                await trio.lowlevel.checkpoint()

    async def _wait_for_request(self) -> bool:
        """Wait for the first bytes of a request; return False if there will be none."""
        left = self._deadline - self._now()
        if not _MIN_IDLE_SECONDS <= left <= IDLE_SECONDS or self._ending.idle_until < self._deadline:
            self._set_deadline(self._idle_deadline())
        if self._is_reading or self._is_eof:
            return await self._receive_more(self._deadline)
        if self._direct is not None:
            self._direct.expect()
        try:
            self._received = await self._stream.receive_some()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self._received = b""
        self._is_eof = not self._received
        return not self._is_eof

    def _cached_head(self) -> RoutedRequest | None:
        """Take a cached head off the received bytes; None, with all bytes in the buffer, for any other.

        The body is taken as well if exactly one complete request has arrived, which is the usual case.
        """
        buffer = self._buffer
        received, self._received = self._received or buffer, b""
        end = received.find(_END_OF_HEAD, 0, _MAX_CACHED_HEAD_BYTES) + 4
        routed = self._heads.get(bytes(received[:end]))
        is_known = routed is not None and routed.head.body_length <= self._max_body_bytes
        if routed is not None and is_known and len(received) == routed.size <= _LARGE_BODY_BYTES:
            self._complete_body = bytes(received[end:])
            if buffer:
                buffer.clear()
            return routed
        if received is not buffer:
            buffer += received
        if routed is None or not is_known:
            return None
        del buffer[:end]
        if len(buffer) < routed.head.body_length:
            self.receive_until = self._now() + self._receive_seconds
        return routed

    def _answer_eagerly(self, routed: RoutedRequest) -> bool | Awaitable[bool]:
        """Answer a request, or return an awaitable if the handler blocks; False if the connection ends."""
        body = self._complete_body
        if not body or routed.route.has_tasks:
            return self._answer_read(routed)
        self._complete_body = b""
        if self._is_reading:
            self._buffer_has_room.set()
        self._phase = _ANSWERING
        running = self._answer_within(None, routed, body)
        try:
            trap = running.send(None)
        except StopIteration as done:
            return bool(done.value)
        self._on_block()
        return resume(running, trap)

    async def _answer_read(self, routed: RoutedRequest) -> bool:
        body = await self._body(routed.head.body_length)
        if body is None:
            return False
        self._phase = _ANSWERING
        return await run_eagerly(self._answer(routed, body), self._on_block)

    def _idle_deadline(self) -> float:
        deadline, limit = self._now() + IDLE_SECONDS, self._ending.idle_until
        return deadline if limit >= deadline else min(deadline, max(limit, self._grace_until))

    async def _answer_admitted(self, routed: RoutedRequest) -> bool:
        """Admit a request before its body is read, then answer or refuse it; returns like :meth:`_answer`."""
        self._phase = _ANSWERING
        head, query, route, _, _ = routed
        request = HttpRequest(head.method, route.path, query, head.headers, b"", self._peer, head.target, route.mount)
        request_id = RequestId(head.headers)
        current_request_id.set(request_id)
        try:
            self._has_running_call = True
            refusal = await run_eagerly(self._router.admit(route, request), self._on_block)
            self._has_running_call = False
            if refusal is not None:
                return await self._refuse(head, with_request_id(refusal, request_id))
            self._phase = _RECEIVING
            # Time spent waiting for admission does not count against the client.
            self.receive_until = self._now() + self._receive_seconds
            body = await self._body(head.body_length)
            if body is None:
                return False
            self._phase = _ANSWERING
            return await run_eagerly(self._answer(routed, body), self._on_block)
        finally:
            self._has_running_call = False
            release_current_ticket()
            release_caller()

    async def _refuse(self, head: RequestHead, refusal: HttpAnswer) -> bool:
        """Refuse a request; a small body is skipped, a large one ends the connection."""
        keep_alive = head.keep_alive and head.body_length <= MAX_PIPELINED_BYTES and not self._ending.is_draining
        await send_response(self._stream, refusal, keep_alive=keep_alive)
        return keep_alive and await self._body(head.body_length) is not None

    async def _head(self) -> RoutedRequest | None:
        """Take the head off the buffer; None, with an unchanged buffer, for a request for the application."""
        buffer, self._current_request = self._buffer, None
        self.receive_until = self._now() + self._receive_seconds
        while True:
            if (buffer[:1] == b"\r" and not await self._skip_empty_lines()) or not self._has_known_method():
                return None
            end = buffer.find(_END_OF_HEAD)
            if end >= 0:
                break
            if len(buffer) > MAX_HEAD_BYTES or has_bare_line_feed(buffer):
                return None
            if not await self._receive_more(self.receive_until):
                return None
        head = parse_head(bytes(buffer[: end + 4])) if end <= MAX_HEAD_BYTES else None
        if head is None or head.body_length > self._max_body_bytes:
            return None
        target, _, query = head.target.partition("?")
        route = self._router.find(head.method, target)
        if isinstance(route, HttpAnswer) or not route.is_hot:
            return None
        view = self._router.body_view(route, head.headers)
        routed = RoutedRequest(head, query, route, end + 4 + head.body_length, view)
        if end + 4 <= _MAX_CACHED_HEAD_BYTES:
            if len(self._heads) >= _MAX_CACHED_HEADS:
                self._heads.clear()
            self._heads[bytes(buffer[: end + 4])] = routed
        del buffer[: end + 4]
        return routed

    async def _skip_empty_lines(self) -> bool:
        """Remove empty lines; if nothing follows them, wait for a request. Return False if there will be none."""
        buffer = self._buffer
        while size := leading_empty_lines(buffer):
            del buffer[:size]
            if not buffer:
                self._phase = _IDLE
                if not await self._wait_for_request():
                    return False
                buffer += self._received
                self._received = b""
                self._phase = _RECEIVING
                self.receive_until = self._now() + self._receive_seconds
        return True

    def _has_known_method(self) -> bool:
        buffer = self._buffer
        if len(buffer) >= _MAX_PREFIX_BYTES:
            return buffer.startswith(_REQUEST_LINE_PREFIXES)
        # A CR may be the first half of an empty line.
        return buffer == b"\r" or any(buffer.startswith(start[: len(buffer)]) for start in _REQUEST_LINE_PREFIXES)

    async def _body(self, length: int) -> bytes | memoryview | None:
        """Take a body off the received bytes; None if the client does not send all of it in time."""
        body_bytes, self._complete_body = self._complete_body, b""
        if body_bytes:
            self._buffer_has_room.set()
            return body_bytes
        if length > _LARGE_BODY_BYTES:
            return await self._large_body(length)
        self._wanted_bytes = length
        while len(self._buffer) < length:
            if not await self._receive_more(self.receive_until):
                return None
        self._wanted_bytes = 0
        body = bytes(self._buffer) if len(self._buffer) == length else bytes(self._buffer[:length])
        del self._buffer[:length]
        self._buffer_has_room.set()
        return body

    async def _large_body(self, length: int) -> memoryview | None:
        body_bytes, filled, stream = memory_to_fill(length), 0, self._stream
        while filled < length:
            if self._buffer:
                size = min(len(self._buffer), length - filled)
                with memoryview(self._buffer) as received:
                    body_bytes[filled : filled + size] = received[:size]
                del self._buffer[:size]
                filled += size
            elif isinstance(stream, DirectStream) and not self._is_reading and not self._is_eof:
                self._set_deadline(self.receive_until)
                filled += (size := await self._receive_into(stream, body_bytes[filled:]))
                self._is_eof = not size
            elif not await self._receive_more(self.receive_until):
                return None
        self._buffer_has_room.set()
        return body_bytes.toreadonly()

    async def _receive_into(self, stream: DirectStream, target: memoryview) -> int:
        try:
            return await stream.receive_into(target)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return 0

    async def _answer(self, routed: RoutedRequest, body: bytes | memoryview) -> bool:
        """Answer a request; return False if the connection ends. A streamed response is cancelled with its client."""
        if not routed.route.has_tasks:
            return await self._answer_within(None, routed, body)
        broken_error = None
        async with trio.open_nursery() as tasks:
            try:
                stays_open = await self._answer_within(tasks, routed, body)
            except trio.BrokenResourceError as error:
                broken_error = error
            tasks.cancel_scope.cancel()
        if broken_error is not None:
            raise broken_error
        return stays_open

    async def _answer_within(self, tasks: trio.Nursery | None, routed: RoutedRequest, body: bytes | memoryview) -> bool:
        (_, _, headers, _, keep_alive), _, route, _, view = routed
        answer = None
        request_id = RequestId(headers)
        current_request_id.set(request_id)
        self.is_finished = not keep_alive
        try:
            self._has_running_call = True
            if view is None:
                answer = await self._router.answer(route, self._build_request(routed, body, tasks))
            else:
                try:
                    answer = await view(body)
                except Exception as error:  # noqa: BLE001 - an error of one request must not affect others
                    answer = self._router.failed(route, headers, error)
            # A complete response is sent even if the client half-closed; a stream ends with its client.
            self._has_running_call = type(answer.body) is not bytes and answer.stream is not None
            if keep_alive and self._ending.is_draining:
                keep_alive = not self._ending.is_last(self._now(), has_more=bool(self._buffer))
            plain = encode_plain_json(answer, request_id.value) if keep_alive and self._direct is not None else None
            if plain is None:
                await send_response(self._stream, with_request_id(answer, request_id), keep_alive=keep_alive)
            elif self._direct is not None and (sent := self._direct.send_now(plain)) < len(plain):
                await send_bounded(self._direct, memoryview(plain)[sent:])
        finally:
            self._has_running_call = False
            if answer is not None:
                for callback in answer.after:
                    callback()
        return keep_alive

    def _build_request(
        self, routed: RoutedRequest, body: bytes | memoryview, tasks: trio.Nursery | None
    ) -> HttpRequest:
        (method, target, headers, _, _), query, route, _, _ = routed
        view = body if type(body) is memoryview and route.takes_views else None
        body_bytes = b"" if view is not None else bytes(body)
        return HttpRequest(method, route.path, query, headers, body_bytes, self._peer, target, route.mount, tasks, view)

    def _set_deadline(self, deadline: float) -> None:
        self._deadline = deadline
        if self._scope is not None:
            self._scope.deadline = deadline
