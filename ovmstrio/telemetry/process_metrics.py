"""Memory and CPU metrics of the server process and its worker processes."""

from __future__ import annotations

import errno
import os
import platform
import resource
from collections import Counter
from contextlib import contextmanager
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import CLOCK_BOOTTIME, clock_gettime, process_time, time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from ovmstrio.core.resource_registry import ResourceRegistry

# Memory

_PROC: Final = Path("/proc")


def resident_bytes(process: int | str = "self") -> int:
    """Return the resident memory of a process in bytes, 0 if unknown."""
    try:
        return int((_PROC / str(process) / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
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

_DESCRIPTORS: Final = Path("/proc/self/fd")
_USER_TICKS: Final = 11
"""Position of ``utime`` after the process name in ``/proc/PID/stat``, followed by ``stime``."""
_START_TICKS: Final = 19
"""Position of ``starttime``."""
_Values = dict[tuple[str, ...], float]


@cache
def build_labels() -> tuple[str, str, str]:
    """Return the versions of the server, OpenVINO and Python."""
    return _version_of("ovmstrio"), _version_of("openvino"), platform.python_version()


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


@cache
def _start_time() -> float:
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    since_boot = int(fields[_START_TICKS]) / os.sysconf("SC_CLK_TCK")
    return round(time() - clock_gettime(CLOCK_BOOTTIME) + since_boot, 2)


def _read_start_time() -> _Values:
    """Return the start time; nothing if ``/proc`` cannot be read, as without a free descriptor."""
    try:
        return {(): _start_time()}
    except OSError:
        return {}


def _max_descriptors() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def _read_open_descriptors() -> _Values:
    try:
        return {(): len(tuple(_DESCRIPTORS.iterdir()))}
    except OSError as error:
        # Listing needs a descriptor too.
        return {(): _max_descriptors()} if error.errno == errno.EMFILE else {}


def _read_resident_bytes() -> _Values:
    size = resident_bytes()
    return {(): size} if size else {}


PROCESS_METRICS: Final[Mapping[str, Callable[[], _Values]]] = {
    "process_resident_memory_bytes": _read_resident_bytes,
    "process_cpu_seconds": lambda: {(): process_time()},
    "process_start_time_seconds": _read_start_time,
    "process_open_fds": _read_open_descriptors,
    "process_max_fds": lambda: {(): _max_descriptors()},
    "ovmstrio_build_info": lambda: {build_labels(): 1},
}
"""Readers of ``process_*`` families, which have Prometheus's standard names, and of the versions."""


def resource_metrics(registry: ResourceRegistry) -> Mapping[str, Callable[[], _Values]]:
    """Return readers of resource metrics by family."""
    return {
        "ovmstrio_worker_threads": lambda: _sums((owner, pool.threads) for owner, pool in registry.pools()),
        "ovmstrio_stuck_threads": lambda: _sums((owner, pool.stuck) for owner, pool in registry.pools()),
        "ovmstrio_thread_queue_length": lambda: _sums((owner, pool.waiting) for owner, pool in registry.pools()),
        "ovmstrio_batch_queued_requests": lambda: _sums((owner, each.waiting) for owner, each in registry.batches()),
        "ovmstrio_worker_processes": lambda: _sums((owner, 1) for owner, _ in registry.processes()),
        "ovmstrio_worker_restarts": lambda: _sums(tuple(registry.ended.items())),
        "ovmstrio_worker_memory_bytes": lambda: _sums(
            (owner, _memory_of(process.pid)) for owner, process in registry.processes()
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
