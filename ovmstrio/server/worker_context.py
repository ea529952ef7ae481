"""Dependencies that a worker process passes to its server object.

Listeners that the parent hands off, drain signals, readiness of all workers, RPC to the peers and shared counters.  The
defaults are those of a server with a single process.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ovmstrio.serving.kind import LoadContext

if TYPE_CHECKING:
    from ovmstrio.core.events import CallObserver
    from ovmstrio.core.worker_peers import Counters, WorkerPeers
    from ovmstrio.transport.listeners import Listener


@dataclass(frozen=True, slots=True)
class WorkerProcessContext:
    """Context of a worker process; the default is a single-process server.

    Attributes:
        listeners: listeners by protocol, instead of the plan's addresses.
        make_load_context: creates the LoadContext from the server's objects.
        unready_reason: returns why the server with all workers is not ready, or an empty text.
        wait_drain: returns when the server must drain.
        wait_drain_warning: returns shortly before ``wait_drain``.
        is_restart: returns whether only this worker drains, so that the server stays ready and refuses no queued calls.
        observers: call observers that precede the server's own.
        watches: pollers of additional files, for reloads.
        serve_peers: RPC server, started with ``nursery.start``, the data plane and the reloads; runs until cancelled.
        worker_deaths: returns the number of unexpected exits of workers.
        leave: runs after all connections have ended, before sequences are saved.
        counters: counters that all workers share; None with a single process.
        peers: RPC to the other workers; None with a single process.
    """

    listeners: Mapping[str, Sequence[Listener]] | None = None
    make_load_context: Callable[..., LoadContext] = LoadContext
    unready_reason: Callable[[], str] | None = None
    wait_drain: Callable[[], Awaitable[None]] | None = None
    wait_drain_warning: Callable[[], Awaitable[None]] | None = None
    is_restart: Callable[[], bool] = lambda: False
    observers: Sequence[CallObserver] = ()
    watches: Sequence[Callable[[], Awaitable[bool]]] = ()
    serve_peers: Callable[..., Awaitable[Any]] | None = None
    worker_deaths: Callable[[], int] = int
    leave: Callable[[], Awaitable[None]] | None = None
    counters: Counters | None = None
    peers: WorkerPeers | None = None

    @property
    def is_multi_worker(self) -> bool:
        """True if the process is one of several workers, so that the parent logs for the server."""
        return self.listeners is not None
