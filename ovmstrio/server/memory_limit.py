"""How much memory this process may have: what its control groups allow, or else what the machine has.

A part of it is for answers that wait for clients.
"""

from __future__ import annotations

import math
import os
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final

from ovmstrio.core.pending_answers import PendingAnswers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ovmstrio.server.settings import ServerSettings

__all__ = ["memory_limit", "pending_answers"]

_CONTROL_GROUPS: Final = Path("/sys/fs/cgroup")
_OWN: Final = Path("/proc/self/cgroup")
_FILES: Final = {"": "memory.max", "memory": "memory.limit_in_bytes"}
"""The file that holds the limit, by controller: of version 2, which has one tree for all, and of version 1."""


_PART_FOR_ANSWERS: Final = 4


def memory_limit(groups: Path = _CONTROL_GROUPS, own: Path = _OWN) -> int:
    """Tell in bytes what this process may have; 0 if the system does not say.

    Args:
        groups: where control groups are mounted.
        own: tells the groups of this process.
    """
    return min((limit for limit in (*_limits(groups, own), _machine()) if limit), default=0)


def _limits(groups: Path, own: Path) -> Iterator[int]:
    """Read the limits of all groups that this process is in, be they their own or those of groups above."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, group = line.split(":", 2)
        controller = "memory" if "memory" in controllers.split(",") else controllers
        name = _FILES.get(controller)
        if name is None:
            continue
        path = PurePosixPath(group)
        for each in (path, *path.parents):
            # Within a container its own group is the root of what is mounted, whatever it is called outside.
            yield _read(groups / controller / str(each).lstrip("/") / name)


def _read(path: Path) -> int:
    try:
        text = path.read_text().strip()
    except OSError:
        return 0
    return int(text) if text.isdigit() else 0


def _machine() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return 0


def pending_answers(settings: ServerSettings, processes: int = 1) -> PendingAnswers:
    """Make what counts the answers that wait for clients, for one of several processes that share the memory."""
    quota = settings.grpc_memory_quota or memory_limit() // _PART_FOR_ANSWERS
    return PendingAnswers(
        quota / processes if quota else math.inf,
        settings.max_pending_response_bytes,
        settings.stalled_client_seconds,
    )
