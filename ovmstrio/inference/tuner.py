"""Whether so many calls come that they do better in the runtime's queue, where their inferences follow each other.

On the event loop an inference that takes all cores is cheap for a lone call, which has to wait for it anyway.  Of many
calls each would wait there for all that the loop does between two inferences, and the loop for what each inference
leaves in the processor's caches; in the queue one is behind the other, and the loop hears of several at once.
"""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Crowd", "Demand"]

# ----------------------------------------------------------------------
# Whether so many calls come that they do better in the runtime's queue, where their inferences follow each other
# ----------------------------------------------------------------------

_ALONE_CALLS: Final = 32
_AGAIN_SECONDS: Final = 1.0


class Crowd:
    """The calls of one model that could run on the event loop, all of them taking it for as long as they compute.

    Args:
        clock: gives seconds.

    Attributes:
        is_there: whether calls leave the loop.
    """

    __slots__ = ("_again_at", "_alone", "_clock", "is_there")

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self.is_there = False
        self._clock = clock
        self._again_at = 0.0
        self._alone = 0

    def leaves(self, others: int, *, loop_is_full: bool) -> bool:
        """Tell whether a call leaves the loop.

        Args:
            others: how many calls have left it, and are not answered.
            loop_is_full: whether the loop had next to no time to spare lately.
        """
        if not self.is_there:
            if loop_is_full and self._clock() >= self._again_at:
                self.is_there, self._alone = True, 0
            return self.is_there
        if others > 1:
            self._alone = 0
            return True
        self._alone += 1
        if self._alone <= _ALONE_CALLS:
            return True
        # The loop may have been full of something else, and will not be asked at once again.
        self.is_there, self._again_at = False, self._clock() + _AGAIN_SECONDS
        return False


# ----------------------------------------------------------------------
# How many calls of a model there are at once, and how many of its inferences should run side by side therefore
# ----------------------------------------------------------------------

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
