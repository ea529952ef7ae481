"""What works for services: pools of threads, worker processes and batches, for whoever counts them.

Each belongs to the service whose load has made it: the registry says so while it loads, and tasks that are started by
the load have inherited it.
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

__all__ = [
    "Census",
    "CountedBatches",
    "CountedProcess",
    "CountedThreads",
    "current_census",
    "current_owner",
    "owned_by",
]

current_owner: Final[ContextVar[str]] = ContextVar("current_owner", default="")
"""The service that the running task was started for, by its load; empty for none."""


class CountedThreads(Protocol):
    """A pool of threads."""

    @property
    def threads(self) -> int:
        """How many threads there are, without those that are stuck."""
        ...

    @property
    def waiting(self) -> int:
        """How many calls wait for one."""
        ...

    @property
    def stuck(self) -> int:
        """How many threads were given up and still run."""
        ...


class CountedBatches(Protocol):
    """What joins requests to batches."""

    @property
    def waiting(self) -> int:
        """How many requests wait for their batch."""
        ...


class CountedProcess(Protocol):
    """A worker process."""

    @property
    def pid(self) -> int | None:
        """Its number, None before it is started."""
        ...

    async def sample(self, seconds: float, rate: float) -> list[SampledThreads]:
        """Look at its threads for so long; see ``WorkerProcess.sample``."""
        ...


class Census:
    """The pools, processes and batches that there are in one run of the event loop, by their services.

    It is changed by the event loop and read by whichever thread answers a scraper.

    Attributes:
        ended: how many processes ended by themselves, by service.
    """

    def __init__(self) -> None:
        self.ended: Counter[str] = Counter()
        self._pools: dict[CountedThreads, str] = {}
        self._processes: dict[CountedProcess, str] = {}
        self._batches: dict[CountedBatches, str] = {}

    @contextmanager
    def threads(self, pool: CountedThreads, owner: str) -> Iterator[None]:
        """Count a pool while the block lasts."""
        self._pools[pool] = owner
        try:
            yield
        finally:
            del self._pools[pool]

    @contextmanager
    def process(self, process: CountedProcess, owner: str) -> Iterator[None]:
        """Count a process while the block lasts."""
        self._processes[process] = owner
        self.ended[owner] += 0
        try:
            yield
        finally:
            del self._processes[process]

    @contextmanager
    def batcher(self, batches: CountedBatches, owner: str) -> Iterator[None]:
        """Count what makes batches while the block lasts."""
        self._batches[batches] = owner
        try:
            yield
        finally:
            del self._batches[batches]

    def batches(self) -> list[tuple[str, CountedBatches]]:
        """List what makes batches with their services; from any thread."""
        return [(owner, batches) for batches, owner in tuple(self._batches.items())]

    def pools(self) -> list[tuple[str, CountedThreads]]:
        """List the pools with their services; from any thread."""
        return [(owner, pool) for pool, owner in tuple(self._pools.items())]

    def processes(self) -> list[tuple[str, CountedProcess]]:
        """List the processes with their services; from any thread."""
        return [(owner, process) for process, owner in tuple(self._processes.items())]


@contextmanager
def owned_by(service: str) -> Iterator[None]:
    """Have what is made within the block belong to a service."""
    token = current_owner.set(service)
    try:
        yield
    finally:
        current_owner.reset(token)


_current: Final = trio.lowlevel.RunVar[Census]("census")


def current_census() -> Census:
    """Give the one of this run of the event loop."""
    try:
        return _current.get()
    except LookupError:
        made = Census()
        _current.set(made)
        return made
