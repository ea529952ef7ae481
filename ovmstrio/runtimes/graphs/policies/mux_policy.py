"""One of several inputs at a time, as a control input says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ovmstrio.runtimes.graphs.calculator import NodeFailure
from ovmstrio.runtimes.graphs.policies.steps import CLOSE, InputPolicy, NodeStep, Step

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ovmstrio.runtimes.graphs.input_streams import InputStream

__all__ = ["MuxPolicy"]


class MuxPolicy(InputPolicy):
    """Runs at each packet of the control input, the last by tag, whose value is the index of the input to read.

    What the chosen input has at that timestamp comes with it, once that is decided; earlier packets of all inputs are
    dropped as the control input goes on.  The node ends with its control input.
    """

    def __init__(self, streams: Sequence[InputStream]) -> None:
        super().__init__(streams)
        *self._data, self._control = streams

    def next(self) -> Step:
        """Take the next control packet and what it chooses, once that is decided.

        Raises:
            NodeFailure: it chooses no input.
        """
        control = self._control
        if not control.queue:
            return CLOSE if control.is_done else None
        head = control.queue[0]
        chosen = self._choose(head.value)
        while chosen.queue and chosen.queue[0].timestamp < head.timestamp:
            chosen.queue.popleft()
        if chosen.earliest <= head.timestamp and not chosen.queue:
            return None
        control.queue.popleft()
        inputs = {control.port: head.value}
        if chosen.queue and chosen.queue[0].timestamp == head.timestamp:
            inputs = {chosen.port: chosen.queue.popleft().value, **inputs}
        self._drop(head.timestamp)
        return NodeStep(head.timestamp, inputs)

    def bound(self) -> int:
        """Give the smallest timestamp that a run to come may have."""
        return self._control.earliest

    def _choose(self, value: Any) -> InputStream:
        if not isinstance(value, int) or not 0 <= value < len(self._data):
            raise NodeFailure(
                f"{self._control.port} is {value!r}, and must be the number of an input, 0 to {len(self._data) - 1}"
            )
        return self._data[value]

    def _drop(self, timestamp: int) -> None:
        for stream in self._data:
            while stream.queue and stream.queue[0].timestamp <= timestamp:
                stream.queue.popleft()
