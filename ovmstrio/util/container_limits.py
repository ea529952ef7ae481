"""The control groups of this process, by which containers limit what it may have of the machine."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT: Final = Path("/sys/fs/cgroup")
"""Where control groups are mounted."""
OWN_GROUPS: Final = Path("/proc/self/cgroup")
"""What tells the groups of this process."""


def group_folders(controller: str, root: Path = ROOT, own: Path = OWN_GROUPS) -> Iterator[Path]:
    """Give the folders of all groups that this process is in and of those above, which may not be there.

    Args:
        controller: of version 1, which has a tree for each; version 2 has one for all.
        root: where control groups are mounted.
        own: tells the groups of this process.
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
        for each in (path, *path.parents):
            # Within a container its own group is the root of what is mounted, whatever it is called outside.
            yield root / (controller if controllers else "") / str(each).lstrip("/")
