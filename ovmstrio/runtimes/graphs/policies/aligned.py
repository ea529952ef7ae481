"""Inputs whose clocks started at different times, brought to the clock of one of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from ovmstrio.runtimes.graphs.config.stream_refs import parse_tag_index
from ovmstrio.runtimes.graphs.policies.steps import CLOSE, InputPolicy, NodeStep, Step
from ovmstrio.runtimes.graphs.timestamps import DONE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ovmstrio.runtimes.graphs.config.graph_config import PolicyConfig
    from ovmstrio.runtimes.graphs.input_streams import InputStream

__all__ = ["TimestampAlignPolicy"]


class TimestampAlignPolicy(InputPolicy):
    """The default policy after the first packet of each input has been declared simultaneous.

    Until every input has had one, packets of the base input run alone and the others wait.
    """

    def __init__(self, streams: Sequence[InputStream], base: InputStream) -> None:
        super().__init__(streams)
        self._base = base
        self._offsets: list[int] | None = None

    @classmethod
    def configured(cls, streams: Sequence[InputStream], config: PolicyConfig) -> Self:
        """Make the policy with the base that the options name."""
        port = parse_tag_index(config.options.timestamp_base_tag_index)
        return cls(streams, next(stream for stream in streams if stream.port == port))

    def next(self) -> Step:
        """Take the earliest aligned timestamp; it is told on the base's clock."""
        if self._offsets is None:
            if not all(stream.queue for stream in self._streams):
                return self._base_alone()
            start = self._base.queue[0].timestamp
            self._offsets = [start - stream.queue[0].timestamp for stream in self._streams]
        return self._aligned(self._offsets)

    def bound(self) -> int:
        """Give the smallest timestamp that a run to come may have, on the base's clock."""
        if self._offsets is None:
            return self._base.earliest
        found = zip(self._streams, self._offsets, strict=True)
        return min((stream.earliest + offset for stream, offset in found if not stream.is_done), default=DONE)

    def _base_alone(self) -> Step:
        base = self._base
        if base.queue:
            packet = base.queue.popleft()
            return NodeStep(packet.timestamp, {base.port: packet.value})
        return CLOSE if base.is_done else None

    def _aligned(self, offsets: Sequence[int]) -> Step:
        packet = bound = DONE
        for stream, offset in zip(self._streams, offsets, strict=True):
            if stream.queue:
                packet = min(packet, stream.queue[0].timestamp + offset)
            elif stream.bound != DONE:
                bound = min(bound, stream.bound + offset)
        if packet >= bound:
            return CLOSE if packet == bound == DONE else None
        inputs = {
            stream.port: stream.queue.popleft().value
            for stream, offset in zip(self._streams, offsets, strict=True)
            if stream.queue and stream.queue[0].timestamp + offset == packet
        }
        return NodeStep(packet, inputs)
