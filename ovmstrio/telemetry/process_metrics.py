"""What the system tells of the server's process, and of processes that work for it."""

from __future__ import annotations

import os
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from time import process_time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from ovmstrio.core.resource_registry import Census

__all__ = ["PROCESS_FIGURES", "GrowthWatch", "processor_seconds", "resident_bytes", "work_figures"]

# ----------------------------------------------------------------------
# What the process has in memory as the system counts it, and by how much a step of its life has made it grow
# ----------------------------------------------------------------------

_STATM: Final = Path("/proc/self/statm")


def resident_bytes() -> int:
    """Give the bytes of the process that are in memory, 0 where the system does not tell."""
    try:
        return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0


class GrowthWatch:
    """Tells by how much the process has grown while something ran, where nothing else that is watched ran beside it.

    Args:
        resident: tells the bytes that it has.
    """

    def __init__(self, resident: Callable[[], int] = resident_bytes) -> None:
        self._resident = resident
        self._begun = 0
        self._under_way = 0

    @contextmanager
    def watching(self) -> Iterator[Callable[[], int | None]]:
        """Watch the block; what is given tells the growth since its begin, None if that may be somebody else's too."""
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


# ----------------------------------------------------------------------
# What the system tells of the server's process, and of processes that work for it
# ----------------------------------------------------------------------

_USER_TICKS: Final = 11
"""The place of ``utime`` behind the name in ``/proc/PID/stat``, before that of ``stime``."""
_Figures = dict[tuple[str, ...], float]

PROCESS_FIGURES: Final[Mapping[str, Callable[[], _Figures]]] = {
    "process_resident_memory_bytes": lambda: {(): resident_bytes()},
    "process_cpu_seconds": lambda: {(): process_time()},
}
"""What is read whenever somebody scrapes, by family, under the names that Prometheus's own libraries use."""


def work_figures(census: Census) -> Mapping[str, Callable[[], _Figures]]:
    """Give what reads the figures of what runs beside the event loop, by family."""
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


def processor_seconds(pid: int) -> float | None:
    """Tell how long a process has had processors; None of one that has gone, or where the system does not tell."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[_USER_TICKS]) + int(fields[_USER_TICKS + 1])) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return None


def _sums(figures: Iterable[tuple[str, int]]) -> _Figures:
    """Add up the figures of each owner."""
    sums: Counter[tuple[str, ...]] = Counter()
    for owner, figure in figures:
        sums[owner,] += figure
    return dict(sums)


def _memory_of(pid: int | None) -> int:
    """Give the bytes of a process that are in memory, with those that it shares; 0 of one that has gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0
