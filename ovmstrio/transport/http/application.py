"""Quart application of an HTTP front end, served by hypercorn's HTTP/1.1 protocol.

The application's only route is the router.
"""

from __future__ import annotations

import logging
import math
import sys
from contextlib import suppress
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

import h11
import trio
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config
from hypercorn.events import Closed, RawData, Updated
from hypercorn.protocol.events import Response
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.trio.task_group import TaskGroup
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState
from quart import Response as QuartResponse
from quart import request
from quart_trio import QuartTrio
from werkzeug.exceptions import HTTPException, RequestEntityTooLarge

from ovmstrio.core.callers import current_caller
from ovmstrio.core.events import RequestId, current_request_id
from ovmstrio.core.http_messages import STATUSES_WITHOUT_BODY, HttpAnswer, HttpRequest
from ovmstrio.core.limits import current_ticket
from ovmstrio.transport.direct_stream import LINGER_SECONDS, has_unread, underlying_stream
from ovmstrio.transport.http.bounded_send import send_bounded
from ovmstrio.transport.http.responses import (
    body_too_large_error,
    encode_response_head,
    error_response,
    has_bare_line_feed,
    json_response,
    leading_empty_lines,
    request_timeout_error,
    with_request_id,
)
from ovmstrio.transport.http.shutdown import IDLE_GRACE_SECONDS

if TYPE_CHECKING:
    from hypercorn.events import Event
    from hypercorn.protocol.events import Event as StreamEvent

    from ovmstrio.core.connection import Peer
    from ovmstrio.core.errors import ServerError
    from ovmstrio.core.request import Buffer
    from ovmstrio.transport.http.router import Route, Router
    from ovmstrio.transport.http.shutdown import ShutdownState

# -- Stream ------------------------------------------------------------------------------------------------------------

CLOSE_SECONDS: Final = 1.0


class PrefixedStream:
    """Stream for hypercorn whose first bytes have already been read.

    Once ``is_finished``, nothing more is sent, and input is discarded.
    """

    def __init__(self, stream: trio.abc.Stream, prefix: bytes) -> None:
        self._stream = stream
        self._prefix = prefix
        self.is_finished = False
        self._reading: trio.CancelScope | None = None
        self._read_until = math.inf

    @property
    def encrypted(self) -> bool:
        """True if the stream uses TLS."""
        return isinstance(self._stream, trio.SSLStream)

    @property
    def transport(self) -> Any:
        """The socket stream below TLS."""
        return underlying_stream(self._stream)

    def read_until(self, deadline: float) -> None:
        """Set the deadline of current and later reads, in trio time; no effect once finished."""
        if not self.is_finished:
            self._read_until = deadline
            if self._reading is not None:
                self._reading.deadline = deadline

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """Return the bytes read before, then received bytes; empty at the end or once finished.

        Raises ``TooSlowError`` after the deadline.
        """
        if self._prefix:
            prefix, self._prefix = self._prefix, b""
            await trio.lowlevel.checkpoint()
            return prefix
        with trio.CancelScope(deadline=self._read_until) as self._reading:
            data = bytes(await self._stream.receive_some(max_bytes))
            while data and self.is_finished:
                data = bytes(await self._stream.receive_some(max_bytes))
            return data
        if self.is_finished:
            return b""
        raise trio.TooSlowError

    async def send_all(self, data: Buffer) -> None:
        """Send all bytes; see :func:`send_bounded`."""
        await send_bounded(self._stream, data)

    async def send_eof(self) -> None:
        """Shut down the sending side, below TLS."""
        await self.transport.send_eof()

    async def finish(self) -> None:
        """Shut down the sending side and discard input for a while.

        Closing a socket with unread bytes resets the connection, and the client might lose the last response.
        """
        self.read_until(trio.current_time() + LINGER_SECONDS)
        self.is_finished = True
        with suppress(trio.BrokenResourceError, trio.BusyResourceError, trio.ClosedResourceError):
            await self.send_eof()

    async def aclose(self) -> None:
        """Close the connection, even if the client does not answer TLS close_notify."""
        with trio.move_on_after(CLOSE_SECONDS):
            await self._stream.aclose()


# -- hypercorn connection ----------------------------------------------------------------------------------------------

PEER: Final = "ovmstrio.peer"
"""State key of the connection's :class:`Peer`."""

RECEIVE_UNTIL: Final = "ovmstrio.receive_until"
"""State key of the trio time until which the request body must arrive."""

SEND_CONTINUE: Final = "ovmstrio.send_continue"
"""State key of the coroutine function that sends ``100 Continue`` to a client that waits for it."""

_CONNECTION_HEADERS = frozenset({"content-length", "transfer-encoding", "connection"})
_DISABLED_LOG = logging.getLogger("hypercorn.error")
_IDLE_SECONDS: Final = 75.0
_READ_BYTES: Final = 64 * 1024


class _StrictParser(h11.Connection):
    """h11 parser that ignores empty lines before a request, and rejects bare LF line ends.

    Proxies may parse bare LF differently (request smuggling).
    """

    # hypercorn would send 100 Continue for requests that are then refused without their body.
    they_are_waiting_for_100_continue = False

    def next_event(self) -> Any:
        if self.their_state is h11.IDLE:
            received = self.trailing_data[0]
            if size := leading_empty_lines(received):
                self._receive_buffer.maybe_extract_at_most(size)
                received = received[size:]
            if received == b"\r":
                # Half of an empty line.
                return h11.NEED_DATA
            head, _, _ = received.partition(b"\r\n\r\n")
            if has_bare_line_feed(head):
                raise h11.RemoteProtocolError("a line ends with LF alone", HTTPStatus.BAD_REQUEST)
        return super().next_event()


class _Http11Only(H11Protocol):
    """HTTP/1.1 protocol without upgrades, whose error responses match the application's."""

    connection: h11.Connection
    ending: ShutdownState

    async def initiate(self) -> None:
        self.connection = _StrictParser(h11.SERVER, max_incomplete_event_size=self.config.h11_max_incomplete_size)

    @property
    def has_more(self) -> bool:
        """True if bytes of a further or incomplete request have arrived."""
        return bool(self.connection.trailing_data[0])

    async def _check_protocol(self, event: h11.Request) -> None:
        """Disable hypercorn's switch to HTTP/2."""

    async def _create_stream(self, request: h11.Request) -> None:
        """Start a request without its ``upgrade`` header.

        A request with both ``content-length`` and ``transfer-encoding`` is refused, because proxies may parse it
        differently (request smuggling).
        """
        if {b"content-length", b"transfer-encoding"} <= {name for name, _ in request.headers}:
            await self._send_error_response(HTTPStatus.BAD_REQUEST)
            await self.send(Closed())
            return
        headers = [(name, value) for name, value in request.headers if name != b"upgrade"]
        if len(headers) < len(request.headers):
            request = h11.Request(
                method=request.method, target=request.target, headers=headers, http_version=request.http_version
            )
        await super()._create_stream(request)

    async def _send_error_response(self, status_code: int) -> None:
        """Reject malformed HTTP, always with a 4xx status."""
        status = status_code if status_code < HTTPStatus.INTERNAL_SERVER_ERROR else HTTPStatus.BAD_REQUEST
        text = f"not a valid HTTP/1.1 request: {HTTPStatus(status).phrase}"
        await self.refuse(json_response({"error": text}, status))

    async def send_continue(self) -> None:
        """Send ``100 Continue`` if the client waits for it."""
        if self.connection.client_is_waiting_for_100_continue:
            await self._send_h11_event(h11.InformationalResponse(status_code=HTTPStatus.CONTINUE, headers=[]))

    async def refuse(self, answer: HttpAnswer) -> None:
        body = answer.content
        headers = [*answer.headers, ("content-length", str(len(body))), ("connection", "close")]
        await self._send_h11_event(h11.Response(status_code=answer.status, headers=headers))
        await self._send_h11_event(h11.Data(data=body))
        await self._send_h11_event(h11.EndOfMessage())

    async def _send_h11_event(self, event: Any) -> None:
        """Send a part of a response; its head is written like all others, with h11's body framing."""
        if isinstance(event, h11.InformationalResponse):
            phrase = HTTPStatus(event.status_code).phrase
            event = h11.InformationalResponse(status_code=event.status_code, headers=[], reason=phrase)
        if not isinstance(event, h11.Response):
            await super()._send_h11_event(event)
            return
        try:
            lines = (self.connection.send(event) or b"").lower().split(b"\r\n")
        except h11.LocalProtocolError:
            if self.connection.their_state != h11.ERROR:
                raise
            return
        await self.send(RawData(data=_write_head(event, lines)))

    async def stream_send(self, event: StreamEvent) -> None:
        """Send a part of a response.

        The head announces the end of the connection during shutdown, or if the request body was not read.
        """
        if isinstance(event, Response):
            is_early = self.connection.their_state is h11.SEND_BODY
            if is_early or (
                self.ending.is_draining and self.ending.is_last(trio.current_time(), has_more=self.has_more)
            ):
                event.headers.append((b"connection", b"close"))
        await super().stream_send(event)


def _write_head(event: h11.Response, lines: list[bytes]) -> bytes:
    headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in event.headers]
    lengths = [line for line in lines if line.startswith(b"content-length: ")]
    return encode_response_head(
        event.status_code,
        [line for line in headers if line[0] not in _CONNECTION_HEADERS],
        length=int(lengths[0].partition(b" ")[2]) if lengths else None,
        is_chunked=b"transfer-encoding: chunked" in lines,
        keep_alive=b"connection: close" not in lines,
    )


class _Connection(TCPServer):
    """hypercorn connection without its handshake, protocol selection and timeouts."""

    ending: ShutdownState
    receive_seconds: float
    receive_until: float

    @property
    def has_request(self) -> bool:
        given: Any = self.stream
        return not (given.is_finished or self._is_idle)

    @property
    def _is_idle(self) -> bool:
        return self._http.connection.their_state is h11.IDLE and not self._http.has_more

    def apply_shutdown_deadline(self) -> None:
        self._set_deadline()

    async def run(self) -> None:
        given: Any = self.stream
        self._idle_since = trio.current_time()
        self._feeding = trio.CancelScope()
        self._task_group = TaskGroup()
        # Before the first checkpoint: from then on ``apply_shutdown_deadline`` may be called.
        self._http = self._make_protocol(given)
        self.protocol = self._http  # type: ignore[assignment]
        try:
            # hypercorn's task group lets its nursery's cancellation escape, which would end the server.
            with trio.CancelScope() as self._everything:
                async with self._task_group:
                    await self._http.initiate()
                    self._start_request(self.receive_until)
                    await self._read_data()
        except OSError:
            pass
        finally:
            await self._close()

    def _make_protocol(self, given: Any) -> _Http11Only:
        protocol = _Http11Only(
            self.app,
            self.config,
            self.context,
            self._task_group,
            ConnectionState(self.state),
            given.encrypted,
            None,
            None,
            self.protocol_send,
        )
        protocol.ending = self.ending
        protocol.connection_state[SEND_CONTINUE] = protocol.send_continue
        return protocol

    # -- Reading -------------------------------------------------------------------------------------------------------

    async def _read_data(self) -> None:
        """Feed the protocol until EOF or timeout."""
        given: Any = self.stream
        is_open = True
        while is_open:
            try:
                data = await given.receive_some(_READ_BYTES)
            except trio.TooSlowError:
                is_open = await self._on_timeout()
                continue
            except (trio.ClosedResourceError, trio.BrokenResourceError):
                break
            if not data:
                break
            await self._feed(data)
        await self.protocol.handle(Closed())

    async def _feed(self, data: bytes) -> None:
        """Pass bytes to the protocol, in a scope that ends with the connection."""
        if self._is_idle:
            self._start_request(trio.current_time() + self.receive_seconds)
        with trio.CancelScope() as self._feeding:
            await self.protocol.handle(RawData(data))
        self._set_deadline()

    def _start_request(self, receive_until: float) -> None:
        self.receive_until = receive_until
        self._http.connection_state[RECEIVE_UNTIL] = receive_until

    def _set_deadline(self) -> None:
        """Set the read deadline of an idle connection or an incomplete head; the application limits the body."""
        deadline = math.inf
        if self._is_idle:
            deadline = min(self._idle_since + _IDLE_SECONDS, self.ending.idle_until)
        elif self._http.connection.their_state is h11.IDLE:
            deadline = self.receive_until
        given: Any = self.stream
        given.read_until(deadline)

    async def _on_timeout(self) -> bool:
        """Handle a timeout: refuse an incomplete head, or return False if the idle connection may be closed."""
        given: Any = self.stream
        if not self._is_idle:
            await self._http.refuse(error_response(request_timeout_error(self.receive_seconds)))
            await self.protocol_send(Closed())
            return True
        if has_unread(given.transport):
            # A request arrived just before the idle timeout.
            given.read_until(trio.current_time() + IDLE_GRACE_SECONDS)
            return True
        return False

    # -- Sending -------------------------------------------------------------------------------------------------------

    async def protocol_send(self, event: Event) -> None:
        """Send bytes, end the connection, or note that it is idle.

        Shielded, because the caller is often a task that the framework has cancelled; otherwise the connection would
        stay open.
        """
        given: Any = self.stream
        with trio.CancelScope(shield=True):
            if isinstance(event, RawData):
                await self._send(event.data)
            elif isinstance(event, Closed):
                # Closing one direction is a send operation, which must not overlap with another one.
                async with self.send_lock:
                    await given.finish()
                await self.protocol.handle(Closed())
                # The reader may hold a further request and wait for the end of a response that is never sent.
                self._feeding.cancel()
            elif isinstance(event, Updated) and event.idle:
                self._idle_since = trio.current_time()
                self._start_request(self._idle_since + self.receive_seconds)
                self._set_deadline()

    async def _send(self, data: bytes) -> None:
        async with self.send_lock:
            try:
                await self.stream.send_all(data)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                await self.protocol.handle(Closed())
                # The reader may hold a further request and wait for the end of a response that is never sent.
                self._everything.cancel()


class ApplicationServer:
    """Runs the Quart application on accepted connections."""

    def __init__(self, app: QuartTrio, shutdown: ShutdownState, receive_seconds: float) -> None:
        self._app: Any = ASGIWrapper(app)
        self._ending = shutdown
        self._receive_seconds = receive_seconds
        self._config = Config()
        self._config.include_server_header = False
        self._config.include_date_header = False
        self._config.accesslog = None
        self._config.errorlog = _DISABLED_LOG
        # The fast path has no limit of requests per connection either.
        self._config.keep_alive_max_requests = sys.maxsize
        self._context = WorkerContext(None)

    def take(self, stream: trio.abc.Stream, prefix: bytes, receive_until: float, peer: Peer) -> _Connection:
        """Create a server that runs and closes a connection; ``prefix`` are the bytes read so far."""
        given: Any = PrefixedStream(stream, prefix)
        connection = _Connection(self._app, self._config, self._context, {PEER: peer}, given)
        connection.ending = self._ending
        connection.receive_seconds = self._receive_seconds
        connection.receive_until = receive_until
        return connection


# -- Application -------------------------------------------------------------------------------------------------------

_ANSWER: Final = "ovmstrio.answer"
_TASKS: Final = "ovmstrio.tasks"
_PLACE: Final = "ovmstrio.place"
_CALLER: Final = "ovmstrio.caller"


def create_application_server(
    router: Router, shutdown: ShutdownState, max_body_bytes: int, receive_seconds: float
) -> ApplicationServer:
    """Create the application server of a front end.

    ``receive_seconds`` limits the time from the first to the last byte of a request.
    """
    app = _Application(__name__, static_folder=None)
    app.router = router
    app.receive_seconds = receive_seconds
    # No response timeout: the connection detects stalled clients.
    app.config |= {"MAX_CONTENT_LENGTH": max_body_bytes, "RESPONSE_TIMEOUT": None}
    return ApplicationServer(app, shutdown, receive_seconds)


class _Application(QuartTrio):
    router: Router
    receive_seconds: float

    async def asgi_app(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request and release its resources."""
        # Unused, and Quart fails on a path without a leading slash.
        scope["path"] = "/"
        try:
            async with trio.open_nursery() as tasks:
                scope[_TASKS] = tasks
                await super().asgi_app(scope, receive, send)
                tasks.cancel_scope.cancel()
        finally:
            await _finish(scope)
            if (place := scope.pop(_PLACE, None)) is not None:
                place.release()
            if (caller := scope.pop(_CALLER, None)) is not None:
                caller.leave()

    def create_url_adapter(self, _request: Any) -> None:
        """Disable Quart's routing, which fails on invalid host names."""

    async def dispatch_request(self, request_context: Any = None) -> QuartResponse:
        del request_context
        scope: Any = request.scope
        headers = tuple((name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"])
        target, query = scope["raw_path"].decode("latin-1"), scope["query_string"].decode("latin-1")
        route = self.router.find(scope["method"], target)
        peer = scope["state"][PEER]
        http_request = HttpRequest(
            scope["method"], "", query, headers, b"", peer, f"{target}?{query}" if query else target
        )
        request_id = RequestId(headers)
        current_request_id.set(request_id)
        if isinstance(route, HttpAnswer):
            answer = await self.router.refuse(route, http_request)
        else:
            answer = await self._answer(route, http_request._replace(path=route.path, mount=route.mount))
        return _respond(with_request_id(answer, request_id))

    async def _answer(self, route: Route, http_request: HttpRequest) -> HttpAnswer:
        state: Any = request.scope["state"]
        request.body_timeout = max(0, state[RECEIVE_UNTIL] - trio.current_time())
        try:
            refusal = await self.router.admit(route, http_request)
        finally:
            # Also for a client that has left while its request waited for admission.
            request.scope[_CALLER] = current_caller.get()  # type: ignore[typeddict-unknown-key]
        if refusal is not None:
            return refusal
        request.scope[_PLACE] = current_ticket.get()  # type: ignore[typeddict-unknown-key]
        if (request.content_length or 0) <= self.config["MAX_CONTENT_LENGTH"]:
            await state[SEND_CONTINUE]()
        try:
            body: Any = await request.get_data()
        except HTTPException as error:
            rejection = self._refusal(error)
            self.router.count_rejected(rejection, route.service)
            return self.router.shared(route.refuse(rejection), http_request.headers)
        tasks: Any = request.scope[_TASKS] if route.has_tasks else None  # type: ignore[typeddict-item]
        return await self.router.answer(route, http_request._replace(body=body, tasks=tasks))

    def _refusal(self, error: HTTPException) -> ServerError:
        if isinstance(error, RequestEntityTooLarge):
            limit = self.config["MAX_CONTENT_LENGTH"]
            return body_too_large_error(request.content_length or f"more than {limit}", limit)
        return request_timeout_error(self.receive_seconds)


def _respond(answer: HttpAnswer) -> QuartResponse:
    request.scope[_ANSWER] = answer  # type: ignore[typeddict-unknown-key]
    body: Any = answer.content if answer.stream is None else answer.stream
    response = QuartResponse(b"" if answer.status in STATUSES_WITHOUT_BODY else body, answer.status)
    response.headers.clear()
    for name, value in answer.headers:
        response.headers.add(name, value)
    if isinstance(body, bytes) and answer.status not in STATUSES_WITHOUT_BODY:
        response.headers["content-length"] = str(len(body))
    return response


async def _finish(scope: Any) -> None:
    """Close the response stream of a request, shielded, and run its callbacks."""
    answer: HttpAnswer | None = scope.pop(_ANSWER, None)
    if answer is None:
        return
    if answer.stream is not None:
        with trio.CancelScope(shield=True):
            await answer.stream.aclose()
    for callback in answer.after:
        callback()
