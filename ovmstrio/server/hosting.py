"""How a process takes part in a server of several processes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ovmstrio.runtimes.kind import LoadContext

if TYPE_CHECKING:
    from ovmstrio.core.events import CallObserver
    from ovmstrio.core.shared_counts import Ledger
    from ovmstrio.server.workers.engines import WorkerEngines
    from ovmstrio.server.workers.peers import Peers
    from ovmstrio.server.workers.turns import OtherWorkers
    from ovmstrio.wire.listeners import Listener

__all__ = ["Hosting"]


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
        peers: are the other processes, where there are any.
        leave: is called when all connections have ended, before sequences are kept.
        ledger: is where all processes count together.
        engines: are those that processes share.
        siblings: are the other processes, as those see them who ask all of them.
    """

    listeners: Mapping[str, Sequence[Listener]] | None = None
    lend: Callable[..., LoadContext] = LoadContext
    obstacle: Callable[[], str] | None = None
    until: Callable[[], Awaitable[None]] | None = None
    warned: Callable[[], Awaitable[None]] | None = None
    observers: Sequence[CallObserver] = ()
    watches: Sequence[Callable[[], Awaitable[bool]]] = ()
    peers: Peers | None = None
    leave: Callable[[], Awaitable[None]] | None = None
    ledger: Ledger | None = None
    engines: WorkerEngines | None = None
    siblings: OtherWorkers | None = None

    @property
    def is_part(self) -> bool:
        """Whether another process tells of the server as a whole."""
        return self.listeners is not None
