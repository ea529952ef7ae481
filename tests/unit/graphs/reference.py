"""Reference model of a packet graph: simple and slow, one node at a time, every state recomputed each time.

It knows nothing of the engine.  Streams are lists; a node asks its policy and runs if it may, and all nodes are looked
at again until nothing changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from ovmstrio.graphs.graph_config import Port
from tests.support.calculators import Delivery, Rule

_NEVER: Final = 10**30
"""Later than every timestamp: the bound of a stream that has ended."""
_ALWAYS: Final = -(10**30)
"""Earlier than every timestamp: the bound of a stream that has not begun."""


class TimestampMismatch(Exception):
    """Error for a packet with a timestamp that its stream has passed."""


@dataclass(frozen=True, slots=True)
class Handler:
    name: str = "Default"
    sets: tuple[tuple[Port, ...], ...] = ()
    trigger: int = 2
    target: int = 1
    fixed_min_size: bool = False
    base: Port = Port("IN", 0)  # noqa: RUF009 - immutable


@dataclass(frozen=True, slots=True)
class ModelNode:
    name: str
    inputs: tuple[tuple[Port, str], ...]
    outputs: tuple[tuple[Port, str], ...]
    rule: Rule
    handler: Handler = Handler()
    back_edges: frozenset[Port] = frozenset()
    propagates_bounds: bool = False


@dataclass(frozen=True, slots=True)
class Feed:
    stream: str
    timestamp: int
    value: int


@dataclass
class _Queue:
    packets: list[tuple[int, int]] = field(default_factory=list)
    bound: int = _ALWAYS

    @property
    def ended(self) -> bool:
        return not self.packets and self.bound == _NEVER

    @property
    def earliest(self) -> int:
        return self.packets[0][0] if self.packets else self.bound

    def take(self, timestamp: int) -> int | None:
        if self.packets and self.packets[0][0] == timestamp:
            return self.packets.pop(0)[1]
        return None

    def drop_before(self, timestamp: int) -> None:
        self.packets = [packet for packet in self.packets if packet[0] >= timestamp]


class _Close(Exception):
    """Request of the policy to close the node."""


class _State:
    def __init__(self, node: ModelNode) -> None:
        self.node = node
        self.queues = {port: _Queue() for port, _ in node.inputs}
        self.deliveries: list[Delivery] = []
        self.closed = False
        self.kept = _ALWAYS
        self.offsets: dict[Port, int] | None = None

    # Policies: each gives the next delivery, or None while it waits.

    def next_delivery(self) -> Delivery | None:
        choose = {
            "Default": self._default,
            "SyncSet": self._sync_set,
            "Immediate": self._immediate,
            "FixedSize": self._fixed_size,
            "Barrier": self._barrier,
            "EarlyClose": self._early_close,
            "TimestampAlign": self._timestamp_align,
        }
        return choose[self.node.handler.name]()

    def _ready_at(self, ports: Sequence[Port]) -> int | None:
        queues = [self.queues[port] for port in ports]
        first = min((queue.packets[0][0] for queue in queues if queue.packets), default=None)
        bound = min((queue.bound for queue in queues if not queue.packets), default=_NEVER)
        return first if first is not None and first < bound else None

    def _ended(self, ports: Sequence[Port]) -> bool:
        return all(self.queues[port].ended for port in ports)

    def _take(self, timestamp: int, ports: Sequence[Port]) -> Delivery:
        found = [(port, self.queues[port].take(timestamp)) for port in self.queues if port in ports]
        return Delivery(timestamp, tuple((port, value) for port, value in found if value is not None))

    def _among(self, sets: Sequence[Sequence[Port]]) -> Delivery | None:
        if all(self._ended(ports) for ports in sets):
            raise _Close
        best: tuple[int, Sequence[Port]] | None = None
        for ports in sets:
            timestamp = self._ready_at(ports)
            if timestamp is not None and (best is None or timestamp < best[0]):
                best = timestamp, ports
        return self._take(*best) if best is not None else None

    def _default(self) -> Delivery | None:
        return self._among([tuple(self.queues)])

    def _sync_set(self) -> Delivery | None:
        declared = self.node.handler.sets
        rest = tuple(port for port in self.queues if not any(port in ports for ports in declared))
        return self._among([*declared, rest] if rest else declared)

    def _immediate(self) -> Delivery | None:
        if self._ended(tuple(self.queues)):
            raise _Close
        heads = [queue.packets[0][0] for queue in self.queues.values() if queue.packets]
        return self._take(min(heads), tuple(self.queues)) if heads else None

    def _barrier(self) -> Delivery | None:
        if any(queue.ended for queue in self.queues.values()):
            raise _Close
        if not all(queue.packets for queue in self.queues.values()):
            return None
        heads = {port: queue.packets.pop(0) for port, queue in self.queues.items()}
        timestamp = min(head[0] for head in heads.values())
        return Delivery(timestamp, tuple((port, head[1]) for port, head in heads.items()))

    def _early_close(self) -> Delivery | None:
        if any(queue.ended for queue in self.queues.values()):
            raise _Close
        return self._default()

    def _fixed_size(self) -> Delivery | None:
        handler = self.node.handler
        queues = list(self.queues.values())
        if handler.fixed_min_size:
            if all(len(queue.packets) >= handler.trigger for queue in queues):
                first_kept = min(queue.packets[-handler.target][0] for queue in queues)
                for queue in queues:
                    queue.drop_before(first_kept)
            return self._default()
        for queue in queues:
            if len(queue.packets) >= max(handler.trigger, handler.target + 1):
                last_dropped = queue.packets[-handler.target - 1][0]
                self.kept = max(self.kept, last_dropped + 1)
        for queue in queues:
            queue.drop_before(self.kept)
        return self._default()

    def _timestamp_align(self) -> Delivery | None:
        base = self.node.handler.base
        if self.offsets is None:
            if not self.queues[base].packets:
                return None
            timestamp = self.queues[base].packets[0][0]
            if not all(queue.packets for queue in self.queues.values()):
                return self._take(timestamp, (base,))
            self.offsets = {port: timestamp - queue.packets[0][0] for port, queue in self.queues.items()}
            for port, queue in self.queues.items():
                queue.packets = [(time + self.offsets[port], value) for time, value in queue.packets]
                queue.bound = queue.bound + self.offsets[port] if queue.bound != _NEVER else _NEVER
        return self._default()

    def waits_for_back_edges_only(self) -> bool:
        return all(queue.ended for port, queue in self.queues.items() if port not in self.node.back_edges)

    def arrive(self, port: Port, timestamp: int, value: int) -> None:
        queue = self.queues[port]
        shift = self.offsets[port] if self.offsets else 0
        if timestamp + shift < queue.bound:
            raise TimestampMismatch(port, timestamp)
        queue.packets.append((timestamp + shift, value))
        queue.bound = timestamp + shift + 1

    def raise_bound(self, port: Port, bound: int) -> None:
        shift = self.offsets[port] if self.offsets and bound != _NEVER else 0
        queue = self.queues[port]
        queue.bound = max(queue.bound, bound + shift)


class ModelRun:
    """One run of a graph.

    Attributes:
        deliveries: what each node was given, in order.
        outputs: the packets of each graph output, in order.
    """

    def __init__(self, inputs: Sequence[str], outputs: Sequence[str], nodes: Sequence[ModelNode]) -> None:
        self._states = [_State(node) for node in nodes]
        self._inputs = tuple(inputs)
        self.deliveries = {state.node.name: state.deliveries for state in self._states}
        self.outputs: dict[str, list[tuple[int, int]]] = {name: [] for name in outputs}

    def step(self, feed: Feed) -> None:
        self._send(feed.stream, feed.timestamp, feed.value)
        self._settle()

    def finish(self) -> None:
        for stream in self._inputs:
            self._send_bound(stream, _NEVER)
        self._settle()
        while waiting := [state for state in self._states if not state.closed]:
            stuck = [state for state in waiting if state.waits_for_back_edges_only()]
            self._close((stuck or waiting)[0])
            self._settle()

    def _settle(self) -> None:
        while any([self._advance(state) for state in self._states]):  # noqa: C419 - all are evaluated
            pass

    def _advance(self, state: _State) -> bool:
        if state.closed:
            return False
        try:
            delivery = state.next_delivery()
        except _Close:
            self._close(state)
            return True
        if delivery is not None:
            state.deliveries.append(delivery)
            self._run(state, delivery)
        self._propagate_bounds(state, delivery)
        return delivery is not None

    def _run(self, state: _State, delivery: Delivery) -> None:
        streams = dict(state.node.outputs)
        for port, value, timestamp in sorted(state.node.rule(delivery)):
            self._send(streams[port], timestamp, value)

    def _propagate_bounds(self, state: _State, delivery: Delivery | None) -> None:
        if not state.node.propagates_bounds:
            return
        bound = min(queue.earliest for queue in state.queues.values())
        if delivery is not None:
            bound = max(bound, delivery.timestamp + 1)
        for _, stream in state.node.outputs:
            self._send_bound(stream, bound)

    def _close(self, state: _State) -> None:
        state.closed = True
        for _, stream in state.node.outputs:
            self._send_bound(stream, _NEVER)

    def _send(self, stream: str, timestamp: int, value: int) -> None:
        if stream in self.outputs:
            self.outputs[stream].append((timestamp, value))
        for reader, port in self._readers(stream):
            reader.arrive(port, timestamp, value)

    def _send_bound(self, stream: str, bound: int) -> None:
        for reader, port in self._readers(stream):
            reader.raise_bound(port, bound)

    def _readers(self, stream: str) -> list[tuple[_State, Port]]:
        return [
            (state, port)
            for state in self._states
            if not state.closed
            for port, name in state.node.inputs
            if name == stream
        ]
