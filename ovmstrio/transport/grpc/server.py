"""The server: listeners, the set of open connections, and how all of it ends."""

from __future__ import annotations

import logging
import ssl
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Final, Protocol

import structlog
import trio
from grpclib.const import Handler
from grpclib.encoding.base import CodecBase

from ovmstrio.core.connection import NO_PROXIES, ClientAddress, Peer, TrustedProxies
from ovmstrio.core.events import RequestObserver
from ovmstrio.telemetry.log_rate_limit import RepeatedFaults
from ovmstrio.transport.accepting import Accepting, Spread, in_batches
from ovmstrio.transport.direct_stream import direct, peer_address_of
from ovmstrio.transport.grpc.connection import NO_ROUTES, Connection, Endings, Routes, close_stream
from ovmstrio.transport.grpc.headers import ErrorMapper, FailureTranslator
from ovmstrio.transport.grpc.limits import TransportLimits
from ovmstrio.transport.listeners import Listener, address_of, certificate_of
from ovmstrio.transport.send_budget import PendingAnswers

__all__ = ["GrpcServer", "GrpclibService", "TrioService"]


class TrioService:
    """Mix-in for services that betterproto2 generates, placed before the generated base.

    A response generator is closed as soon as its call ends. The generated code would leave a cancelled one to the
    garbage collector, and with it whatever the generator has open.
    """

    async def _call_rpc_handler_server_stream(self, handler: Callable[..., Any], stream: Any, request: Any) -> None:
        responses = handler(request)
        if not isinstance(responses, AsyncGenerator):
            async for response in responses:
                await stream.send_message(response)
            return
        async with aclosing(responses):
            async for response in responses:
                await stream.send_message(response)


log = structlog.get_logger(__name__)

_HOUSEKEEPING_SECONDS: Final = 1.0
_LAST_HANDSHAKE_SECONDS: Final = 1.0
"""What a TLS handshake gets once the server drains."""


class GrpclibService(Protocol):
    """What generated service bases are."""

    def __mapping__(self) -> Mapping[str, Handler]:
        """Give the handlers by path."""


class GrpcServer:
    """Hosts grpclib services on trio.

    Args:
        services: objects whose ``__mapping__()`` gives ``grpclib.const.Handler`` by path.
        codec: turns messages into bytes and back.
        further: is asked for the handler of a path that no service has; it may answer differently each time.
        limits: what peers may do.
        pending: counts what waits for clients; of no bound for the server unless given.
        observer: is told of every call; None for nobody.
        trusted_proxies: whose metadata names clients.
        map_error: translates the application's errors; called for everything that a handler or the codec raises and
            that is not a ``GRPCError``.

    Raises:
        ValueError: two services claim one path.
    """

    def __init__(
        self,
        services: Sequence[GrpclibService],
        codec: CodecBase,
        *,
        further: Routes = NO_ROUTES,
        limits: TransportLimits | None = None,
        pending: PendingAnswers | None = None,
        observer: RequestObserver | None = None,
        trusted_proxies: TrustedProxies = NO_PROXIES,
        map_error: ErrorMapper | None = None,
    ) -> None:
        self._routes: dict[str, Handler] = {}
        for service in services:
            for path, handler in service.__mapping__().items():
                if path in self._routes:
                    raise ValueError(f"two services claim {path}")
                self._routes[path] = handler
        self._further = further
        self._codec = codec
        self._limits = limits or TransportLimits()
        self._pending = pending or PendingAnswers()
        self._observer = observer
        self._trusted_proxies = trusted_proxies
        self._failures = FailureTranslator(map_error)
        self._faults = RepeatedFaults(log)
        self._endings = Endings()
        self._connections: set[Connection] = set()
        self._accepting = Accepting()
        self._is_running = False
        self._handshakes: set[trio.CancelScope] = set()
        self._streams = 0
        self._no_streams = trio.Event()
        self._drain: _Drain | None = None

    @property
    def connections(self) -> Collection[Connection]:
        """The open connections."""
        return self._connections

    @property
    def active_calls(self) -> int:
        """Count the calls whose handlers run."""
        return sum(len(connection.calls) for connection in self._connections)

    async def serve(
        self, listeners: Sequence[Listener], *, task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Accept connections and serve them, until ``drain`` has ended the last one.

        Reports the bound addresses through ``task_status`` once connections are accepted.

        Ownership: every connection and call runs below this function. It closes the listeners, which the caller
        opened. A failing connection or call ends nothing but itself.

        Cancellation: closes everything at once; call ``drain`` first for a gentle end.
        """
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._keep_house)
            nursery.start_soon(self._faults.sum_up)
            async with trio.open_nursery() as connections:
                self._is_running = True
                task_status.started([address_of(listener) for listener in listeners])
                await self._accepting.run(listeners, self.serve_stream, connections)
            nursery.cancel_scope.cancel()

    async def drain(self, grace_seconds: float) -> int:
        """Stop gently: take what has come, close the listeners, let calls finish, cancel the rest with UNAVAILABLE.

        Returns when the last connection is closed, at the latest about two seconds after the grace has passed, how
        many calls were cancelled.

        Cancellation: leaves the drain where it is; cancel ``serve`` to end at once.
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
                while self._streams:
                    await self._no_streams.wait()
            drain.is_over = True
        return drain.cut

    async def serve_stream(self, stream: trio.abc.Stream) -> None:
        """Serve one connection that was accepted elsewhere; never raises what a peer or a call can cause.

        Ownership: closes ``stream``.
        """
        self._streams += 1
        stream = direct(stream)
        address = peer_address_of(stream)
        try:
            is_over = self._drain is not None and self._drain.is_over
            if is_over or len(self._connections) >= self._limits.max_connections:
                facts: dict[str, Any] = {"open_connections": len(self._connections), "draining": is_over}
                self._faults.tell("connection refused", peer=address.endpoint, level=logging.WARNING, **facts)
            elif not isinstance(stream, trio.SSLStream) or await self._shake_hands(stream, address):
                await self._run_connection(stream, address)
        except Exception:  # the border of one connection: its failure must not reach the others
            log.exception("connection failed")
        finally:
            await close_stream(stream)
            self._streams -= 1
            if not self._streams:
                self._no_streams.set()
                self._no_streams = trio.Event()

    async def _run_connection(self, stream: trio.abc.Stream, address: ClientAddress) -> None:
        connection = Connection(
            stream,
            self._routes,
            self._codec,
            further=self._further,
            limits=self._limits,
            failures=self._failures,
            faults=self._faults,
            endings=self._endings,
            share=self._pending.share(),
            peer=Peer(address, certificate_of(stream), self._trusted_proxies),
            observer=self._observer,
        )
        self._connections.add(connection)
        if self._drain is not None:
            self._drain.begin(connection)
        try:
            await connection.run()
        finally:
            self._connections.discard(connection)

    async def _shake_hands(self, stream: trio.SSLStream[trio.abc.Stream], address: ClientAddress) -> bool:
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
            self._faults.tell("tls handshake failed", peer=address.endpoint, error=reason)
            await trio.aclose_forcefully(stream)
            return False
        if stream.selected_alpn_protocol() != "h2":
            self._faults.tell("tls client does not speak h2", peer=address.endpoint)
            return False
        return True

    async def _keep_house(self) -> None:
        while True:
            await trio.sleep(_HOUSEKEEPING_SECONDS)
            now = trio.current_time()
            async for connection in in_batches(list(self._connections)):
                if not connection.closed.is_set():
                    connection.look_after(now)


class _Drain:
    """The end of a server's connections.

    Attributes:
        deadline: when what has not ended is cut, on trio's clock.
        cut: how many calls were.
        is_over: whether no further connection can be taken.
    """

    def __init__(self, nursery: trio.Nursery, deadline: float) -> None:
        self._nursery = nursery
        self.deadline = deadline
        self.cut = 0
        self.is_over = False
        self._spread = Spread()

    def begin(self, connection: Connection) -> None:
        """Drain a connection, unless it is too late for that."""
        if not self.is_over and not connection.closed.is_set():
            self._nursery.start_soon(self._drain, connection)

    async def _drain(self, connection: Connection) -> None:
        self.cut += await connection.drain(max(0.0, self.deadline - trio.current_time()) + self._spread.next())
