"""The cgroups of this process, which hold the resource limits of its container, and its memory limit."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT: Final = Path("/sys/fs/cgroup")
"""Mount point of the cgroup file system."""
OWN_GROUPS: Final = Path("/proc/self/cgroup")
"""File that lists the cgroups of this process."""


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


_MEMORY_LIMIT_FILES: Final = ("memory.max", "memory.limit_in_bytes")
"""Limit files of cgroups v2 and v1."""


def memory_limit(groups: Path = ROOT, own: Path = OWN_GROUPS) -> int:
    """Return the memory limit of cgroups or machine in bytes; 0 if unknown.

    Args:
        groups: mount point of cgroups.
        own: file with the cgroups of this process.
    """
    limits = (
        _read_limit(folder / name) for folder in group_folders("memory", groups, own) for name in _MEMORY_LIMIT_FILES
    )
    return min((limit for limit in (*limits, _physical_memory()) if limit), default=0)


def _read_limit(path: Path) -> int:
    try:
        text = path.read_text().strip()
    except OSError:
        return 0
    return int(text) if text.isdigit() else 0


def _physical_memory() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return 0
