"""Policies that run a node also where it has become certain that no packet comes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Self

from ovmstrio.runtimes.graphs.policies.steps import CLOSE, InputPolicy, NodeStep, Step
from ovmstrio.runtimes.graphs.timestamps import DONE, MAX, MIN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ovmstrio.runtimes.graphs.config.graph_config import Port
    from ovmstrio.runtimes.graphs.input_streams import InputStream

__all__ = ["BEFORE_ALL", "SettledPolicy"]

BEFORE_ALL: Final = MIN - 1
"""The last settled timestamp of an input of which nothing is known yet."""


class SettledPolicy(InputPolicy):
    """Runs at the timestamp of the earliest packet, or without one at the last timestamp that is settled.

    Of several timestamps that were settled at once without packets only the last is run.  Inputs are looked at all
    together, or each for itself; in the second case the end of each is told by a run without packets at ``MAX``.
    """

    def __init__(self, streams: Sequence[InputStream], sets: Sequence[_Set]) -> None:
        super().__init__(streams)
        self._sets = sets

    @classmethod
    def together(cls, streams: Sequence[InputStream]) -> Self:
        """Wait for all inputs, as the default policy does."""
        return cls(streams, [_Set(streams, tells_end=False)])

    @classmethod
    def apart(cls, streams: Sequence[InputStream]) -> Self:
        """Wait for none, as the policy Immediate does."""
        return cls(streams, [_Set([stream], tells_end=True) for stream in streams])

    def next(self) -> Step:
        """Take the earliest timestamp at which something has become known."""
        times = [each.time() for each in self._sets]
        now = min((time for time in times if time is not None), default=None)
        if now is None:
            return None
        if now == DONE:
            return CLOSE if all(time == DONE for time in times) else None
        inputs: dict[Port, Any] = {}
        settled: dict[Port, int] = {}
        for each, time in zip(self._sets, times, strict=True):
            if time == now:
                each.take(now, inputs)
            settled |= {stream.port: now if time == now else _known(stream) for stream in each.streams}
        return NodeStep(now, inputs, settled)


class _Set:
    """Inputs that are looked at together; ``last`` is the timestamp of their last run."""

    __slots__ = ("_last", "_tells_end", "streams")

    def __init__(self, streams: Sequence[InputStream], *, tells_end: bool) -> None:
        self.streams = streams
        self._tells_end = tells_end
        self._last = BEFORE_ALL

    def time(self) -> int | None:
        """Give the timestamp of the next run; None if nothing is new, ``DONE`` if nothing more will be."""
        packet = min((stream.queue[0].timestamp for stream in self.streams if stream.queue), default=DONE)
        bound = min((stream.bound for stream in self.streams if not stream.queue), default=DONE)
        is_done = packet == bound == DONE
        if is_done and not self._tells_end:
            return DONE
        found = min(packet, MAX if bound == DONE else bound - 1)
        if found > self._last:
            return found
        return DONE if is_done else None

    def take(self, timestamp: int, inputs: dict[Port, Any]) -> None:
        """Add what lies at a timestamp to the values of a run."""
        self._last = timestamp
        for stream in self.streams:
            if stream.queue and stream.queue[0].timestamp == timestamp:
                inputs[stream.port] = stream.queue.popleft().value


def _known(stream: InputStream) -> int:
    """Give the last timestamp of an input of which everything has been told."""
    return MAX if stream.earliest == DONE else stream.earliest - 1
