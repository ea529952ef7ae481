"""One sequence of requests, with what the model remembers of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from ovmstrio.core.servable import SequenceInfo

if TYPE_CHECKING:
    from ovmstrio.openvino.state import State
    from ovmstrio.runtimes.models.sequences.manager import SequenceManager

__all__ = ["Sequence"]


class Sequence:
    """A live sequence.

    Attributes:
        id: what requests call it.
        owner: the manager that has it; another one's after it has moved to another version of the model.
        by_default: whether it was started by a request for the default version, which it follows then.
        turn: held by the request that runs; others wait in the order of their arrival.
        state: what the model remembers; None before the first request has succeeded.
        requests: how many have succeeded.
        alive: False once it is over; a request that waited for its turn meanwhile must not run.
        ending: whether its last request has come.
        idle: whether the cleaner has come by since the last request that succeeded.
        started_at: when it was started, on trio's clock.
        used_at: when its last request succeeded, on trio's clock.
    """

    __slots__ = (
        "alive",
        "by_default",
        "ending",
        "id",
        "idle",
        "owner",
        "requests",
        "started_at",
        "state",
        "turn",
        "used_at",
    )

    def __init__(self, number: int, owner: SequenceManager, *, by_default: bool) -> None:
        self.id = number
        self.owner = owner
        self.by_default = by_default
        self.turn = trio.StrictFIFOLock()
        self.state: State | None = None
        self.requests = 0
        self.alive = True
        self.ending = False
        self.idle = False
        self.started_at = self.used_at = trio.current_time()

    def advance(self, state: State) -> None:
        """Note that a request has succeeded, and what the model remembers now."""
        self.state = state
        self.requests += 1
        self.idle = False
        self.used_at = trio.current_time()

    @property
    def info(self) -> SequenceInfo:
        """The sequence as others see it."""
        now = trio.current_time()
        return SequenceInfo(self.id, now - self.started_at, now - self.used_at, self.requests)
