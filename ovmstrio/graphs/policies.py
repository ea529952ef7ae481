"""Input policies: when a node may run, and on which packets.

A policy looks at the input streams of one node.  ``next()`` takes the packets of one run off them.
"""

from __future__ import annotations

import enum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Self

from ovmstrio.graphs.calculator import NodeFailure
from ovmstrio.graphs.graph_config import parse_tag_index
from ovmstrio.graphs.packets import DONE, MAX, MIN, next_allowed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ovmstrio.graphs.graph_config import PolicyConfig, Port
    from ovmstrio.graphs.streams import InputStream

__all__ = [
    "BEFORE_ALL",
    "CLOSE",
    "BarrierPolicy",
    "Close",
    "DefaultPolicy",
    "EarlyClosePolicy",
    "FixedSizePolicy",
    "ImmediatePolicy",
    "InputPolicy",
    "MuxPolicy",
    "NodeStep",
    "SettledPolicy",
    "Step",
    "SyncSetPolicy",
    "TimestampAlignPolicy",
    "earliest",
    "make_policy",
    "policy_names",
    "ready_time",
    "take",
]

# ----------------------------------------------------------------------
# What a policy answers
# ----------------------------------------------------------------------


class Close(enum.Enum):
    """The type of :data:`CLOSE`."""

    CLOSE = enum.auto()


CLOSE: Final = Close.CLOSE
"""All inputs are done: the node is to be closed."""


class NodeStep(NamedTuple):
    """One run of the node: its timestamp and the values by port, in the order of tags.

    ``settled`` tells by port how far each input is known, where the policy looks for that.
    """

    timestamp: int
    inputs: dict[Port, Any]
    settled: Mapping[Port, int] = MappingProxyType({})


Step = NodeStep | Literal[Close.CLOSE] | None
"""None: not ready."""


class InputPolicy:
    """The input policy of one node of one instance."""

    def __init__(self, streams: Sequence[InputStream]) -> None:
        self._streams = streams

    def next(self) -> Step:
        """Take the packets of the next run, if the node may run.

        Raises:
            NodeFailure: the packets make no sense to the policy.
        """
        raise NotImplementedError

    def arrived(self) -> None:
        """Note that packets or bounds have come; some policies drop packets now."""

    def bound(self) -> int:
        """Give the smallest timestamp that a run to come may have, ``DONE`` if there will be none."""
        return earliest(self._streams)


def earliest(streams: Sequence[InputStream]) -> int:
    """Give the smallest timestamp of a packet that waits on these streams or may still come."""
    return min((stream.earliest for stream in streams), default=DONE)


# ----------------------------------------------------------------------
# Policies that run a node also where it has become certain that no packet comes
# ----------------------------------------------------------------------

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


# ----------------------------------------------------------------------
# Policies made of sync sets: streams that are looked at together
# ----------------------------------------------------------------------


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


# ----------------------------------------------------------------------
# Inputs whose clocks started at different times, brought to the clock of one of them
# ----------------------------------------------------------------------


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


# ----------------------------------------------------------------------
# Only the newest packets: the default policy over queues that are cut short
# ----------------------------------------------------------------------


class FixedSizePolicy(DefaultPolicy):
    """Drops old packets when a queue has grown to ``trigger`` down to ``target``, on every input at one timestamp.

    What comes late is dropped as if it had come in time.  With ``fixed_min`` nothing is dropped until every queue has
    grown to ``trigger``, and each keeps at least ``target``.
    """

    def __init__(
        self, streams: Sequence[InputStream], *, trigger: int = 2, target: int = 1, fixed_min: bool = False
    ) -> None:
        super().__init__(streams)
        self._trigger = trigger
        self._target = target
        self._fixed_min = fixed_min
        self._keep_from = MIN

    @classmethod
    def configured(cls, streams: Sequence[InputStream], config: PolicyConfig) -> Self:
        """Make the policy that the options describe."""
        options = config.options
        if options is None:
            return cls(streams)
        return cls(
            streams,
            trigger=options.trigger_queue_size,
            target=options.target_queue_size,
            fixed_min=options.fixed_min_size,
        )

    def next(self) -> Step:
        """Drop what is too old, then take as the default does."""
        self.arrived()
        return super().next()

    def arrived(self) -> None:
        """Drop what is too old."""
        keep_from = self._keep_all() if self._fixed_min else self._keep_any()
        for stream in self._streams:
            while stream.queue and stream.queue[0].timestamp < keep_from:
                stream.queue.popleft()

    def _keep_any(self) -> int:
        for stream in self._streams:
            if len(stream.queue) >= self._trigger and len(stream.queue) > self._target:
                newest_dropped = stream.queue[-self._target - 1].timestamp
                self._keep_from = max(self._keep_from, next_allowed(newest_dropped))
        return self._keep_from

    def _keep_all(self) -> int:
        if any(len(stream.queue) < self._trigger for stream in self._streams):
            return MIN
        return min(stream.queue[-self._target].timestamp for stream in self._streams)


# ----------------------------------------------------------------------
# One of several inputs at a time, as a control input says
# ----------------------------------------------------------------------


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


# ----------------------------------------------------------------------
# Input policies: when a node may run, and on which packets
# ----------------------------------------------------------------------

_SUFFIX: Final = "InputStreamHandler"

_POLICIES: Final[Mapping[str, Callable[[Sequence[InputStream], PolicyConfig], InputPolicy]]] = {
    f"Default{_SUFFIX}": lambda streams, _: DefaultPolicy(streams),
    f"Immediate{_SUFFIX}": lambda streams, _: ImmediatePolicy(streams),
    f"EarlyClose{_SUFFIX}": lambda streams, _: EarlyClosePolicy(streams),
    f"Barrier{_SUFFIX}": lambda streams, _: BarrierPolicy(streams),
    f"Mux{_SUFFIX}": lambda streams, _: MuxPolicy(streams),
    f"SyncSet{_SUFFIX}": SyncSetPolicy.configured,
    f"FixedSize{_SUFFIX}": FixedSizePolicy.configured,
    f"TimestampAlign{_SUFFIX}": TimestampAlignPolicy.configured,
}


def policy_names() -> tuple[str, ...]:
    """List the input stream handlers that graph files may name."""
    return tuple(_POLICIES)


_SETTLED: Final[Mapping[str, Callable[[Sequence[InputStream]], InputPolicy]]] = {
    f"Default{_SUFFIX}": SettledPolicy.together,
    f"Immediate{_SUFFIX}": SettledPolicy.apart,
}


def make_policy(config: PolicyConfig, streams: Sequence[InputStream], *, processes_bounds: bool = False) -> InputPolicy:
    """Make the policy of one node of one instance, over its input streams in the order of tags.

    The configuration has been checked (``graphs.config.wiring``).  With ``processes_bounds`` the node runs without
    packets, too, where its policy can tell when (``NodeContract``).
    """
    if processes_bounds and streams and config.handler in _SETTLED:
        return _SETTLED[config.handler](streams)
    return _POLICIES[config.handler](streams, config)
