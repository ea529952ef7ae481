"""Policies made of sync sets: streams that are looked at together.

A set may run at the timestamp of its earliest packet once nothing earlier or equal can come on its empty streams.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from ovmstrio.runtimes.graphs.config.stream_refs import parse_tag_index
from ovmstrio.runtimes.graphs.policies.steps import CLOSE, InputPolicy, NodeStep, Step
from ovmstrio.runtimes.graphs.timestamps import DONE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ovmstrio.runtimes.graphs.config.graph_config import PolicyConfig
    from ovmstrio.runtimes.graphs.input_streams import InputStream


__all__ = [
    "BarrierPolicy",
    "DefaultPolicy",
    "EarlyClosePolicy",
    "ImmediatePolicy",
    "SyncSetPolicy",
    "ready_time",
    "take",
]


def ready_time(streams: Sequence[InputStream]) -> int | None:
    """Give the timestamp at which a set may run; None if it must wait, ``DONE`` if all of it is done."""
    packet = bound = DONE
    for stream in streams:
        queue = stream.queue
        if queue:
            timestamp = queue[0].timestamp
            packet = min(packet, timestamp)
        else:
            bound = min(bound, stream.bound)
    if packet < bound:
        return packet
    return DONE if packet == bound == DONE else None


def take(streams: Sequence[InputStream], timestamp: int) -> NodeStep:
    """Take what lies at a timestamp at the heads of the streams."""
    inputs = {
        stream.port: stream.queue.popleft().value
        for stream in streams
        if stream.queue and stream.queue[0].timestamp == timestamp
    }
    return NodeStep(timestamp, inputs)


class DefaultPolicy(InputPolicy):
    """All inputs together, in the order of timestamps."""

    def next(self) -> Step:
        """Take the earliest timestamp, once no other input can have anything at it or before."""
        timestamp = ready_time(self._streams)
        if timestamp is None:
            return None
        return CLOSE if timestamp == DONE else take(self._streams, timestamp)


class EarlyClosePolicy(DefaultPolicy):
    """As the default, but the first input that is done ends the node."""

    def next(self) -> Step:
        """Close as soon as one input is done, else as the default."""
        if any(stream.is_done for stream in self._streams):
            return CLOSE
        return super().next()


class SyncSetPolicy(InputPolicy):
    """Several sets, each for itself; of those that may run the earliest runs, and of equals the one declared first.

    Inputs in no set form one more, the last.
    """

    def __init__(self, sets: Sequence[Sequence[InputStream]]) -> None:
        super().__init__([stream for streams in sets for stream in streams])
        self._sets = sets

    @classmethod
    def configured(cls, streams: Sequence[InputStream], config: PolicyConfig) -> Self:
        """Make the sets that the options name."""
        by_port = {stream.port: stream for stream in streams}
        declared = config.options.sync_set if config.options is not None else ()
        sets = [
            sorted((by_port.pop(parse_tag_index(text)) for text in each.tag_index), key=lambda stream: stream.port)
            for each in declared
        ]
        if by_port:
            sets.append(list(by_port.values()))
        return cls(sets)

    def next(self) -> Step:
        """Take the earliest set that may run."""
        best: Sequence[InputStream] | None = None
        first = DONE
        is_done = True
        for streams in self._sets:
            timestamp = ready_time(streams)
            is_done = is_done and timestamp == DONE
            if timestamp is not None and timestamp < first:
                best, first = streams, timestamp
        if best is not None:
            return take(best, first)
        return CLOSE if is_done else None


class ImmediatePolicy(InputPolicy):
    """Every input for itself: the earliest packet runs at once, with whatever lies at the same timestamp beside it.

    MediaPipe runs the node with no packet at all when one of several inputs ends; here nothing happens then.
    """

    def next(self) -> Step:
        """Take the earliest packets there are."""
        waiting = [stream.queue[0].timestamp for stream in self._streams if stream.queue]
        if waiting:
            return take(self._streams, min(waiting))
        return CLOSE if all(stream.is_done for stream in self._streams) else None


class BarrierPolicy(InputPolicy):
    """Runs once every input has a packet, at the earliest of their timestamps, on one packet of each.

    The first input that is done ends the node, for it can never run again.
    """

    def next(self) -> Step:
        """Take one packet of each input, if all have one."""
        if any(stream.is_done for stream in self._streams):
            return CLOSE
        if not all(stream.queue for stream in self._streams):
            return None
        packets = [(stream.port, stream.queue.popleft()) for stream in self._streams]
        return NodeStep(
            min(packet.timestamp for _, packet in packets), {port: packet.value for port, packet in packets}
        )
