"""Input policies: when a node can run, and on which packets.

A policy reads the input streams of one node; ``next()`` takes the packets of one run from them.
"""

from __future__ import annotations

import enum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Self

from ovmstrio.graphs.calculator import NodeFailure
from ovmstrio.graphs.packets import DONE, MAX, MIN, next_allowed
from ovmstrio.graphs.stream_refs import parse_tag_index

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ovmstrio.graphs.graph_config import PolicyConfig, Port
    from ovmstrio.graphs.streams import InputStream


class CloseType(enum.Enum):
    """Type of :data:`CLOSE`."""

    CLOSE = enum.auto()


CLOSE: Final = CloseType.CLOSE
"""All inputs are done: the node must be closed."""


class NodeStep(NamedTuple):
    """One run of a node: its timestamp and its values by port, in tag order.

    ``settled``: the last known timestamp of each input, if the policy tracks it.
    """

    timestamp: int
    inputs: dict[Port, Any]
    settled: Mapping[Port, int] = MappingProxyType({})


Step = NodeStep | Literal[CloseType.CLOSE] | None
"""None: the node is not ready."""


class InputPolicy:
    """Input policy of one node of one instance."""

    def __init__(self, streams: Sequence[InputStream]) -> None:
        self._streams = streams

    def next(self) -> Step:
        """Take the packets of the next run, if the node can run."""
        raise NotImplementedError

    def arrived(self) -> None:
        """Handle new packets or bounds; some policies drop packets here."""

    def bound(self) -> int:
        """Return the smallest timestamp of a future run, ``DONE`` if there is none."""
        return _earliest_timestamp(self._streams)


def _earliest_timestamp(streams: Sequence[InputStream]) -> int:
    """Return the smallest timestamp of a queued or future packet on these streams."""
    return min((stream.earliest for stream in streams), default=DONE)


# Policies that also run on timestamp bounds

BEFORE_ALL: Final = MIN - 1
"""Last settled timestamp of an input about which nothing is known yet."""


class _SettledPolicy(InputPolicy):
    """Policy that runs at the timestamp of the earliest packet, or without packets at the last settled timestamp.

    If several timestamps settle at once without packets, only the last one runs. The inputs form one set, or one set
    each; in the second case a run without packets at ``MAX`` reports the end of each input.
    """

    def __init__(self, streams: Sequence[InputStream], sets: Sequence[_Set]) -> None:
        super().__init__(streams)
        self._sets = sets

    @classmethod
    def synchronized(cls, streams: Sequence[InputStream]) -> Self:
        return cls(streams, [_Set(streams, reports_end=False)])

    @classmethod
    def unsynchronized(cls, streams: Sequence[InputStream]) -> Self:
        return cls(streams, [_Set([stream], reports_end=True) for stream in streams])

    def next(self) -> Step:
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
            for stream in each.streams:
                known = MAX if stream.earliest == DONE else stream.earliest - 1
                settled[stream.port] = now if time == now else known
        return NodeStep(now, inputs, settled)


class _Set:
    """Inputs that are synchronized; ``_last`` is the timestamp of their last run."""

    __slots__ = ("_last", "_reports_end", "streams")

    def __init__(self, streams: Sequence[InputStream], *, reports_end: bool) -> None:
        self.streams = streams
        self._reports_end = reports_end
        self._last = BEFORE_ALL

    def time(self) -> int | None:
        """Return the timestamp of the next run, None if nothing is new, ``DONE`` if there is none."""
        packet = min((stream.queue[0].timestamp for stream in self.streams if stream.queue), default=DONE)
        bound = min((stream.bound for stream in self.streams if not stream.queue), default=DONE)
        is_done = packet == bound == DONE
        if is_done and not self._reports_end:
            return DONE
        found = min(packet, MAX if bound == DONE else bound - 1)
        if found > self._last:
            return found
        return DONE if is_done else None

    def take(self, timestamp: int, inputs: dict[Port, Any]) -> None:
        self._last = timestamp
        for stream in self.streams:
            if stream.queue and stream.queue[0].timestamp == timestamp:
                inputs[stream.port] = stream.queue.popleft().value


# Policies over sync sets


def _ready_time(streams: Sequence[InputStream]) -> int | None:
    """Return the timestamp at which a set can run, None if it must wait, ``DONE`` if all its streams are done."""
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


def _take_packets(streams: Sequence[InputStream], timestamp: int) -> NodeStep:
    inputs = {
        stream.port: stream.queue.popleft().value
        for stream in streams
        if stream.queue and stream.queue[0].timestamp == timestamp
    }
    return NodeStep(timestamp, inputs)


class _DefaultPolicy(InputPolicy):
    """Policy with all inputs synchronized, in timestamp order."""

    def next(self) -> Step:
        timestamp = _ready_time(self._streams)
        if timestamp is None:
            return None
        return CLOSE if timestamp == DONE else _take_packets(self._streams, timestamp)


class _EarlyClosePolicy(_DefaultPolicy):
    """Default policy, except that the first input that is done closes the node."""

    def next(self) -> Step:
        if any(stream.is_done for stream in self._streams):
            return CLOSE
        return super().next()


class _SyncSetPolicy(InputPolicy):
    """Several synchronized sets; the ready set with the earliest timestamp runs, of equals the one declared first.

    Inputs in no declared set form the last set.
    """

    def __init__(self, sets: Sequence[Sequence[InputStream]]) -> None:
        super().__init__([stream for streams in sets for stream in streams])
        self._sets = sets

    @classmethod
    def from_config(cls, streams: Sequence[InputStream], config: PolicyConfig) -> Self:
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
        best: Sequence[InputStream] | None = None
        first = DONE
        is_done = True
        for streams in self._sets:
            timestamp = _ready_time(streams)
            is_done = is_done and timestamp == DONE
            if timestamp is not None and timestamp < first:
                best, first = streams, timestamp
        if best is not None:
            return _take_packets(best, first)
        return CLOSE if is_done else None


class _ImmediatePolicy(InputPolicy):
    """Policy without synchronization: the earliest packet runs at once, with any packets at the same timestamp.

    As in MediaPipe, an idle node takes its packets when the first one arrives, so packets that arrive on other inputs
    right after it run on their own. The inputs of one request run together nevertheless. When one of several inputs
    ends, MediaPipe also runs the node without packets; this policy only settles the timestamp of that run.
    """

    def __init__(self, streams: Sequence[InputStream]) -> None:
        super().__init__(streams)
        self._prepared: NodeStep | None = None
        self._is_running = False
        self._open = len(streams)
        self._settled = MIN

    def next(self) -> Step:
        step = self._take() if self._prepared is None else self._with_request(self._prepared)
        self._prepared = None
        self._is_running = step is not None
        if step is None and not self._open:
            return CLOSE
        return step

    def arrived(self) -> None:
        if self._prepared is None and not self._is_running:
            self._prepared = self._take()

    def bound(self) -> int:
        return max(super().bound(), self._settled)

    def _take(self) -> NodeStep | None:
        still_open = sum(not stream.is_done for stream in self._streams)
        has_ended, self._open = still_open < self._open, still_open
        waiting = [stream.queue[0].timestamp for stream in self._streams if stream.queue]
        if waiting:
            return _take_packets(self._streams, min(waiting))
        if has_ended and still_open:
            self._settled = next_allowed(super().bound())
        return None

    def _with_request(self, step: NodeStep) -> NodeStep:
        """Add the packets of other graph inputs at the same timestamp."""
        names = {stream.name for stream in self._streams if stream.port in step.inputs}
        inputs = dict(step.inputs)
        for stream in self._streams:
            is_other = stream.is_graph_input and stream.name not in names
            if is_other and stream.queue and stream.queue[0].timestamp == step.timestamp:
                inputs[stream.port] = stream.queue.popleft().value
                names.add(stream.name)
        ports = [stream.port for stream in self._streams if stream.port in inputs]
        return NodeStep(step.timestamp, {port: inputs[port] for port in ports})


class _BarrierPolicy(InputPolicy):
    """Policy that runs once every input has a packet, on one packet of each, at the earliest of their timestamps.

    The first input that is done closes the node, because the node can never run again.
    """

    def next(self) -> Step:
        if any(stream.is_done for stream in self._streams):
            return CLOSE
        if not all(stream.queue for stream in self._streams):
            return None
        packets = [(stream.port, stream.queue.popleft()) for stream in self._streams]
        return NodeStep(
            min(packet.timestamp for _, packet in packets), {port: packet.value for port, packet in packets}
        )


class _TimestampAlignPolicy(InputPolicy):
    """Default policy on aligned clocks: the first packets of all inputs count as simultaneous.

    Timestamps are on the clock of the base input. Until every input has a packet, packets of the base input run alone.
    """

    def __init__(self, streams: Sequence[InputStream], base: InputStream) -> None:
        super().__init__(streams)
        self._base = base
        self._offsets: list[int] | None = None

    @classmethod
    def from_config(cls, streams: Sequence[InputStream], config: PolicyConfig) -> Self:
        port = parse_tag_index(config.options.timestamp_base_tag_index)
        return cls(streams, next(stream for stream in streams if stream.port == port))

    def next(self) -> Step:
        if self._offsets is None:
            if not all(stream.queue for stream in self._streams):
                return self._base_alone()
            start = self._base.queue[0].timestamp
            self._offsets = [start - stream.queue[0].timestamp for stream in self._streams]
        return self._aligned(self._offsets)

    def bound(self) -> int:
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


class _FixedSizePolicy(_DefaultPolicy):
    """Default policy that drops old packets: a queue that grew to ``trigger`` is cut to ``target``.

    All inputs drop packets up to the same timestamp, including packets that arrive late. With ``fixed_min`` nothing is
    dropped until every queue has ``trigger`` packets, and each queue keeps at least ``target``.
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
    def from_config(cls, streams: Sequence[InputStream], config: PolicyConfig) -> Self:
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
        self.arrived()
        return super().next()

    def arrived(self) -> None:
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


class _MuxPolicy(InputPolicy):
    """Policy that runs at each packet of the control input (the last by tag), whose value is the index of a data input.

    A run waits until the selected input is settled at that timestamp. Older packets of all inputs are dropped. The end
    of the control input closes the node.
    """

    def __init__(self, streams: Sequence[InputStream]) -> None:
        super().__init__(streams)
        *self._data, self._control = streams

    def next(self) -> Step:
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
        for stream in self._data:
            while stream.queue and stream.queue[0].timestamp <= head.timestamp:
                stream.queue.popleft()
        return NodeStep(head.timestamp, inputs)

    def bound(self) -> int:
        return self._control.earliest

    def _choose(self, value: Any) -> InputStream:
        if not isinstance(value, int) or not 0 <= value < len(self._data):
            raise NodeFailure(
                f"{self._control.port} is {value!r}, and must be the number of an input, 0 to {len(self._data) - 1}"
            )
        return self._data[value]


# Registry

_SUFFIX: Final = "InputStreamHandler"

_POLICIES: Final[Mapping[str, Callable[[Sequence[InputStream], PolicyConfig], InputPolicy]]] = {
    f"Default{_SUFFIX}": lambda streams, _: _DefaultPolicy(streams),
    f"Immediate{_SUFFIX}": lambda streams, _: _ImmediatePolicy(streams),
    f"EarlyClose{_SUFFIX}": lambda streams, _: _EarlyClosePolicy(streams),
    f"Barrier{_SUFFIX}": lambda streams, _: _BarrierPolicy(streams),
    f"Mux{_SUFFIX}": lambda streams, _: _MuxPolicy(streams),
    f"SyncSet{_SUFFIX}": _SyncSetPolicy.from_config,
    f"FixedSize{_SUFFIX}": _FixedSizePolicy.from_config,
    f"TimestampAlign{_SUFFIX}": _TimestampAlignPolicy.from_config,
}


def policy_names() -> tuple[str, ...]:
    """Return the input stream handlers that graph files can name."""
    return tuple(_POLICIES)


_SETTLED: Final[Mapping[str, Callable[[Sequence[InputStream]], InputPolicy]]] = {
    f"Default{_SUFFIX}": _SettledPolicy.synchronized,
    f"Immediate{_SUFFIX}": _SettledPolicy.unsynchronized,
}


def create_policy(
    config: PolicyConfig, streams: Sequence[InputStream], *, processes_bounds: bool = False
) -> InputPolicy:
    """Create the policy of one node of one instance, over its input streams in tag order.

    ``config`` must be validated. With ``processes_bounds`` the Default and Immediate policies also run without packets
    (see ``NodeContract``).
    """
    if processes_bounds and streams and config.handler in _SETTLED:
        return _SETTLED[config.handler](streams)
    return _POLICIES[config.handler](streams, config)
