"""Limits of this process for cores and memory: its container's (cgroups v1 and v2), or the machine's."""

from __future__ import annotations

import math
import os
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT: Final = Path("/sys/fs/cgroup")
"""Mount point of the cgroup file system."""
OWN_GROUPS: Final = Path("/proc/self/cgroup")
"""File that lists the cgroups of this process."""

_MEMORY_FILES: Final = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
"""Files of the limit and the usage of cgroups v2 and v1."""
_RECLAIMABLE: Final = ("inactive_file", "total_inactive_file")
"""Entries of ``memory.stat`` of cgroups v2 and v1 for file pages that are freed before memory runs out."""
_MEMORY: Final = Path("/proc/meminfo")


def group_folders(controller: str, root: Path = ROOT, own: Path = OWN_GROUPS) -> Iterator[Path]:
    """List the folders of this process's cgroups and of their ancestors; a folder may not exist.

    Args:
        controller: a controller of cgroup v1, which has one tree per controller; v2 has one tree for all.
        root: the mount point of the cgroup file system.
        own: the file that lists the cgroups of this process.
    """
    try:
        lines = own.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        path = PurePosixPath(group)
        for folder in (path, *path.parents):
            # Inside a container the mount's root is the container's cgroup, so ancestors are tried up to the root.
            yield root / (controller if controllers else "") / str(folder).lstrip("/")


def usable_cores(groups: Path = ROOT, own: Path = OWN_GROUPS) -> int:
    """Return how many cores this process may use: its CPU affinity, capped by the CPU quota of its container.

    Args:
        groups: the mount point of the cgroup file system.
        own: the file that lists the cgroups of this process.
    """
    quotas = filter(None, map(_quota_of, group_folders("cpu", groups, own)))
    return max(1, min([len(os.sched_getaffinity(0)), *map(math.ceil, quotas)]))


def _quota_of(folder: Path) -> float:
    """Return a cgroup's CPU quota in cores; 0 without a quota."""
    words = _text(folder / "cpu.max").split()
    if not words:
        words = [*_text(folder / "cpu.cfs_quota_us").split(), *_text(folder / "cpu.cfs_period_us").split()]
    try:
        time, period = map(float, words)
    except ValueError:
        return 0.0
    return time / period if time > 0 and period > 0 else 0.0


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""


def memory_limit(groups: Path = ROOT, own_groups: Path = OWN_GROUPS) -> int:
    """Return the memory limit in bytes; 0 if unknown.

    Args:
        groups: mount point of cgroups.
        own_groups: file with the cgroups of this process.
    """
    limits = [limit for _, limit, _ in _limited_groups(groups, own_groups)]
    return min((limit for limit in (*limits, _system_memory("SC_PHYS_PAGES")) if limit), default=0)


def free_memory(groups: Path = ROOT, own_groups: Path = OWN_GROUPS, machine: Path = _MEMORY) -> int:
    """Return how much memory in bytes this process may still use: the machine's, or less if a cgroup has less left.

    Args:
        groups: mount point of cgroups.
        own_groups: file with the cgroups of this process.
        machine: file with the memory figures of the machine.
    """
    free = [limit - _used(folder, usage) for folder, limit, usage in _limited_groups(groups, own_groups)]
    available = [int(line.split()[1]) * 1024 for line in _lines(machine) if line.startswith("MemAvailable:")]
    return max(0, min([*free, *(available or [_system_memory("SC_AVPHYS_PAGES")])]))


def _limited_groups(groups: Path, own: Path) -> Iterator[tuple[Path, int, str]]:
    """Yield the folder, limit and name of the usage file of each cgroup with a memory limit."""
    for folder in group_folders("memory", groups, own):
        for limit, usage in _MEMORY_FILES:
            if (text := _text(folder / limit)).isdigit():
                yield folder, int(text), usage


def _used(folder: Path, usage: str) -> int:
    text = _text(folder / usage)
    stat = dict(line.split(" ", 1) for line in _lines(folder / "memory.stat") if " " in line)
    return (int(text) if text.isdigit() else 0) - max(int(stat.get(name, 0)) for name in _RECLAIMABLE)


def _lines(file: Path) -> list[str]:
    return _text(file).splitlines()


def _system_memory(pages: str) -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf(pages)
    except (AttributeError, OSError, ValueError):
        return 0
