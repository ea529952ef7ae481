"""One connection of the application: hypercorn's HTTP/1.1 over a stream of ours.

hypercorn's own trio worker lets one broken connection end the server and one silent client block its end.  Here its
connection class runs below our accept loop, which contains both.  Neither HTTP/2 nor websockets are spoken on this
port: clients of REST do not need them, and late frames and bytes of either are what breaks hypercorn's.

This module leans on names of hypercorn that are importable but not documented; the dependency is pinned to a minor
version.
"""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import h11
import trio
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config
from hypercorn.events import Closed, RawData
from hypercorn.protocol.events import Response
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.trio.task_group import TaskGroup
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState
from hypercorn.utils import parse_socket_addr

from ovmstrio.wire.http.answers import answer_head, json_answer
from ovmstrio.wire.http.prefixed_stream import PrefixedStream

if TYPE_CHECKING:
    from hypercorn.events import Event
    from hypercorn.protocol.events import Event as StreamEvent
    from quart_trio import QuartTrio

__all__ = ["ApplicationServer"]

_OF_THE_CONNECTION = frozenset({"content-length", "transfer-encoding", "connection"})
_QUIET = logging.getLogger("hypercorn.error")


class _Http11Only(H11Protocol):
    """HTTP/1.1 that never becomes anything else, and whose own refusals look as the application's."""

    async def _check_protocol(self, event: h11.Request) -> None:
        """Take every request as it is."""

    async def _create_stream(self, request: h11.Request) -> None:
        """Begin a request, whose wish for another protocol, such as websockets, is not heard.

        One that says the length of its body in two ways is refused: others on its way may have read it differently.
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
        """Refuse what is not HTTP; that is never the server's fault, whatever the parser proposes."""
        status = status_code if status_code < HTTPStatus.INTERNAL_SERVER_ERROR else HTTPStatus.BAD_REQUEST
        answer = json_answer({"error": f"not a valid HTTP/1.1 request: {HTTPStatus(status).phrase}"}, status)
        body = answer.content
        headers = [*answer.headers, ("content-length", str(len(body))), ("connection", "close")]
        await self._send_h11_event(h11.Response(status_code=status, headers=headers))
        await self._send_h11_event(h11.Data(data=body))
        await self._send_h11_event(h11.EndOfMessage())

    async def _send_h11_event(self, event: Any) -> None:
        """Send a part of an answer; its head is written as every other one is, with what h11 says of the rest."""
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
        await self.send(RawData(data=_rewritten(event, lines)))

    async def stream_send(self, event: StreamEvent) -> None:
        """Send a part of an answer, which says if it is the connection's last.

        So it is while the server drains, and when it comes before the end of its request: the rest is not read.
        """
        if isinstance(event, Response):
            early = self.connection.their_state is h11.SEND_BODY
            if early or self.context.terminated.is_set():
                event.headers.append((b"connection", b"close"))
        await super().stream_send(event)


def _rewritten(event: h11.Response, lines: list[bytes]) -> bytes:
    said = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in event.headers]
    lengths = [line for line in lines if line.startswith(b"content-length: ")]
    return answer_head(
        event.status_code,
        [line for line in said if line[0] not in _OF_THE_CONNECTION],
        length=int(lengths[0].partition(b" ")[2]) if lengths else None,
        is_chunked=b"transfer-encoding: chunked" in lines,
        keep_alive=b"connection: close" not in lines,
    )


class _Connection(TCPServer):
    """hypercorn's connection without its handshake and its choice of protocols."""

    async def run(self) -> None:
        """Serve the connection to its end, and close it."""
        given: Any = self.stream
        socket = given.transport.socket
        try:
            client = parse_socket_addr(socket.family, socket.getpeername())
            server = parse_socket_addr(socket.family, socket.getsockname())
            # A scope of our own: hypercorn's group lets its nursery's cancellation escape, which would end the server.
            with trio.CancelScope() as self._everything:
                await self._serve(given, client, server)
        except OSError:
            pass
        finally:
            await self._close()

    async def _serve(self, given: Any, client: tuple[str, int] | None, server: tuple[str, int] | None) -> None:
        async with TaskGroup() as task_group:
            self._task_group = task_group
            self.protocol = _Http11Only(  # type: ignore[assignment]
                self.app,
                self.config,
                self.context,
                task_group,
                ConnectionState(self.state),
                given.encrypted,
                client,
                server,
                self.protocol_send,
            )
            await self.protocol.initiate()
            await self.idle_task.restart(task_group, self._idle_timeout)
            await self._read_data()
            # Otherwise the connection would stay until its idle time is over.
            await self.idle_task.stop()

    async def protocol_send(self, event: Event) -> None:
        """Send bytes, end the connection, or note that it is idle or busy.

        What does so is often the application's task at its very end, when the framework has cancelled it: unshielded,
        the connection would stay open for ever.
        """
        given: Any = self.stream
        with trio.CancelScope(shield=True):
            if isinstance(event, RawData):
                await self._send(event.data)
            elif isinstance(event, Closed):
                await given.finish()
                await self.protocol.handle(Closed())
            else:
                await super().protocol_send(event)

    async def _send(self, data: bytes) -> None:
        async with self.send_lock:
            try:
                await self.stream.send_all(data)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                await self.protocol.handle(Closed())
                # The reader, if it holds a next request, waits for the end of an answer that will never be sent.
                self._everything.cancel()


class ApplicationServer:
    """Runs the application on connections that are given to it.

    Ownership: of each connection, until it is closed.
    """

    def __init__(self, app: QuartTrio) -> None:
        self._app: Any = ASGIWrapper(app)
        self._config = Config()
        self._config.include_server_header = False
        self._config.include_date_header = False
        self._config.accesslog = None
        self._config.errorlog = _QUIET
        self._config.keep_alive_timeout = 75
        self._config.max_requests = None
        self._context = WorkerContext(None)

    async def serve(self, stream: trio.SocketStream | trio.SSLStream[trio.SocketStream], prefix: bytes) -> None:
        """Serve a connection, of which ``prefix`` has been read, and close it.

        Raises:
            Exception: whatever hypercorn does not contain; it belongs to this connection alone.

        Cancellation: at any checkpoint but while an answer is sent, which hypercorn shields; close the socket to end
        that, too.
        """
        given: Any = PrefixedStream(stream, prefix)
        await _Connection(self._app, self._config, self._context, {}, given)

    async def drain(self) -> None:
        """Let idle connections close, and busy ones after their answer."""
        await self._context.terminated.set()
