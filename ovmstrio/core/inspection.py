"""What services show of themselves to those who look at a server: how they are wired, and what their parts count."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

from ovmstrio.core.hooks import NULL_NODE_HOOKS, NodeHooks
from ovmstrio.core.time_bands import TIME_BOUNDS, no_times

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ovmstrio.core.drawing import Drawing

__all__ = ["NOTHING_INSIDE", "Inside", "NodeTally", "StreamTally"]


class NodeTally:
    """What one node of a service has done, in all calls together; counted by the event loop alone.

    Args:
        hooks: are told of the runs.

    Attributes:
        runs: that have ended, however they did.
        failures: how many of these failed.
        active: runs under way.
        seconds: that the runs took in all.
        times: how many of them took how long, in the bands of :data:`ovmstrio.core.time_bands.TIME_BOUNDS`.
    """

    __slots__ = ("_hooks", "active", "failures", "runs", "seconds", "times")

    def __init__(self, hooks: NodeHooks = NULL_NODE_HOOKS) -> None:
        self._hooks = hooks
        self.runs = 0
        self.failures = 0
        self.active = 0
        self.seconds = 0.0
        self.times = no_times()

    def begin(self) -> float:
        """Count a run in, and give the time of its begin, which is told at its end."""
        self.active += 1
        return perf_counter()

    def succeeded(self, begun: float) -> None:
        """Count the end of a run."""
        self._hooks.ran(self._end(begun))

    def failed(self, begun: float) -> None:
        """Count a run that failed."""
        self._end(begun)
        self.failures += 1
        self._hooks.failed()

    def _end(self, begun: float) -> float:
        """Count out a run that has ended, and give the seconds that it took."""
        seconds = perf_counter() - begun
        self.active -= 1
        self.runs += 1
        self.seconds += seconds
        self.times[bisect_left(TIME_BOUNDS, seconds)] += 1
        return seconds

    def left(self) -> None:
        """Count out a run that was cancelled, which is none."""
        self.active -= 1


class StreamTally:
    """How often something went along one connection."""

    __slots__ = ("passed",)

    def __init__(self) -> None:
        self.passed = 0


@dataclass(frozen=True, slots=True)
class Inside:
    """What one loaded service has inside at one moment.

    Attributes:
        drawing: how its nodes are joined; None for what has none.
        facts: by name, numbers, texts, or lists and objects of them.
        nodes: what the nodes count, by the keys of their boxes.
        streams: how much went along the edges, by their numbers in the drawing; one that is not there had what the
            runs of its source gave.
        waiting: how much waits at the entrance of nodes, by the keys of their boxes.
    """

    drawing: Drawing | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    nodes: Mapping[str, NodeTally] = field(default_factory=dict)
    streams: Mapping[int, StreamTally] = field(default_factory=dict)
    waiting: Mapping[str, int] = field(default_factory=dict)


NOTHING_INSIDE: Final = Inside()
