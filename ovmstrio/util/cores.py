"""The machine's CPU cores: how many this process may use, and the services and processes that share them."""

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
        return file.read_text(encoding="ascii")
    except (OSError, ValueError):
        return ""


class CoreUser(Protocol):
    """A user of compute threads that may be pinned to cores."""

    @property
    def is_pinned(self) -> bool | None:
        """Return whether the threads are pinned; None if the server may not choose."""

    @property
    def weight_bytes(self) -> int:
        """Return the size of the weights, which are in memory twice during :meth:`choose_cores`."""

    def wants_others(self) -> bool:
        """Return whether the calls since the last check need more or less parallel work."""

    async def choose_cores(self) -> None:
        """Choose the pinning again from :attr:`CoreShare.is_shared` and recent calls, while calls continue."""


class CoreShare:
    """This process's share of the cores that it may run on, and the users of these cores.

    Args:
        cores: the number of cores.

    Attributes:
        are_few: whether compute threads share each core with the event loop and with clients.
        processes: the number of processes that share the cores.
        services: the number of configured services that use all cores, loaded or not.
        chooses: whether the number of services affects :attr:`is_shared`.
        users: the services that compute at the moment.
    """

    def __init__(self, cores: float = math.inf) -> None:
        self.are_few = cores <= _FEW
        self.processes = 1
        self.services = 0
        self.chooses = True
        self.users: WeakSet[CoreUser] = WeakSet()

    @property
    def is_shared(self) -> bool:
        """Return whether several users compute, so that pinned threads would compete for the same cores.

        On few cores the event loop counts as a user.
        """
        several = self.chooses and (self.are_few or max(self.services, len(self.users)) > 1)
        return self.processes > 1 or several

    @property
    def count(self) -> int:
        """Return the number of cores of this process, at least one."""
        return max(1, usable_cores() // self.processes)


CORES: Final = CoreShare(usable_cores())
"""The share of this process."""
