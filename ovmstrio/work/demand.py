"""How many calls of a model there are at once, and how many of its inferences should run side by side therefore.

One inference on all cores gives a lone call its answer soonest.  Calls that come all the time get theirs sooner where
several inferences share the cores out: threads of one inference wait for each other, and for whoever has taken a core
from one of them, which those of several do not.

A model whose inferences are short is compiled for one thread, the event loop's, until most of what it is asked for
takes long, as large batches do.
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
_LONG_SECONDS: Final = 1e-3
_LONG_CALLS: Final = 8
"""So many calls between two looks are no chance."""


class Demand:
    """The calls of one model, as they were since somebody last looked.

    Args:
        most: how many inferences can be of use side by side: the cores.
        clock: gives seconds.
        cores: on how many one inference runs where there is no other.
        is_for_loop: whether the model is compiled for one thread at first, as its inferences are short.

    Attributes:
        chosen: for how many at once the model is compiled; 0 for one thread.
    """

    __slots__ = (
        "_at_once",
        "_clock",
        "_few_since",
        "_is_for_loop",
        "_long_at",
        "_long_calls",
        "_long_on_cores",
        "_long_seconds",
        "_looked",
        "_most",
        "_seconds",
        "chosen",
    )

    def __init__(
        self,
        most: int,
        clock: Callable[[], float] = perf_counter,
        *,
        cores: int = 1,
        is_for_loop: bool = False,
    ) -> None:
        self.chosen = 0 if is_for_loop else 1
        self._is_for_loop = is_for_loop
        # What is long on one thread is not so on all cores, and is to stay there.
        self._long_on_cores = _LONG_SECONDS / cores
        self._most = most
        self._clock = clock
        self._looked = self._few_since = self._long_at = clock()
        self._long_calls = 0
        self._at_once = self._seconds = self._long_seconds = 0.0

    def note(self, at_once: float, seconds: float) -> None:
        """Know of a call that was one of so many, and took the device so long."""
        self._at_once += at_once * seconds
        self._seconds += seconds
        if seconds >= (self._long_on_cores if self.chosen else _LONG_SECONDS):
            self._long_calls += 1
            self._long_seconds += seconds

    def look(self) -> int:
        """Tell how many inferences should run side by side by the calls since the last look.

        More than one only where the device had little time to spare; one again when calls were alone for a minute, or
        there were none.  0 while most of the time is that of short calls, and again when it was so for a minute.
        """
        now = self._clock()
        passed, self._looked = now - self._looked, now
        average = self._at_once / self._seconds if self._seconds else 0.0
        busy = self._seconds / passed if passed > 0 else 0.0
        is_long = self._long_calls >= _LONG_CALLS and self._long_seconds > self._seconds / 2
        self._long_calls = 0
        self._at_once = self._seconds = self._long_seconds = 0.0
        if average >= _FEW:
            self._few_since = now
        if is_long or not self._is_for_loop:
            self._long_at = now
        if (self.chosen == 0 and not is_long) or now - self._long_at >= _FEW_SECONDS:
            return 0
        wanted = min(round(average), self._most)
        if average >= _MANY and busy >= _BUSY and (self.chosen <= 1 or wanted >= _GROWS_BY * self.chosen):
            return max(wanted, self.chosen, 1)
        return 1 if self.chosen == 0 or now - self._few_since >= _FEW_SECONDS else self.chosen
