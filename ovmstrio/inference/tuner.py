"""Load-based choices per model: event loop or device queue, and number of concurrent inferences.

On the event loop, an inference that takes all cores is cheap for a lone call. Under contention each call would also
wait for the loop's other work, and the loop for cold caches after each inference; in the queue, inferences run back to
back and the loop processes several completions at once.
"""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

_QUIET_CALLS: Final = 32
_COOLDOWN_SECONDS: Final = 1.0


class ContentionSwitch:
    """Hysteresis switch that moves a model's calls off the event loop under contention."""

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self.is_there = False  # whether calls leave the loop
        self._clock = clock
        self._cooldown_until = 0.0
        self._quiet_calls = 0

    def leaves(self, others: int, *, loop_is_full: bool) -> bool:
        """Return whether a call leaves the loop; ``others`` is the number of unanswered calls that have left it."""
        if not self.is_there:
            if loop_is_full and self._clock() >= self._cooldown_until:
                self.is_there, self._quiet_calls = True, 0
            return self.is_there
        if others > 1:
            self._quiet_calls = 0
            return True
        self._quiet_calls += 1
        if self._quiet_calls <= _QUIET_CALLS:
            return True
        # Other work may have filled the loop, so wait before the next switch.
        self.is_there, self._cooldown_until = False, self._clock() + _COOLDOWN_SECONDS
        return False


_BUSY_FRACTION: Final = 0.6
_GROW_CONCURRENCY: Final = 1.8
_SHRINK_CONCURRENCY: Final = 1.3
_SHRINK_SECONDS: Final = 60.0
_GROWTH_FACTOR: Final = 2
_LONG_SECONDS: Final = 1e-3
_LONG_CALLS: Final = 8


class ConcurrencyEstimator:
    """Estimator of concurrent demand for one model since the last look.

    Args:
        most: upper limit of concurrent inferences: the number of cores.
        cores: cores that a single inference uses if no other runs.
        is_for_loop: whether the model is first compiled for one thread, because its inferences are short.

    Attributes:
        chosen: concurrency for which the model is compiled; 0 for one thread on the event loop.
    """

    def __init__(
        self, most: int, clock: Callable[[], float] = perf_counter, *, cores: int = 1, is_for_loop: bool = False
    ) -> None:
        self.chosen = 0 if is_for_loop else 1
        self._is_for_loop = is_for_loop
        # An inference that is long on one thread is shorter on all cores, and must stay there.
        self._long_on_cores = _LONG_SECONDS / cores
        self._most = most
        self._clock = clock
        self._looked_at = self._few_since = self._long_at = clock()
        self._long_calls = 0
        self._at_once = self._seconds = self._long_seconds = 0.0

    def note(self, at_once: float, seconds: float) -> None:
        """Record a call with the number of concurrent calls and its device seconds."""
        self._at_once += at_once * seconds
        self._seconds += seconds
        if seconds >= (self._long_on_cores if self.chosen else _LONG_SECONDS):
            self._long_calls += 1
            self._long_seconds += seconds

    def look(self) -> int:
        """Return the desired concurrency from the calls since the last look, and reset the figures.

        More than 1 only if the device was busy; back to 1 after a minute of lone or no calls. 0 (one thread) while
        short calls take most of the time, and again after a minute of that.
        """
        now = self._clock()
        passed, self._looked_at = now - self._looked_at, now
        average = self._at_once / self._seconds if self._seconds else 0.0
        busy = self._seconds / passed if passed > 0 else 0.0
        is_long = self._long_calls >= _LONG_CALLS and self._long_seconds > self._seconds / 2
        self._long_calls = 0
        self._at_once = self._seconds = self._long_seconds = 0.0
        if average >= _SHRINK_CONCURRENCY:
            self._few_since = now
        if is_long or not self._is_for_loop:
            self._long_at = now
        if (self.chosen == 0 and not is_long) or now - self._long_at >= _SHRINK_SECONDS:
            return 0
        wanted = min(round(average), self._most)
        if (
            average >= _GROW_CONCURRENCY
            and busy >= _BUSY_FRACTION
            and (self.chosen <= 1 or wanted >= _GROWTH_FACTOR * self.chosen)
        ):
            return max(wanted, self.chosen, 1)
        return 1 if self.chosen == 0 or now - self._few_since >= _SHRINK_SECONDS else self.chosen
