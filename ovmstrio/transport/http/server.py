"""HTTP/1.1 front end: listeners, connections, TLS handshakes and shutdown.

::

    listener ─> connection ─> FastPathConnection ─(not a plain request)─> ApplicationServer
"""

from __future__ import annotations

import logging
import ssl
from typing import TYPE_CHECKING, Any, Final

import structlog
import trio

from ovmstrio.core.connection import NO_PROXIES, Peer, TrustedProxies
from ovmstrio.telemetry.log_rate_limit import LogRateLimiter
from ovmstrio.transport.accept_loop import AcceptLoop, TurnLimiter, in_batches
from ovmstrio.transport.direct_stream import (
    DirectStream,
    close_forcefully,
    close_gracefully,
    get_peer_address,
    has_unread_bytes,
    to_direct_stream,
    underlying_stream,
)
from ovmstrio.transport.http.fast_path import RECEIVE_SECONDS, FastPathConnection
from ovmstrio.transport.http.shutdown import IDLE_GRACE_SECONDS, Handshake, ShutdownState
from ovmstrio.transport.listeners import AddressFrontEnd, bound_address, client_certificate
from ovmstrio.transport.send_budget import SendBudget, current_connection_budget
from ovmstrio.util.lazy_import import import_aside

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ovmstrio.core.connection import ClientAddress
    from ovmstrio.transport.http.application import ApplicationServer
    from ovmstrio.transport.http.router import Router
    from ovmstrio.transport.http.shutdown import ClosableConnection
    from ovmstrio.transport.listeners import Listener

log = structlog.get_logger(__name__)

HANDSHAKE_SECONDS: Final = 10.0
CLOSE_SECONDS: Final = 1.0
MAX_CONNECTIONS: Final = 10_000

_APPLICATION: Final = "ovmstrio.transport.http.application"
"""Module of the Quart application, imported lazily because its frameworks take long to import."""


class HttpFrontEnd(AddressFrontEnd):
    """HTTP/1.1 server of a router's routes, with fast path and Quart application.

    Args:
        addresses: ``host:port``, ``[v6]:port`` or ``unix:/path``; port 0 lets the system choose.
        router: finds and runs handlers.
        tls: TLS settings; None for plain connections.
        max_body_bytes: size limit of request bodies.
        receive_seconds: time limit from the first to the last byte of a request.
        pending: send budget; unlimited by default.
        trusted_proxies: proxies whose headers name the client.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        router: Router,
        *,
        tls: ssl.SSLContext | None = None,
        max_body_bytes: int = 64 * 2**20,
        receive_seconds: float = RECEIVE_SECONDS,
        pending: SendBudget | None = None,
        trusted_proxies: TrustedProxies = NO_PROXIES,
    ) -> None:
        super().__init__(addresses, tls)
        self._pending = pending or SendBudget()
        self._router = router
        self._trusted_proxies = trusted_proxies
        self._max_body_bytes = max_body_bytes
        self._receive_seconds = receive_seconds
        self._ending = ShutdownState()
        self._application: ApplicationServer | None = None
        self._accepting = AcceptLoop()
        self._open: dict[trio.abc.Stream, ClosableConnection] = {}
        self._all_closed = trio.Event()
        self._connections_scope: trio.CancelScope | None = None
        self._pace = TurnLimiter()
        self._faults = LogRateLimiter(log)

    @property
    def open_connections(self) -> int:
        """Number of open connections."""
        return len(self._open)

    async def serve_listeners(
        self, listeners: list[Listener], *, task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Serve on open listeners; like :meth:`serve`."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._faults.log_repetitions)
            async with trio.open_nursery() as connections:
                self._connections_scope = connections.cancel_scope
                task_status.started([bound_address(listener) for listener in listeners])
                await self._accepting.run(listeners, self._serve_connection, connections)
            nursery.cancel_scope.cancel()

    def begin_drain(self) -> None:
        """Announce the end of connections in responses; new connections are still accepted."""
        self._ending.is_draining = True

    async def drain(self, grace_seconds: float) -> int:
        """Drain the front end; return how many requests were cut.

        Answers received requests, then closes listeners and connections. Idle connections stay open for
        :data:`IDLE_GRACE_SECONDS`, because a request may be in transit. Requests that run longer than the grace period
        are cut.
        """
        self.begin_drain()
        self._ending.idle_until = trio.current_time() + min(IDLE_GRACE_SECONDS, grace_seconds)
        for connection in self._open.values():
            connection.apply_shutdown_deadline()
        self._accepting.stop()
        with trio.move_on_after(grace_seconds):
            await self._wait_closed()
            return 0
        cut = sum(connection.has_request for connection in self._open.values())
        await self._close_sockets()
        with trio.move_on_after(CLOSE_SECONDS):
            await self._wait_closed()
            return cut
        self._cancel()
        return cut

    async def _wait_closed(self) -> None:
        if self._connections_scope is not None:
            await self._accepting.ended.wait()
        while self._open:
            await self._all_closed.wait()

    async def _close_sockets(self) -> None:
        """Close all open sockets, which also ends writes that hypercorn shields."""
        async for stream in in_batches(list(self._open)):
            transport: Any = underlying_stream(stream)
            transport.socket.close()

    def _cancel(self) -> None:
        if self._connections_scope is not None:
            self._connections_scope.cancel()

    async def _serve_connection(self, accepted: trio.abc.Stream) -> None:
        stream = to_direct_stream(accepted)
        address = get_peer_address(stream)
        share = self._pending.share()
        current_connection_budget.set(share)
        try:
            if len(self._open) >= MAX_CONNECTIONS:
                fields: dict[str, Any] = {"open_connections": len(self._open)}
                self._faults.log_fault("connection refused", peer=address.endpoint, level=logging.WARNING, **fields)
                return
            if isinstance(stream, trio.SSLStream) and not await self._complete_handshake(stream, address):
                return
            peer = Peer(
                address,
                client_certificate(stream),
                self._trusted_proxies,
                isinstance(stream, trio.SSLStream),
                self._router.revocable_streams,
            )
            lane = FastPathConnection(
                self._router,
                stream,
                self._max_body_bytes,
                shutdown=self._ending,
                receive_seconds=self._receive_seconds,
                peer=peer,
            )
            self._open[stream] = lane
            unread = await lane.run()
            if unread is not None:
                connection = (await self._get_application()).take(stream, unread, lane.receive_until, peer)
                self._open[stream] = connection
                await connection.run()
            elif not lane.is_finished or has_unread_bytes(stream):
                await close_gracefully(stream)
            await self._pace.turn()
        except* (trio.BrokenResourceError, trio.ClosedResourceError):
            log.debug("connection broke")
        except* Exception:  # an error of one connection must not affect others
            log.exception("connection failed")
        finally:
            if isinstance(stream, DirectStream):
                await close_forcefully(stream)
            else:
                with trio.move_on_after(CLOSE_SECONDS, shield=True):
                    await stream.aclose()
            share.close()
            self._open.pop(stream, None)
            if not self._open:
                self._all_closed.set()
                self._all_closed = trio.Event()

    async def _get_application(self) -> ApplicationServer:
        """Return the application server, created on first use."""
        application = await import_aside(_APPLICATION)
        if self._application is None:
            options = self._ending, self._max_body_bytes, self._receive_seconds
            self._application = application.create_application_server(self._router, *options)
        return self._application

    async def _complete_handshake(self, stream: trio.SSLStream[trio.SocketStream], address: ClientAddress) -> bool:
        handshake = self._open[stream] = Handshake(self._ending, HANDSHAKE_SECONDS)
        try:
            if await handshake.perform(stream):
                return True
            reason = f"took longer than {HANDSHAKE_SECONDS:g} s"
        except (trio.BrokenResourceError, ssl.SSLError) as error:
            reason = repr(error.__cause__ or error)
        self._faults.log_fault("tls handshake failed", peer=address.endpoint, error=reason)
        return False
