"""Memory and CPU metrics of the server process and its worker processes."""

from __future__ import annotations

import os
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from time import process_time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from ovmstrio.core.resource_registry import ResourceRegistry

# Memory

_STATM: Final = Path("/proc/self/statm")


def resident_bytes() -> int:
    """Return the resident memory of the process in bytes, 0 if unknown."""
    try:
        return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0


class MemoryGrowthMeter:
    """Measures memory growth of operations; invalid if measured operations overlap.

    Args:
        resident: returns the resident memory in bytes.
    """

    def __init__(self, resident: Callable[[], int] = resident_bytes) -> None:
        self._resident = resident
        self._begun = 0
        self._under_way = 0

    @contextmanager
    def watching(self) -> Iterator[Callable[[], int | None]]:
        """Measure the block; yields a function that returns the growth in bytes, None if blocks overlapped."""
        self._begun += 1
        number, is_alone = self._begun, not self._under_way
        self._under_way += 1
        before = self._resident()

        def grown() -> int | None:
            return max(0, self._resident() - before) if before and is_alone and number == self._begun else None

        try:
            yield grown
        finally:
            self._under_way -= 1


# Metrics

_USER_TICKS: Final = 11
"""Position of ``utime`` after the process name in ``/proc/PID/stat``, followed by ``stime``."""
_Values = dict[tuple[str, ...], float]

PROCESS_METRICS: Final[Mapping[str, Callable[[], _Values]]] = {
    "process_resident_memory_bytes": lambda: {(): resident_bytes()},
    "process_cpu_seconds": lambda: {(): process_time()},
}
"""Readers of ``process_*`` families with Prometheus's standard names."""


def resource_metrics(census: ResourceRegistry) -> Mapping[str, Callable[[], _Values]]:
    """Return readers of resource metrics by family."""
    return {
        "ovmstrio_worker_threads": lambda: _sums((owner, pool.threads) for owner, pool in census.pools()),
        "ovmstrio_stuck_threads": lambda: _sums((owner, pool.stuck) for owner, pool in census.pools()),
        "ovmstrio_waiting_calls": lambda: _sums((owner, pool.waiting) for owner, pool in census.pools()),
        "ovmstrio_batch_queued_requests": lambda: _sums((owner, each.waiting) for owner, each in census.batches()),
        "ovmstrio_worker_processes": lambda: _sums((owner, 1) for owner, _ in census.processes()),
        "ovmstrio_worker_restarts": lambda: _sums(tuple(census.ended.items())),
        "ovmstrio_worker_memory_bytes": lambda: _sums(
            (owner, _memory_of(process.pid)) for owner, process in census.processes()
        ),
    }


def process_cpu_seconds(pid: int) -> float | None:
    """Return the CPU time of a process; None if it has exited or the time is unknown."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[_USER_TICKS]) + int(fields[_USER_TICKS + 1])) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return None


def _sums(values: Iterable[tuple[str, int]]) -> _Values:
    sums: Counter[tuple[str, ...]] = Counter()
    for owner, value in values:
        sums[owner,] += value
    return dict(sums)


def _memory_of(pid: int | None) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0
