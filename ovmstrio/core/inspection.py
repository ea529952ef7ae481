"""What services show of themselves to those who look at a server: how they are wired, and what their parts count."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ovmstrio.core.drawing import Drawing

__all__ = ["NOTHING_INSIDE", "Inside", "NodeTally", "StreamTally"]


class NodeTally:
    """What one node of a service has done, in all calls together; counted by the event loop alone.

    Attributes:
        runs: that have ended, however they did.
        failures: how many of these failed.
        active: runs under way.
        seconds: that the runs took in all.
    """

    __slots__ = ("active", "failures", "runs", "seconds")

    def __init__(self) -> None:
        self.runs = 0
        self.failures = 0
        self.active = 0
        self.seconds = 0.0

    def ended(self, seconds: float) -> None:
        """Count the end of a run that is under way."""
        self.active -= 1
        self.runs += 1
        self.seconds += seconds


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
        nodes: what the nodes count, by the titles of their boxes.
        streams: how much went along the edges, by the names of their streams; empty where that is told by the nodes.
        waiting: how much waits at the entrance of nodes, by the titles of their boxes.
    """

    drawing: Drawing | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    nodes: Mapping[str, NodeTally] = field(default_factory=dict)
    streams: Mapping[str, StreamTally] = field(default_factory=dict)
    waiting: Mapping[str, int] = field(default_factory=dict)


NOTHING_INSIDE = Inside()
