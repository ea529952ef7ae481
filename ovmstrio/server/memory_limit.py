"""Memory limit of the process (cgroups or machine), and the send budget derived from it."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Final

from ovmstrio.transport.send_budget import SendBudget
from ovmstrio.util.container_limits import OWN_GROUPS, ROOT, group_folders

if TYPE_CHECKING:
    from pathlib import Path

    from ovmstrio.server.settings import ServerSettings

_LIMIT_FILES: Final = ("memory.max", "memory.limit_in_bytes")
"""Limit files of cgroups v2 and v1."""

_SEND_BUDGET_DIVISOR: Final = 4


def memory_limit(groups: Path = ROOT, own: Path = OWN_GROUPS) -> int:
    """Return the memory limit in bytes; 0 if unknown.

    Args:
        groups: mount point of cgroups.
        own: file with the cgroups of this process.
    """
    limits = (_read(folder / name) for folder in group_folders("memory", groups, own) for name in _LIMIT_FILES)
    return min((limit for limit in (*limits, _physical_memory()) if limit), default=0)


def _read(path: Path) -> int:
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


def make_send_budgets(settings: ServerSettings, processes: int = 1) -> SendBudget:
    """Create the send budgets of one of several processes that share the memory."""
    quota = settings.grpc_memory_quota or memory_limit() // _SEND_BUDGET_DIVISOR
    return SendBudget(
        quota / processes if quota else math.inf, settings.max_pending_response_bytes, settings.client_stall_timeout
    )
