"""How a process takes part in a server of several processes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import trio

from ovmstrio.serving.kind import LoadContext

if TYPE_CHECKING:
    from ovmstrio.core.events import CallObserver
    from ovmstrio.core.worker_peers import Ledger, Siblings
    from ovmstrio.server.reloading import Reloading
    from ovmstrio.serving.data_plane import DataPlane
    from ovmstrio.transport.listeners import Listener

__all__ = ["Hosting", "ServePeers"]


class ServePeers(Protocol):
    """Answers requests of other worker processes until cancelled."""

    async def __call__(self, plane: DataPlane, reloading: Reloading, *, task_status: trio.TaskStatus[None]) -> None:
        """Report the start once other processes can connect."""
        ...


@dataclass(frozen=True, slots=True)
class Hosting:
    """How a process takes part in a server of several processes; by default it is the only one.

    Attributes:
        listeners: where its connections come from, by protocol, in place of the plan's addresses.
        lend: makes what those that load are lent.
        obstacle: tells why the server as a whole cannot answer, or an empty text.
        until: returns when the server is to drain.
        warned: returns when that is near.
        observers: are told of every call before the server's own are.
        watches: look at files of its own, again and again.
        serve_peers: answers requests of other worker processes; started with the data plane and the reloads.
        leave: is called when all connections have ended, before sequences are kept.
        ledger: is where all processes count together.
        siblings: are the other processes, as those see them who ask all of them.
    """

    listeners: Mapping[str, Sequence[Listener]] | None = None
    lend: Callable[..., LoadContext] = LoadContext
    obstacle: Callable[[], str] | None = None
    until: Callable[[], Awaitable[None]] | None = None
    warned: Callable[[], Awaitable[None]] | None = None
    observers: Sequence[CallObserver] = ()
    watches: Sequence[Callable[[], Awaitable[bool]]] = ()
    serve_peers: ServePeers | None = None
    leave: Callable[[], Awaitable[None]] | None = None
    ledger: Ledger | None = None
    siblings: Siblings | None = None

    @property
    def is_part(self) -> bool:
        """Whether another process tells of the server as a whole."""
        return self.listeners is not None
