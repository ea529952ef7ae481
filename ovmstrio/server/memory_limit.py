"""How much memory this process may have: what its control groups allow, or else what the machine has.

A part of it is for answers that wait for clients.
"""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Final

from ovmstrio.transport.send_budget import PendingAnswers
from ovmstrio.util.container_limits import OWN_GROUPS, ROOT, group_folders

if TYPE_CHECKING:
    from pathlib import Path

    from ovmstrio.server.settings import ServerSettings

__all__ = ["memory_limit", "pending_answers"]

_FILES: Final = ("memory.max", "memory.limit_in_bytes")
"""The files that hold the limit, of version 2 of control groups and of version 1."""

_PART_FOR_ANSWERS: Final = 4


def memory_limit(groups: Path = ROOT, own: Path = OWN_GROUPS) -> int:
    """Tell in bytes what this process may have; 0 if the system does not say.

    Args:
        groups: where control groups are mounted.
        own: tells the groups of this process.
    """
    limits = (_read(folder / name) for folder in group_folders("memory", groups, own) for name in _FILES)
    return min((limit for limit in (*limits, _machine()) if limit), default=0)


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
