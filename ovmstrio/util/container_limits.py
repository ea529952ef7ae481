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

_MEMORY_FILES: Final = ("memory.max", "memory.limit_in_bytes")
"""Limit files of cgroups v2 and v1."""


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


def memory_limit(groups: Path = ROOT, own: Path = OWN_GROUPS) -> int:
    """Return the memory limit in bytes; 0 if unknown.

    Args:
        groups: mount point of cgroups.
        own: file with the cgroups of this process.
    """
    texts = (_text(folder / name) for folder in group_folders("memory", groups, own) for name in _MEMORY_FILES)
    limits = [int(text) for text in texts if text.isdigit()]
    return min((limit for limit in (*limits, _physical_memory()) if limit), default=0)


def _physical_memory() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return 0
