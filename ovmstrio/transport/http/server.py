"""What all front ends over HTTP share: listeners, an accept loop that contains every failure, and a bounded end.

::

    listener ─> connection ─> FastLane ─(anything but a plain request)─> ApplicationServer
"""

from __future__ import annotations

import logging
import ssl
from typing import TYPE_CHECKING, Any, Final

import structlog
import trio

from ovmstrio.core.callers import current_certificate
from ovmstrio.core.connection import NO_PROXIES, Peer, TrustedProxies
from ovmstrio.core.events import is_over_tls
from ovmstrio.telemetry.log_rate_limit import RepeatedFaults
from ovmstrio.transport.accepting import Accepting, Pace, in_batches
from ovmstrio.transport.direct_stream import (
    DirectStream,
    close_gently,
    close_now,
    direct,
    has_unread_bytes,
    peer_address_of,
    transport_of,
)
from ovmstrio.transport.http.fast_path import RECEIVE_SECONDS, FastLane
from ovmstrio.transport.http.shutdown import IDLE_GRACE_SECONDS, Ending, Handshake
from ovmstrio.transport.listeners import AtAddresses, address_of, certificate_of
from ovmstrio.transport.send_budget import PendingAnswers, current_share
from ovmstrio.util.lazy_import import import_aside

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ovmstrio.core.connection import ClientAddress
    from ovmstrio.transport.http.application import ApplicationServer
    from ovmstrio.transport.http.router import Router
    from ovmstrio.transport.http.shutdown import EndingConnection
    from ovmstrio.transport.listeners import Listener

__all__ = ["HttpFrontEnd"]

log = structlog.get_logger(__name__)

HANDSHAKE_SECONDS: Final = 10.0
CLOSE_SECONDS: Final = 1.0
MAX_CONNECTIONS: Final = 10_000

_APPLICATION: Final = "ovmstrio.transport.http.application"
"""Where the application is made, with frameworks that take long to import."""


class HttpFrontEnd(AtAddresses):
    """Serves what a router finds over HTTP/1.1, by the fast lane and the application behind it.

    Args:
        addresses: where to listen: ``host:port``, ``[v6]:port`` or ``unix:/path``; port 0 lets the system choose.
        router: finds what answers requests.
        tls: the server's TLS settings, None for plain connections.
        max_body_bytes: larger bodies are refused.
        receive_seconds: what a request may take from its first byte to its last.
        pending: counts what waits for clients; of no bound for the server unless given.
        trusted_proxies: whose headers name clients.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        router: Router,
        *,
        tls: ssl.SSLContext | None = None,
        max_body_bytes: int = 64 * 2**20,
        receive_seconds: float = RECEIVE_SECONDS,
        pending: PendingAnswers | None = None,
        trusted_proxies: TrustedProxies = NO_PROXIES,
    ) -> None:
        super().__init__(addresses, tls)
        self._pending = pending or PendingAnswers()
        self._router = router
        self._trusted_proxies = trusted_proxies
        self._max_body_bytes = max_body_bytes
        self._receive_seconds = receive_seconds
        self._ending = Ending()
        self._application: ApplicationServer | None = None
        self._accepting = Accepting()
        self._open: dict[trio.abc.Stream, EndingConnection] = {}
        self._nobody_left = trio.Event()
        self._everything: trio.CancelScope | None = None
        self._pace = Pace()
        self._faults = RepeatedFaults(log)

    @property
    def open_connections(self) -> int:
        """Count the connections that are open."""
        return len(self._open)

    async def serve_listeners(
        self, listeners: list[Listener], *, task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Do as :meth:`serve` with listeners that are the caller's."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._faults.sum_up)
            async with trio.open_nursery() as connections:
                self._everything = connections.cancel_scope
                task_status.started([address_of(listener) for listener in listeners])
                await self._accepting.run(listeners, self._serve_connection, connections)
            nursery.cancel_scope.cancel()

    def begin_drain(self) -> None:
        """Say in answers that they are the last of their connections; new ones are still accepted."""
        self._ending.is_near = True

    async def drain(self, grace_seconds: float) -> int:
        """Stop gently: what has come is answered, and then the listeners and connections are closed.

        Those of connections on which a request may be on its way stay open for :data:`IDLE_GRACE_SECONDS`; requests in
        flight get the grace, and the sockets of the rest are closed.  Returns how many requests were cut by that.

        Cancellation: leaves the drain where it is; cancel :meth:`serve` to end at once.
        """
        self.begin_drain()
        self._ending.idle_until = trio.current_time() + min(IDLE_GRACE_SECONDS, grace_seconds)
        for connection in self._open.values():
            connection.hurry()
        self._accepting.stop()
        with trio.move_on_after(grace_seconds):
            await self._end_of_all()
            return 0
        cut = sum(connection.has_request for connection in self._open.values())
        await self._close_sockets()
        with trio.move_on_after(CLOSE_SECONDS):
            await self._end_of_all()
            return cut
        self._cancel()
        return cut

    async def _end_of_all(self) -> None:
        if self._everything is not None:
            await self._accepting.ended.wait()
        while self._open:
            await self._nobody_left.wait()

    async def _close_sockets(self) -> None:
        """Close the sockets of all connections that are open: this ends even writes that hypercorn shields.

        Cancellation: leaves some of them open.
        """
        async for stream in in_batches(list(self._open)):
            transport: Any = transport_of(stream)
            transport.socket.close()

    def _cancel(self) -> None:
        if self._everything is not None:
            self._everything.cancel()

    async def _serve_connection(self, accepted: trio.abc.Stream) -> None:
        stream = direct(accepted)
        address = peer_address_of(stream)
        share = self._pending.share()
        current_share.set(share)
        try:
            if len(self._open) >= MAX_CONNECTIONS:
                facts: dict[str, Any] = {"open_connections": len(self._open)}
                self._faults.tell("connection refused", peer=address.endpoint, level=logging.WARNING, **facts)
                return
            if isinstance(stream, trio.SSLStream) and not await self._shake_hands(stream, address):
                return
            peer = Peer(address, certificate_of(stream), self._trusted_proxies)
            if isinstance(stream, trio.SSLStream):
                current_certificate.set(peer.certificate)
                is_over_tls.set(True)
            lane = FastLane(
                self._router,
                stream,
                self._max_body_bytes,
                ending=self._ending,
                receive_seconds=self._receive_seconds,
                peer=peer,
            )
            self._open[stream] = lane
            left = await lane.run()
            if left is not None:
                connection = (await self._behind_lane()).take(stream, left, lane.receive_until, peer)
                self._open[stream] = connection
                await connection.run()
            elif not lane.is_finished or has_unread_bytes(stream):
                await close_gently(stream)
            await self._pace.turn()
        except* (trio.BrokenResourceError, trio.ClosedResourceError):
            log.debug("connection broke")
        except* Exception:  # the border of one connection: its failure must not reach the others
            log.exception("connection failed")
        finally:
            if isinstance(stream, DirectStream):
                await close_now(stream)
            else:
                with trio.move_on_after(CLOSE_SECONDS, shield=True):
                    await stream.aclose()
            share.close()
            self._open.pop(stream, None)
            if not self._open:
                self._nobody_left.set()
                self._nobody_left = trio.Event()

    async def _behind_lane(self) -> ApplicationServer:
        """Give what answers everything but plain requests; a server that is asked for no such thing does without it.

        Cancellation: while it is imported, which goes on in its thread.
        """
        application = await import_aside(_APPLICATION)
        if self._application is None:
            options = self._ending, self._max_body_bytes, self._receive_seconds
            self._application = application.serve_application(self._router, *options)
        return self._application

    async def _shake_hands(self, stream: trio.SSLStream[trio.SocketStream], address: ClientAddress) -> bool:
        handshake = self._open[stream] = Handshake(self._ending, HANDSHAKE_SECONDS)
        try:
            if await handshake.shake(stream):
                return True
            reason = f"took longer than {HANDSHAKE_SECONDS:g} s"
        except (trio.BrokenResourceError, ssl.SSLError) as error:
            reason = repr(error.__cause__ or error)
        self._faults.tell("tls handshake failed", peer=address.endpoint, error=reason)
        return False
