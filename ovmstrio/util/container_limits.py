"""The cgroups of this process, which hold the resource limits of its container."""

from __future__ import annotations

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
