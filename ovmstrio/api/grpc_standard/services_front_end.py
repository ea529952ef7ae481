"""What all front ends over gRPC have in common: they listen, serve and drain."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from ovmstrio.wire.listeners import open_listeners

if TYPE_CHECKING:
    import ssl
    from collections.abc import Sequence

    from ovmstrio.api.grpc_standard.endless_calls import EndlessCalls
    from ovmstrio.wire.grpc.server import GrpcServer
    from ovmstrio.wire.listeners import Listener

__all__ = ["ServicesFrontEnd"]


class ServicesFrontEnd:
    """Serves the services of a server.

    Args:
        server: what answers.
        addresses: where to listen: ``host:port``, ``[v6]:port`` or ``unix:/path``; port 0 lets the system choose.
        endless: calls that would last as long as their clients.
        tls: the server's TLS settings, None for plain connections.
    """

    def __init__(
        self, server: GrpcServer, addresses: Sequence[str], endless: EndlessCalls, tls: ssl.SSLContext | None
    ) -> None:
        self._server = server
        self._addresses = addresses
        self._endless = endless
        self._tls = tls

    async def serve(self, *, task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until :meth:`drain` has ended the last connection; may be run once.

        Reports the addresses that are bound once connections are accepted.

        Ownership: listeners, connections and calls.  A failing connection or call ends nothing but itself.

        Raises:
            ValueError: an address is not understood.
            OSError: an address cannot be bound.

        Cancellation: closes everything at once.
        """
        async with open_listeners(self._addresses, self._tls) as listeners:
            await self.serve_listeners(listeners, task_status=task_status)

    async def serve_listeners(
        self, listeners: list[Listener], *, task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Do as :meth:`serve` with listeners that are the caller's."""
        await self._server.serve(listeners, task_status=task_status)

    async def drain(self, grace_seconds: float) -> None:
        """Stop gently: listeners close, calls in flight get the grace, the rest is cancelled with UNAVAILABLE.

        Watches and reflection streams, which would last as long as their clients, end at once.

        Cancellation: leaves the drain where it is; cancel :meth:`serve` to end at once.
        """
        self._endless.end()
        await self._server.drain(grace_seconds)
