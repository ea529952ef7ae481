"""What front ends have in common that open listeners of their own, and serve those that are given to them."""

from __future__ import annotations

import ssl
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import trio

from ovmstrio.wire.listeners import open_listeners

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ovmstrio.wire.listeners import Listener

__all__ = ["AtAddresses"]


class AtAddresses(ABC):
    """Serves at addresses.

    Args:
        addresses: where to listen: ``host:port``, ``[v6]:port`` or ``unix:/path``; port 0 lets the system choose.
        tls: the server's TLS settings, None for plain connections.
    """

    def __init__(self, addresses: Sequence[str], tls: ssl.SSLContext | None) -> None:
        self._addresses = addresses
        self._tls = tls

    async def serve(self, *, task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until a drain has ended the last connection; may be run once.

        Reports the addresses that are bound once connections are accepted.

        Ownership: listeners, connections and requests.  A failing connection or request ends nothing but itself.

        Raises:
            ValueError: an address is not understood.
            OSError: an address cannot be bound.

        Cancellation: closes everything at once.
        """
        async with open_listeners(self._addresses, self._tls) as listeners:
            await self.serve_listeners(listeners, task_status=task_status)

    @abstractmethod
    async def serve_listeners(
        self, listeners: list[Listener], *, task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Do as :meth:`serve` with listeners that are the caller's."""
