"""gRPC server: connections of its listeners, TLS handshakes and draining."""

from __future__ import annotations

import logging
import ssl
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, Protocol

import structlog
import trio
from grpclib.const import Handler
from grpclib.encoding.base import CodecBase

from ovmstrio.core.connection import NO_PROXIES, ClientAddress, Peer, TrustedProxies
from ovmstrio.core.events import RequestObserver
from ovmstrio.telemetry.log_rate_limit import LogRateLimiter
from ovmstrio.transport.accept_loop import AcceptLoop, DeadlineSpread, in_batches
from ovmstrio.transport.direct_stream import get_peer_address, to_direct_stream
from ovmstrio.transport.grpc.call import FailureTranslator
from ovmstrio.transport.grpc.connection import NO_ROUTES, CancelPacer, Connection, Routes, close_stream
from ovmstrio.transport.grpc.headers import ErrorMapper
from ovmstrio.transport.grpc.limits import TransportLimits
from ovmstrio.transport.listeners import Listener, bound_address, client_certificate
from ovmstrio.transport.send_budget import SendBudget

log = structlog.get_logger(__name__)

_HOUSEKEEPING_SECONDS: Final = 1.0
_LAST_HANDSHAKE_SECONDS: Final = 1.0
"""Timeout of TLS handshakes during draining."""


class GrpclibService(Protocol):
    """Generated service base."""

    def __mapping__(self) -> Mapping[str, Handler]:
        """Return the handlers by path."""


class GrpcServer:
    """gRPC server for grpclib services on trio; raises ``ValueError`` if two services have the same path.

    Args:
        services: objects whose ``__mapping__()`` returns handlers by path.
        codec: message codec.
        fallback_routes: lookup of paths that no service has; called for every request.
        limits: transport limits.
        send_budget: send budget; unlimited by default.
        observer: notified of every call.
        trusted_proxies: proxies whose headers name the client.
        revocable_streams: open streams of authenticated callers; None without authentication.
        map_error: translates exceptions of handlers and codec other than ``GRPCError``.
        count_oversized: counts a request message above the size limit.
    """

    def __init__(
        self,
        services: Sequence[GrpclibService],
        codec: CodecBase,
        *,
        fallback_routes: Routes = NO_ROUTES,
        limits: TransportLimits | None = None,
        send_budget: SendBudget | None = None,
        observer: RequestObserver | None = None,
        trusted_proxies: TrustedProxies = NO_PROXIES,
        revocable_streams: set[Any] | None = None,
        map_error: ErrorMapper | None = None,
        count_oversized: Callable[[], object] = lambda: None,
    ) -> None:
        self._routes: dict[str, Handler] = {}
        for service in services:
            for path, handler in service.__mapping__().items():
                if path in self._routes:
                    raise ValueError(f"two services have the path {path}")
                self._routes[path] = handler
        self._fallback_routes = fallback_routes
        self._codec = codec
        self._limits = limits or TransportLimits()
        self._pending = send_budget or SendBudget()
        self._observer = observer
        self._count_oversized = count_oversized
        self._trusted_proxies = trusted_proxies
        self._revocable_streams = revocable_streams
        self._failures = FailureTranslator(map_error)
        self._faults = LogRateLimiter(log)
        self._endings = CancelPacer()
        self._connections: set[Connection] = set()
        self._accepting = AcceptLoop()
        self._is_running = False
        self._handshakes: set[trio.CancelScope] = set()
        self._open_streams = 0
        self._all_streams_closed = trio.Event()
        self._drain: _Drain | None = None

    @property
    def connections(self) -> Collection[Connection]:
        """Open connections."""
        return self._connections

    @property
    def active_calls(self) -> int:
        """Number of running calls."""
        return sum(len(connection.calls) for connection in self._connections)

    async def serve(
        self, listeners: Sequence[Listener], *, task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Accept and serve connections until ``drain`` has ended the last one; closes the listeners.

        Reports the bound addresses through ``task_status``. Errors of a connection or call do not affect others.

        Cancellation: closes all connections at once; call ``drain`` first for a graceful shutdown.
        """
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._run_housekeeping)
            nursery.start_soon(self._faults.log_repetitions)
            async with trio.open_nursery() as connections:
                self._is_running = True
                task_status.started([bound_address(listener) for listener in listeners])
                await self._accepting.run(listeners, self.serve_stream, connections)
            nursery.cancel_scope.cancel()

    async def drain(self, grace_seconds: float) -> int:
        """Drain the server; return how many calls were cancelled.

        Accepts queued connections, closes the listeners, waits for running calls and cancels the rest with UNAVAILABLE.
        Returns when the last connection is closed, at most about two seconds after the grace period.
        """
        self._accepting.stop()
        for handshake in self._handshakes:
            handshake.deadline = min(handshake.deadline, trio.current_time() + _LAST_HANDSHAKE_SECONDS)
        async with trio.open_nursery() as nursery:
            drain = self._drain = _Drain(nursery, trio.current_time() + grace_seconds)
            async for connection in in_batches(list(self._connections)):
                drain.begin(connection)
            with trio.move_on_at(drain.deadline):
                if self._is_running:
                    await self._accepting.ended.wait()
                while self._open_streams:
                    await self._all_streams_closed.wait()
            drain.is_over = True
        return drain.cut

    async def serve_stream(self, stream: trio.abc.Stream) -> None:
        """Serve and close an accepted connection; raises no errors of peers or calls."""
        self._open_streams += 1
        stream = to_direct_stream(stream)
        address = get_peer_address(stream)
        try:
            is_over = self._drain is not None and self._drain.is_over
            if is_over or len(self._connections) >= self._limits.max_connections:
                fields: dict[str, Any] = {"open_connections": len(self._connections), "draining": is_over}
                self._faults.log_fault("connection refused", peer=address.endpoint, level=logging.WARNING, **fields)
            elif not isinstance(stream, trio.SSLStream) or await self._complete_handshake(stream, address):
                await self._run_connection(stream, address)
        except Exception:  # an error of one connection must not affect others
            log.exception("connection failed")
        finally:
            await close_stream(stream)
            self._open_streams -= 1
            if not self._open_streams:
                self._all_streams_closed.set()
                self._all_streams_closed = trio.Event()

    async def _run_connection(self, stream: trio.abc.Stream, address: ClientAddress) -> None:
        connection = Connection(
            stream,
            self._routes,
            self._codec,
            fallback_routes=self._fallback_routes,
            limits=self._limits,
            failures=self._failures,
            fault_log=self._faults,
            cancel_pacer=self._endings,
            budget=self._pending.share(),
            peer=Peer(
                address,
                client_certificate(stream),
                self._trusted_proxies,
                isinstance(stream, trio.SSLStream),
                self._revocable_streams,
            ),
            observer=self._observer,
            count_oversized=self._count_oversized,
        )
        self._connections.add(connection)
        if self._drain is not None:
            self._drain.begin(connection)
        try:
            await connection.run()
        finally:
            self._connections.discard(connection)

    async def _complete_handshake(self, stream: trio.SSLStream[trio.abc.Stream], address: ClientAddress) -> bool:
        seconds = self._limits.handshake_seconds
        seconds = seconds if self._drain is None else min(seconds, _LAST_HANDSHAKE_SECONDS)
        try:
            with trio.fail_after(seconds) as scope:
                self._handshakes.add(scope)
                try:
                    await stream.do_handshake()
                finally:
                    self._handshakes.discard(scope)
        except (trio.BrokenResourceError, trio.TooSlowError, ssl.SSLError) as error:
            reason = repr(error.__cause__ or error)
            self._faults.log_fault("tls handshake failed", peer=address.endpoint, error=reason)
            await trio.aclose_forcefully(stream)
            return False
        if stream.selected_alpn_protocol() != "h2":
            self._faults.log_fault("tls client does not support h2", peer=address.endpoint)
            return False
        return True

    async def _run_housekeeping(self) -> None:
        while True:
            await trio.sleep(_HOUSEKEEPING_SECONDS)
            now = trio.current_time()
            async for connection in in_batches(list(self._connections)):
                if not connection.closed.is_set():
                    connection.check_timers(now)


class _Drain:
    """Graceful shutdown of the server's connections; ``cut`` counts the cancelled calls."""

    def __init__(self, nursery: trio.Nursery, deadline: float) -> None:
        self._nursery = nursery
        self.deadline = deadline
        self.cut = 0
        self.is_over = False
        self._spread = DeadlineSpread()

    def begin(self, connection: Connection) -> None:
        if not self.is_over and not connection.closed.is_set():
            self._nursery.start_soon(self._drain, connection)

    async def _drain(self, connection: Connection) -> None:
        self.cut += await connection.drain(max(0.0, self.deadline - trio.current_time()) + self._spread.next())
