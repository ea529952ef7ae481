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

__all__ = ["Crowd"]

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
