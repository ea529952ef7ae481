"""One connection of the application: hypercorn's HTTP/1.1 over a stream of ours.

hypercorn's own trio worker lets one broken connection end the server and one silent client block its end.  Here its
connection class runs below our accept loop, which contains both.  HTTP/2 is not spoken on this port: clients of REST
do not need it, and a frame for a stream that was answered early is what breaks hypercorn's.

This module leans on names of hypercorn that are importable but not documented; the dependency is pinned to a minor
version.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import trio
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.trio.task_group import TaskGroup
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState
from hypercorn.utils import parse_socket_addr

if TYPE_CHECKING:
    import h11
    from quart_trio import QuartTrio

__all__ = ["ApplicationServer", "PrefixedStream"]

_QUIET = logging.getLogger("hypercorn.error")


class PrefixedStream:
    """A stream whose first bytes have been read already, with what hypercorn uses of one."""

    def __init__(self, stream: trio.SocketStream | trio.SSLStream[trio.SocketStream], prefix: bytes) -> None:
        self._stream = stream
        self._prefix = prefix
        self.send_all = stream.send_all
        self.aclose = stream.aclose

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """Give the bytes that were read before, and then what comes."""
        if self._prefix:
            prefix, self._prefix = self._prefix, b""
            await trio.lowlevel.checkpoint()
            return prefix
        return bytes(await self._stream.receive_some(max_bytes))

    async def send_eof(self) -> None:
        """Close the sending side; TLS has no such thing."""
        if isinstance(self._stream, trio.SocketStream):
            await self._stream.send_eof()


class _Http11Only(H11Protocol):
    """HTTP/1.1 that never becomes HTTP/2."""

    async def _check_protocol(self, event: h11.Request) -> None:
        """Take every request as it is."""


class _Connection(TCPServer):
    """hypercorn's connection without its handshake and its choice of protocols."""

    async def run(self) -> None:
        """Serve the connection to its end, and close it."""
        encrypted = isinstance(self.stream._stream, trio.SSLStream)  # noqa: SLF001 - ours
        transport = self.stream._stream.transport_stream if encrypted else self.stream._stream  # noqa: SLF001
        socket = transport.socket
        try:
            client = parse_socket_addr(socket.family, socket.getpeername())
            server = parse_socket_addr(socket.family, socket.getsockname())
            async with TaskGroup() as task_group:
                self._task_group = task_group
                self.protocol = _Http11Only(  # type: ignore[assignment]
                    self.app,
                    self.config,
                    self.context,
                    task_group,
                    ConnectionState(self.state),
                    encrypted,
                    client,
                    server,
                    self.protocol_send,
                )
                await self.protocol.initiate()
                await self.idle_task.restart(task_group, self._idle_timeout)
                await self._read_data()
        except OSError:
            pass
        finally:
            await self._close()


class ApplicationServer:
    """Runs the application on connections that are given to it.

    Ownership: of each connection, until it is closed.
    """

    def __init__(self, app: QuartTrio) -> None:
        self._app: Any = ASGIWrapper(app)
        self._config = Config()
        self._config.include_server_header = False
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
