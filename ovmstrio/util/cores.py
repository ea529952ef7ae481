"""The services and processes that share the cores of this machine."""

from __future__ import annotations

import math
from typing import Any, Final
from weakref import WeakSet

from ovmstrio.util.container_limits import usable_cores

_FEW: Final = 2


class CoreShare:
    """This process's share of the cores that it may run on, and the users of these cores.

    Args:
        cores: the number of cores.

    Attributes:
        are_few: whether compute threads share each core with the event loop and with clients.
        processes: the number of processes that share the cores.
        services: the number of configured services that use all cores, loaded or not.
        chooses: whether the number of services affects :attr:`is_shared`.
        users: the tuners of the models that compute at the moment.
    """

    def __init__(self, cores: float = math.inf) -> None:
        self.are_few = cores <= _FEW
        self.processes = 1
        self.services = 0
        self.chooses = True
        self.users: WeakSet[Any] = WeakSet()

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
