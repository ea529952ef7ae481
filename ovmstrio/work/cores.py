"""How many of the machine's cores this process may fill, where others of the same server run beside it."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Final

from ovmstrio.work.control_groups import OWN_GROUPS, ROOT, group_folders

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["CORES", "CoreShare", "usable_cores"]


def usable_cores(groups: Path = ROOT, own: Path = OWN_GROUPS) -> int:
    """Tell how many cores this process may run on at once, as many as the limit of its container is worth at most.

    Args:
        groups: where control groups are mounted.
        own: tells the groups of this process.
    """
    quotas = filter(None, map(_quota_of, group_folders("cpu", groups, own)))
    return max(1, min([len(os.sched_getaffinity(0)), *map(math.ceil, quotas)]))


def _quota_of(folder: Path) -> float:
    """Give a group's limit in cores; 0 if it has none."""
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
        return file.read_text(encoding="ascii")
    except (OSError, ValueError):
        return ""


class CoreShare:
    """This process's share of the cores that it may run on.

    Attributes:
        processes: how many processes share them.
    """

    def __init__(self) -> None:
        self.processes = 1

    @property
    def count(self) -> int:
        """How many cores there are for this process, at least one."""
        return max(1, usable_cores() // self.processes)


CORES: Final = CoreShare()
"""The one of this process."""
