"""FlowLimiterCalculator: lets so many packets into a part of the graph at once, and drops what that part cannot take.

``FINISHED`` comes back from the end of that part.  ``ALLOW`` tells from which timestamp on packets are let in (true) or
dropped (false); further inputs pass where the first one was let in.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from typing import Any, Final

from ovmstrio.runtimes.graphs.calculator import CalculatorKind, ContractError, NodeContext, NodeContract
from ovmstrio.runtimes.graphs.calculators.nodes import (
    Stateless,
    StatelessKind,
    check_tags,
    given_options,
    ports_of,
    untagged,
)
from ovmstrio.runtimes.graphs.config.graph_config import NodeConfig, Port
from ovmstrio.runtimes.graphs.packets import Packet
from ovmstrio.runtimes.graphs.policies.settled import BEFORE_ALL
from ovmstrio.runtimes.graphs.timestamps import MAX, next_allowed

__all__ = ["FLOW_LIMITER"]

_NAME: Final = "FlowLimiterCalculator"
_OPTIONS: Final = "mediapipe.FlowLimiterCalculatorOptions"
_FINISHED: Final = Port("FINISHED", 0)
_ALLOW: Final = Port("ALLOW", 0)
_MAX_IN_FLIGHT: Final = Port("MAX_IN_FLIGHT", 0)
_MAIN: Final = Port("", 0)


class _Limiter(Stateless):
    """Holds what waits on each input, the timestamps that are in flight, and since when packets are let in or not."""

    __slots__ = ("_decisions", "_in_flight", "_limit", "_queue_limit", "_tells", "_timeout", "_waiting")

    def __init__(self, options: Any, limit: int, inputs: tuple[Port, ...], *, tells: bool) -> None:
        self._limit = limit
        self._queue_limit = options.max_in_queue
        self._timeout = options.in_flight_timeout
        self._tells = tells
        self._waiting: dict[Port, deque[Packet]] = {port: deque() for port in inputs}
        self._in_flight: deque[int] = deque()
        self._decisions: list[tuple[int, bool]] = [(BEFORE_ALL, True)]

    async def process(self, context: NodeContext) -> None:
        """Let in what has room, and drop what does not.  Never waits."""
        for port, waiting in self._waiting.items():
            if port in context.inputs:
                waiting.append(Packet(context.inputs[port], context.timestamp))
        self._forget_finished(context)
        main = self._waiting[_MAIN]
        while main and len(self._in_flight) < self._limit:
            packet = main.popleft()
            context.emit(_MAIN, packet.value, packet.timestamp)
            self._in_flight.append(packet.timestamp)
            self._decide(context, packet.timestamp, lets_in=True)
        while len(main) > self._queue_limit:
            self._decide(context, main.popleft().timestamp, lets_in=False)
        settled = self._tell_bound(context, _MAIN)
        if self._tells and not main:
            context.advance_bound(_ALLOW, settled)
        for port in self._waiting:
            if port != _MAIN:
                self._release_beside(context, port, settled)
        self._forget_decisions(context)

    def _forget_finished(self, context: NodeContext) -> None:
        flying = self._in_flight
        while flying and flying[0] <= context.settled[_FINISHED]:
            flying.popleft()
        newest = context.settled[_MAIN]
        if self._timeout > 0 and newest == context.timestamp < MAX:
            while flying and newest - flying[0] > self._timeout:
                flying.popleft()

    def _decide(self, context: NodeContext, timestamp: int, *, lets_in: bool) -> None:
        if self._tells:
            context.emit(_ALLOW, lets_in, timestamp)
        self._decisions.append((timestamp, lets_in))

    def _tell_bound(self, context: NodeContext, port: Port) -> int:
        """Pass on how far an input is known and has been dealt with, and give that bound."""
        bound = self._bound(context, port)
        context.advance_bound(port, bound)
        return bound

    def _bound(self, context: NodeContext, port: Port) -> int:
        waiting = self._waiting[port]
        return waiting[0].timestamp if waiting else next_allowed(context.settled[port])

    def _release_beside(self, context: NodeContext, port: Port, settled: int) -> None:
        waiting = self._waiting[port]
        while waiting and waiting[0].timestamp < settled:
            packet = waiting.popleft()
            if self._decisions[self._decision_at(packet.timestamp)][1]:
                context.emit(port, packet.value, packet.timestamp)
        self._tell_bound(context, port)

    def _decision_at(self, timestamp: int) -> int:
        return bisect_right(self._decisions, timestamp, key=lambda decision: decision[0]) - 1

    def _forget_decisions(self, context: NodeContext) -> None:
        oldest = min(self._bound(context, port) for port in self._waiting)
        del self._decisions[: max(0, self._decision_at(oldest))]


def _open(context: NodeContext) -> _Limiter:
    options = given_options(context.node, _OPTIONS)
    limit = context.side.get(_MAX_IN_FLIGHT, options.max_in_flight)
    return _Limiter(options, limit, untagged(context.node.inputs), tells=_ALLOW in ports_of(context.node.outputs))


def _contract(node: NodeConfig) -> NodeContract:
    """Accept inputs without tags with an output for each, ``FINISHED``, and perhaps ``ALLOW`` and ``MAX_IN_FLIGHT``.

    Raises:
        ContractError: the node has other ports, or an input has no output.
    """
    check_tags(_NAME, "input", node.inputs, ["", _FINISHED.tag])
    check_tags(_NAME, "output", node.outputs, ["", _ALLOW.tag])
    check_tags(_NAME, "side packet", node.side_inputs, [_MAX_IN_FLIGHT.tag])
    data = untagged(node.inputs)
    if not data or data != untagged(node.outputs) or _FINISHED not in ports_of(node.inputs):
        raise ContractError(
            f"{_NAME} needs an output for each of its inputs, at least one, and the input FINISHED",
            fix='let FINISHED come from the end of what is limited, as input_stream_info { tag_index: "FINISHED" '
            "back_edge: true }",
        )
    outputs = {port: bool if port == _ALLOW else object for port in ports_of(node.outputs)}
    return NodeContract(
        dict.fromkeys(ports_of(node.inputs), object),
        outputs,
        dict.fromkeys(ports_of(node.side_inputs), int),
        optional_side=frozenset({_MAX_IN_FLIGHT}),
        processes_bounds=True,
        policy="ImmediateInputStreamHandler",
    )


FLOW_LIMITER: Final[CalculatorKind] = StatelessKind(_NAME, _contract, lambda _: _open)
