"""How many calls of a model there are at once, and how many of its inferences should run side by side therefore.

One inference on all cores gives a lone call its answer soonest.  Calls that come all the time get theirs sooner where
several inferences share the cores out: threads of one inference wait for each other, and for whoever has taken a core
from one of them, which those of several do not.
"""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Demand"]

_BUSY: Final = 0.6
_MANY: Final = 1.8
_FEW: Final = 1.3
_FEW_SECONDS: Final = 60.0
_GROWS_BY: Final = 2


class Demand:
    """The calls of one model, as they were since somebody last looked.

    Args:
        most: how many inferences can be of use side by side: the cores.
        clock: gives seconds.

    Attributes:
        chosen: for how many at once the model is compiled.
    """

    __slots__ = ("_at_once", "_calls", "_clock", "_few_since", "_looked", "_most", "_seconds", "chosen")

    def __init__(self, most: int, clock: Callable[[], float] = perf_counter) -> None:
        self.chosen = 1
        self._most = most
        self._clock = clock
        self._looked = self._few_since = clock()
        self._calls = 0
        self._at_once = self._seconds = 0.0

    def note(self, at_once: float, seconds: float) -> None:
        """Know of a call that was one of so many, and took the device so long."""
        self._calls += 1
        self._at_once += at_once
        self._seconds += seconds

    def look(self) -> int:
        """Tell how many inferences should run side by side by the calls since the last look.

        More than one only where the device had little time to spare; one again when calls were alone for a minute, or
        there were none.
        """
        now = self._clock()
        passed, self._looked = now - self._looked, now
        average = self._at_once / self._calls if self._calls else 0.0
        busy = self._seconds / passed if passed > 0 else 0.0
        self._calls, self._at_once, self._seconds = 0, 0.0, 0.0
        if average >= _FEW:
            self._few_since = now
        wanted = min(round(average), self._most)
        if average >= _MANY and busy >= _BUSY and (self.chosen == 1 or wanted >= _GROWS_BY * self.chosen):
            return max(wanted, self.chosen)
        return 1 if now - self._few_since >= _FEW_SECONDS else self.chosen
