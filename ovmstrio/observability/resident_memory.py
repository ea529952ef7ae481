"""What the process has in memory as the system counts it, and by how much a step of its life has made it grow."""

from __future__ import annotations

import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["GrowthWatch", "resident_bytes"]

_STATM: Final = Path("/proc/self/statm")


def resident_bytes() -> int:
    """Give the bytes of the process that are in memory, 0 where the system does not tell."""
    try:
        return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0


class GrowthWatch:
    """Tells by how much the process has grown while something ran, where nothing else that is watched ran beside it.

    Args:
        resident: tells the bytes that it has.
    """

    def __init__(self, resident: Callable[[], int] = resident_bytes) -> None:
        self._resident = resident
        self._begun = 0
        self._under_way = 0

    @contextmanager
    def watching(self) -> Iterator[Callable[[], int | None]]:
        """Watch the block; what is given tells the growth since its begin, None if that may be somebody else's too."""
        self._begun += 1
        number, is_alone = self._begun, not self._under_way
        self._under_way += 1
        before = self._resident()

        def grown() -> int | None:
            return max(0, self._resident() - before) if before and is_alone and number == self._begun else None

        try:
            yield grown
        finally:
            self._under_way -= 1
