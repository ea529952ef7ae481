"""Registry of thread pools, worker processes and batchers by service, for metrics.

The registry sets the owner while a service is loaded; tasks started by the load inherit it.
"""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Final, Protocol

import trio

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ovmstrio.core.service import SampledThreads

current_owner: Final[ContextVar[str]] = ContextVar("current_owner", default="")
"""The service that the running task belongs to; empty for none."""


class ThreadPoolResource(Protocol):
    """Thread pool."""

    @property
    def threads(self) -> int:
        """Number of threads, without stuck ones."""

    @property
    def waiting(self) -> int:
        """Number of calls queued for a thread."""

    @property
    def stuck(self) -> int:
        """Number of abandoned threads that still run."""


class BatcherResource(Protocol):
    """Batcher."""

    @property
    def waiting(self) -> int:
        """Number of requests queued for a batch."""


class ProcessResource(Protocol):
    """Worker process."""

    @property
    def pid(self) -> int | None:
        """Process id; None before the start."""

    async def sample(self, seconds: float, rate: float) -> list[SampledThreads]:
        """Sample the process's threads; see ``WorkerProcess.sample``."""


class ResourceRegistry:
    """Thread pools, processes and batchers of one event loop, by service.

    The event loop writes; any thread may read.

    Attributes:
        ended: number of unexpected process exits by service.
    """

    def __init__(self) -> None:
        self.ended: Counter[str] = Counter()
        self._pools: dict[ThreadPoolResource, str] = {}
        self._processes: dict[ProcessResource, str] = {}
        self._batches: dict[BatcherResource, str] = {}

    @contextmanager
    def threads(self, pool: ThreadPoolResource, owner: str) -> Iterator[None]:
        """Register a thread pool within the block."""
        self._pools[pool] = owner
        try:
            yield
        finally:
            del self._pools[pool]

    @contextmanager
    def process(self, process: ProcessResource, owner: str) -> Iterator[None]:
        """Register a process within the block."""
        self._processes[process] = owner
        self.ended[owner] += 0
        try:
            yield
        finally:
            del self._processes[process]

    @contextmanager
    def batcher(self, batches: BatcherResource, owner: str) -> Iterator[None]:
        """Register a batcher within the block."""
        self._batches[batches] = owner
        try:
            yield
        finally:
            del self._batches[batches]

    def batches(self) -> list[tuple[str, BatcherResource]]:
        """Return batchers with their services; thread-safe."""
        return [(owner, batches) for batches, owner in tuple(self._batches.items())]

    def pools(self) -> list[tuple[str, ThreadPoolResource]]:
        """Return thread pools with their services; thread-safe."""
        return [(owner, pool) for pool, owner in tuple(self._pools.items())]

    def processes(self) -> list[tuple[str, ProcessResource]]:
        """Return processes with their services; thread-safe."""
        return [(owner, process) for process, owner in tuple(self._processes.items())]


@contextmanager
def owned_by(service: str) -> Iterator[None]:
    """Set the owner of resources created within the block."""
    token = current_owner.set(service)
    try:
        yield
    finally:
        current_owner.reset(token)


_registry: Final = trio.lowlevel.RunVar[ResourceRegistry]("resource registry")


def current_resource_registry() -> ResourceRegistry:
    """Return the registry of this event loop."""
    try:
        return _registry.get()
    except LookupError:
        made = ResourceRegistry()
        _registry.set(made)
        return made
