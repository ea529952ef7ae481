"""How many of the machine's cores this process may fill, where others of the same server run beside it."""

from __future__ import annotations

import os
from typing import Final

__all__ = ["CORES", "CoreShare"]


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
        return max(1, len(os.sched_getaffinity(0)) // self.processes)


CORES: Final = CoreShare()
"""The one of this process."""
