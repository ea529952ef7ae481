"""A packet on every input, whatever their timestamps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ovmstrio.runtimes.graphs.policies.steps import CLOSE, Run, Step, earliest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ovmstrio.runtimes.graphs.streams import InputStream

__all__ = ["BarrierPolicy"]


class BarrierPolicy:
    """Runs once every input has a packet, at the earliest of their timestamps, on one packet of each.

    The first input that is done ends the node, for it can never run again.
    """

    def __init__(self, streams: Sequence[InputStream]) -> None:
        self._streams = streams

    def next(self) -> Step:
        """Take one packet of each input, if all have one."""
        if any(stream.is_done for stream in self._streams):
            return CLOSE
        if not all(stream.queue for stream in self._streams):
            return None
        packets = [(stream.port, stream.queue.popleft()) for stream in self._streams]
        return Run(min(packet.timestamp for _, packet in packets), {port: packet.value for port, packet in packets})

    def arrived(self) -> None:
        """Nothing to drop."""

    def bound(self) -> int:
        """Give the smallest timestamp that a run to come may have."""
        return earliest(self._streams)
