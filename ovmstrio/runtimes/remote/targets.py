"""Which address a call goes to: in turns, those that are well first; requests of a sequence to where it began."""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

import trio

from ovmstrio.runtimes.remote.breaker import Breaker

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from ovmstrio.runtimes.remote.endpoint import Endpoint
    from ovmstrio.runtimes.remote.sequence import SequenceStep

__all__ = ["Target", "Targets"]

_MOST_DEVIATIONS: Final = 65_536
"""Sequences that are remembered because they are elsewhere than their ids say; the oldest are forgotten first."""


class Target:
    """One address, with what is known of it.

    Attributes:
        endpoint: how it is called.
        breaker: whether it may be.
        ailment: why it would not answer, as far as is known; empty if it is well.
        suspect: is set where a call has found that it is not.
    """

    __slots__ = ("ailment", "breaker", "endpoint", "suspect")

    def __init__(self, endpoint: Endpoint, breaker: Breaker) -> None:
        self.endpoint = endpoint
        self.breaker = breaker
        self.ailment = ""
        self.suspect = trio.Event()

    def obstacle(self, now: float) -> str:
        """Tell why it cannot be called, empty if it can."""
        if self.ailment:
            return f"{self.endpoint.address}: {self.ailment}"
        left = self.breaker.seconds_left(now)
        if not left:
            return ""
        failures = self.breaker.failures_in_row
        return f"{self.endpoint.address}: left alone for {left:.1f} s more, after {failures} failures in a row"


class Targets:
    """All addresses of one model."""

    def __init__(self, targets: Sequence[Target]) -> None:
        self.all = tuple(targets)
        self._turn = 0
        self._deviations: OrderedDict[int | str, Target] = OrderedDict()

    def obstacle(self, now: float) -> str:
        """Tell why no address can be called, empty if one can."""
        obstacles = [target.obstacle(now) for target in self.all]
        return "; ".join(obstacles) if all(obstacles) else ""

    def choose(self, now: float, tried: Collection[Target] = ()) -> Target | None:
        """Choose the next address in turn, of those that may be called and were not tried; well ones come first."""
        first = self._turn % len(self.all)
        # Further attempts at one call take nobody's turn.
        self._turn += not tried
        in_turn = (*self.all[first:], *self.all[:first])
        allowed = [target for target in in_turn if target not in tried and target.breaker.allows(now)]
        return min(allowed, key=lambda target: bool(target.ailment), default=None)

    def of_sequence(self, step: SequenceStep, now: float) -> Target:
        """Give the address of a sequence; where it begins, one that is well.

        The id says which it is, so that nothing is remembered of most sequences, and a server that is started anew
        finds them; a sequence that began while that address was not well is remembered to be elsewhere.
        """
        own = max(self.all, key=lambda target: _weight(step.id, target))
        if not step.starts:
            return self._deviations.get(step.id, own)
        well = [target for target in self.all if not target.ailment and target.breaker.allows(now)]
        chosen = max(well, key=lambda target: _weight(step.id, target)) if well else own
        self.place(step.id, chosen)
        return chosen

    def place(self, sequence: int | str, target: Target) -> None:
        """Remember where a sequence is."""
        self.forget(sequence)
        if target is not max(self.all, key=lambda each: _weight(sequence, each)):
            self._deviations[sequence] = target
            if len(self._deviations) > _MOST_DEVIATIONS:
                self._deviations.popitem(last=False)

    def forget(self, sequence: int | str) -> None:
        """Forget where a sequence was that has ended."""
        self._deviations.pop(sequence, None)


def _weight(sequence: int | str, target: Target) -> bytes:
    return blake2b(f"{sequence}@{target.endpoint.address}".encode(), digest_size=8).digest()
