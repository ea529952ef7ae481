"""The machine's cores: how many this process may fill, and who else in it and beside it fills them."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Final, Protocol
from weakref import WeakSet

from ovmstrio.util.container_limits import OWN_GROUPS, ROOT, group_folders

if TYPE_CHECKING:
    from pathlib import Path

_FEW: Final = 2


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


class CoreUser(Protocol):
    """What computes in threads that may be bound to cores."""

    @property
    def is_pinned(self) -> bool | None:
        """Whether they are; None where that is not for the server to choose."""

    @property
    def weight_bytes(self) -> int:
        """What its weights have, which are in memory once more while it chooses."""

    def wants_others(self) -> bool:
        """Tell whether its calls since this was last asked want more of its work side by side, or less."""

    async def choose_cores(self) -> None:
        """Choose again, by what :attr:`CoreShare.is_shared` and its calls say now; calls go on meanwhile."""


class CoreShare:
    """This process's share of the cores that it may run on, and who fills them.

    Args:
        cores: how many those are.

    Attributes:
        are_few: whether they are so few that what computes has each with the event loop and with clients.
        processes: how many processes share them.
        services: how many services are configured that fill them, loaded or not.
        chooses: whether anything is chosen by how many there are.
        users: what computes at the moment.
    """

    def __init__(self, cores: float = math.inf) -> None:
        self.are_few = cores <= _FEW
        self.processes = 1
        self.services = 0
        self.chooses = True
        self.users: WeakSet[CoreUser] = WeakSet()

    @property
    def is_shared(self) -> bool:
        """Whether several compute here, so that threads bound to cores would meet on the same ones.

        On few cores the event loop is one that does.
        """
        several = self.chooses and (self.are_few or max(self.services, len(self.users)) > 1)
        return self.processes > 1 or several

    @property
    def count(self) -> int:
        """How many cores there are for this process, at least one."""
        return max(1, usable_cores() // self.processes)


CORES: Final = CoreShare(usable_cores())
"""The one of this process."""
