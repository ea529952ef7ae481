"""MediaPipe's flow-control calculators: limiter, gate, merge, mux, pass-through, cloner and resampler."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from typing import Any, Final

from ovmstrio.graphs.calculator import CalculatorKind, ContractError, NodeContext, NodeContract, NodeFailure
from ovmstrio.graphs.calculators.nodes import (
    CalculatorBase,
    StatelessKind,
    check_tags,
    joining_contract,
    options_or_defaults,
    ports_of,
    required_input,
    untagged_ports,
)
from ovmstrio.graphs.graph_config import NodeConfig, Port, StreamRef
from ovmstrio.graphs.packets import MAX, MIN, Packet, next_allowed
from ovmstrio.graphs.policies import BEFORE_ALL

# FlowLimiterCalculator

_FLOW_LIMITER_NAME: Final = "FlowLimiterCalculator"
_FLOW_LIMITER_OPTIONS: Final = "mediapipe.FlowLimiterCalculatorOptions"
_FINISHED: Final = Port("FINISHED", 0)
_ALLOW: Final = Port("ALLOW", 0)
_MAX_IN_FLIGHT: Final = Port("MAX_IN_FLIGHT", 0)
_MAIN: Final = Port("", 0)


class _Limiter(CalculatorBase):
    """Limits the packets in flight between this node and ``FINISHED``; drops packets above the queue limit.

    ``ALLOW`` reports from which timestamp on packets are admitted or dropped; further inputs follow that decision.
    """

    __slots__ = ("_decisions", "_in_flight", "_limit", "_queue_limit", "_reports_decisions", "_timeout", "_waiting")

    def __init__(self, options: Any, limit: int, inputs: tuple[Port, ...], *, reports_decisions: bool) -> None:
        self._limit = limit
        self._queue_limit = options.max_in_queue
        self._timeout = options.in_flight_timeout
        self._reports_decisions = reports_decisions
        self._waiting: dict[Port, deque[Packet]] = {port: deque() for port in inputs}
        self._in_flight: deque[int] = deque()
        self._decisions: list[tuple[int, bool]] = [(BEFORE_ALL, True)]

    async def process(self, context: NodeContext) -> None:
        for port, waiting in self._waiting.items():
            if port in context.inputs:
                waiting.append(Packet(context.inputs[port], context.timestamp))
        self._drop_finished(context)
        main = self._waiting[_MAIN]
        while main and len(self._in_flight) < self._limit:
            packet = main.popleft()
            context.emit(_MAIN, packet.value, packet.timestamp)
            self._in_flight.append(packet.timestamp)
            self._record_decision(context, packet.timestamp, is_admitted=True)
        while len(main) > self._queue_limit:
            self._record_decision(context, main.popleft().timestamp, is_admitted=False)
        settled = self._advance_output(context, _MAIN)
        if self._reports_decisions and not main:
            context.advance_bound(_ALLOW, settled)
        for port in self._waiting:
            if port != _MAIN:
                self._release_secondary(context, port, settled)
        oldest = min(self._bound(context, port) for port in self._waiting)
        del self._decisions[: max(0, self._decision_at(oldest))]

    def _drop_finished(self, context: NodeContext) -> None:
        flying = self._in_flight
        while flying and flying[0] <= context.settled[_FINISHED]:
            flying.popleft()
        newest = context.settled[_MAIN]
        if self._timeout > 0 and newest == context.timestamp < MAX:
            while flying and newest - flying[0] > self._timeout:
                flying.popleft()

    def _record_decision(self, context: NodeContext, timestamp: int, *, is_admitted: bool) -> None:
        if self._reports_decisions:
            context.emit(_ALLOW, is_admitted, timestamp)
        self._decisions.append((timestamp, is_admitted))

    def _advance_output(self, context: NodeContext, port: Port) -> int:
        bound = self._bound(context, port)
        context.advance_bound(port, bound)
        return bound

    def _bound(self, context: NodeContext, port: Port) -> int:
        waiting = self._waiting[port]
        return waiting[0].timestamp if waiting else next_allowed(context.settled[port])

    def _release_secondary(self, context: NodeContext, port: Port, settled: int) -> None:
        waiting = self._waiting[port]
        while waiting and waiting[0].timestamp < settled:
            packet = waiting.popleft()
            if self._decisions[self._decision_at(packet.timestamp)][1]:
                context.emit(port, packet.value, packet.timestamp)
        self._advance_output(context, port)

    def _decision_at(self, timestamp: int) -> int:
        return bisect_right(self._decisions, timestamp, key=lambda decision: decision[0]) - 1


def _open_flow_limiter(context: NodeContext) -> _Limiter:
    options = options_or_defaults(context.node, _FLOW_LIMITER_OPTIONS)
    limit = context.side.get(_MAX_IN_FLIGHT, options.max_in_flight)
    return _Limiter(
        options, limit, untagged_ports(context.node.inputs), reports_decisions=_ALLOW in ports_of(context.node.outputs)
    )


def _flow_limiter_contract(node: NodeConfig) -> NodeContract:
    check_tags(_FLOW_LIMITER_NAME, "input", node.inputs, ["", _FINISHED.tag])
    check_tags(_FLOW_LIMITER_NAME, "output", node.outputs, ["", _ALLOW.tag])
    check_tags(_FLOW_LIMITER_NAME, "side packet", node.side_inputs, [_MAX_IN_FLIGHT.tag])
    data = untagged_ports(node.inputs)
    if not data or data != untagged_ports(node.outputs) or _FINISHED not in ports_of(node.inputs):
        raise ContractError(
            f"{_FLOW_LIMITER_NAME} needs an output for each input, at least one, and the input FINISHED",
            fix='connect FINISHED to the last node that is limited, with input_stream_info { tag_index: "FINISHED" '
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


FLOW_LIMITER: Final[CalculatorKind] = StatelessKind(
    _FLOW_LIMITER_NAME, _flow_limiter_contract, lambda _: _open_flow_limiter
)


# GateCalculator

_GATE_NAME: Final = "GateCalculator"
_GATE_OPTIONS: Final = "mediapipe.GateCalculatorOptions"
_DISALLOW: Final = Port("DISALLOW", 0)
_CONTROLS: Final = frozenset({_ALLOW, _DISALLOW})
_STATE_CHANGE: Final = Port("STATE_CHANGE", 0)
_UNINITIALIZED, _OPEN, _SHUT = 1, 2, 3


class _Gate(CalculatorBase):
    """Forwards or drops packets depending on a stream, a side packet or an option.

    Args:
        fixed: whether the gate is open during the run; None if a control stream decides.
        default: whether the gate is open at timestamps without a control packet.
        reports_changes: whether there is a ``STATE_CHANGE`` output.
        state: the initial ``GateCalculatorOptions.GateState``.
        ends: outputs that close with the first run, because the gate never opens.
    """

    __slots__ = ("_default", "_ends", "_fixed", "_reports_changes", "_state")

    def __init__(
        self, *, fixed: bool | None, default: bool, reports_changes: bool, state: int, ends: tuple[Port, ...] = ()
    ) -> None:
        self._fixed = fixed
        self._default = default
        self._reports_changes = reports_changes
        self._state = state
        self._ends = ends

    async def process(self, context: NodeContext) -> None:
        is_open = _control_value(context.inputs) if self._fixed is None else self._fixed
        if is_open is None:
            is_open = self._default
        state = _OPEN if is_open else _SHUT
        if self._reports_changes and self._state not in {_UNINITIALIZED, state}:
            context.emit(_STATE_CHANGE, is_open)
        self._state = state
        if is_open:
            for port, value in context.inputs.items():
                if port not in _CONTROLS:
                    context.emit(port, value)
        for port in self._ends:
            context.close_output(port)


def _control_value(values: Any) -> bool | None:
    if _ALLOW in values:
        return bool(values[_ALLOW])
    return not values[_DISALLOW] if _DISALLOW in values else None


def _open_gate(context: NodeContext) -> _Gate:
    options = options_or_defaults(context.node, _GATE_OPTIONS)
    by_side_packet = _control_value(context.side)
    fixed = by_side_packet
    if fixed is None and not _CONTROLS & set(ports_of(context.node.inputs)):
        fixed = options.allow
    outputs = ports_of(context.node.outputs)
    return _Gate(
        fixed=fixed,
        default=options.empty_packets_as_allow,
        reports_changes=_STATE_CHANGE in outputs,
        state=options.initial_gate_state,
        ends=tuple(port for port in outputs if port != _STATE_CHANGE) if by_side_packet is False else (),
    )


def _gate_contract(node: NodeConfig) -> NodeContract:
    _check_control(node)
    data = {port for port in ports_of(node.inputs) if port not in _CONTROLS}
    results = {port for port in ports_of(node.outputs) if port != _STATE_CHANGE}
    unmatched = data ^ results
    if unmatched:
        raise ContractError(
            f"{_GATE_NAME} needs an output for each data stream; unmatched: {', '.join(sorted(map(str, unmatched)))}",
            fix="give each output the tag of its input",
        )
    return NodeContract(
        _types(node.inputs),
        _types(node.outputs),
        _types(node.side_inputs),
        optional_side=_CONTROLS,
        propagates_bounds=True,
    )


def _types(refs: tuple[StreamRef, ...]) -> dict[Port, type]:
    return {ref.port: bool if ref.port in {*_CONTROLS, _STATE_CHANGE} else object for ref in refs}


def _check_control(node: NodeConfig) -> None:
    unknown = sorted(map(str, set(ports_of(node.side_inputs)) - _CONTROLS))
    if unknown or node.side_outputs:
        raise ContractError(f"{_GATE_NAME} has only the side packets ALLOW or DISALLOW, got: {', '.join(unknown)}")
    controls = [ref.port for ref in (*node.inputs, *node.side_inputs) if ref.port in _CONTROLS]
    if len(controls) > 1:
        raise ContractError(
            f"{_GATE_NAME} has one control, not {len(controls)}",
            fix="use one input stream or side packet ALLOW or DISALLOW, or the option allow",
        )


GATE: Final[CalculatorKind] = StatelessKind(_GATE_NAME, _gate_contract, lambda _: _open_gate)


# MergeCalculator

_MERGE_NAME: Final = "MergeCalculator"
_OUTPUT: Final = Port("", 0)


class _Merge(CalculatorBase):
    async def process(self, context: NodeContext) -> None:
        context.emit(_OUTPUT, next(iter(context.inputs.values())))


MERGE: Final[CalculatorKind] = StatelessKind(
    _MERGE_NAME, lambda node: joining_contract(_MERGE_NAME, node, object), lambda _: lambda _: _Merge()
)


# MuxCalculator

_MUX_NAME: Final = "MuxCalculator"
_SELECT: Final = Port("SELECT", 0)
_MUX_OUTPUT: Final = Port("OUTPUT", 0)
_INPUT: Final = "INPUT"


class _Mux(CalculatorBase):
    async def process(self, context: NodeContext) -> None:
        selected = context.side[_SELECT] if _SELECT in context.side else required_input(context, _SELECT)
        port = Port(_INPUT, selected)
        if port not in ports_of(context.node.inputs):
            raise NodeFailure(f"SELECT is {selected}, but there is no input {port}")
        if port in context.inputs:
            context.emit(_MUX_OUTPUT, context.inputs[port])


def _mux_contract(node: NodeConfig) -> NodeContract:
    inputs, side = set(ports_of(node.inputs)), set(ports_of(node.side_inputs))
    data = {port for port in inputs if port.tag == _INPUT}
    controls = [port for port in (*inputs, *side) if port == _SELECT]
    if not data or len(controls) != 1 or (inputs | side) != {*data, _SELECT}:
        raise ContractError(
            f"{_MUX_NAME} needs inputs INPUT:0, INPUT:1, ... and one SELECT, as input stream or side packet"
        )
    if set(ports_of(node.outputs)) != {_MUX_OUTPUT} or node.side_outputs:
        raise ContractError(f"{_MUX_NAME} has exactly one output, OUTPUT")
    types: dict[Port, type] = {port: int if port == _SELECT else object for port in inputs}
    return NodeContract(types, {_MUX_OUTPUT: object}, dict.fromkeys(side, int), propagates_bounds=True)


MUX: Final[CalculatorKind] = StatelessKind(_MUX_NAME, _mux_contract, lambda _: lambda _: _Mux())


# PassThroughCalculator

_FORWARDING_NAME: Final = "PassThroughCalculator"


class _PassThrough(CalculatorBase):
    async def process(self, context: NodeContext) -> None:
        for port, value in context.inputs.items():
            context.emit(port, value)


def _open_pass_through(context: NodeContext) -> _PassThrough:
    for port in ports_of(context.node.side_outputs):
        context.emit_side(port, context.side[port])
    return _PassThrough()


def _pass_through_contract(node: NodeConfig) -> NodeContract:
    inputs, outputs = frozenset(ports_of(node.inputs)), frozenset(ports_of(node.outputs))
    _check_same("Input and output streams", inputs, outputs)
    sides = frozenset(ports_of(node.side_outputs))
    if sides:
        _check_same("Input and output side packets", frozenset(ports_of(node.side_inputs)), sides)
    anything: dict[Port, type] = dict.fromkeys(inputs, object)
    side: dict[Port, type] = dict.fromkeys(ports_of(node.side_inputs), object)
    return NodeContract(anything, anything, side, dict.fromkeys(sides, object), propagates_bounds=True)


def _check_same(what: str, inputs: frozenset[Port], outputs: frozenset[Port]) -> None:
    if inputs != outputs:
        unmatched = ", ".join(sorted(map(str, inputs ^ outputs)))
        raise ContractError(
            f"{what} to {_FORWARDING_NAME} must use matching tags and indexes; unmatched: {unmatched}",
            fix="give each output the tag of its input",
        )


PASS_THROUGH: Final[CalculatorKind] = StatelessKind(
    _FORWARDING_NAME, _pass_through_contract, lambda _: _open_pass_through
)


# PacketClonerCalculator

_PACKET_CLONER_NAME: Final = "PacketClonerCalculator"
_PACKET_CLONER_OPTIONS: Final = "mediapipe.PacketClonerCalculatorOptions"
_TICK: Final = Port("TICK", 0)


class _Cloner(CalculatorBase):
    """Repeats the newest packet of each input at every tick.

    Args:
        cloned: the ports that are repeated.
        tick: the input that triggers a repetition.
        waits: send nothing before each input has had a packet.
        sends_bounds: send timestamp bounds before each input has had a packet.
    """

    __slots__ = ("_cloned", "_newest", "_sends_bounds", "_tick", "_waits")

    def __init__(self, cloned: tuple[Port, ...], tick: Port, *, waits: bool, sends_bounds: bool) -> None:
        self._cloned = cloned
        self._tick = tick
        self._waits = waits
        self._sends_bounds = sends_bounds
        self._newest: dict[Port, Any] = {}

    async def process(self, context: NodeContext) -> None:
        self._newest.update((port, context.inputs[port]) for port in self._cloned if port in context.inputs)
        is_complete = len(self._newest) == len(self._cloned)
        if self._tick in context.inputs and (is_complete or not self._waits):
            for port, value in self._newest.items():
                context.emit(port, value)
        if is_complete or self._sends_bounds or not self._waits:
            for port in self._cloned:
                context.advance_bound(port, next_allowed(context.timestamp))


def _ports(node: NodeConfig) -> tuple[tuple[Port, ...], Port]:
    found = untagged_ports(node.inputs)
    return (found, _TICK) if _TICK in ports_of(node.inputs) else (found[:-1], found[-1])


def _open_packet_cloner(context: NodeContext) -> _Cloner:
    options = options_or_defaults(context.node, _PACKET_CLONER_OPTIONS)
    sends_bounds = options.output_packets_only_when_all_inputs_received
    cloned, tick = _ports(context.node)
    return _Cloner(
        cloned,
        tick,
        waits=options.output_only_when_all_inputs_received or sends_bounds,
        sends_bounds=sends_bounds,
    )


def _packet_cloner_contract(node: NodeConfig) -> NodeContract:
    check_tags(_PACKET_CLONER_NAME, "input", node.inputs, ["", _TICK.tag])
    if not node.inputs or set(ports_of(node.outputs)) != set(_ports(node)[0]) or not node.outputs:
        raise ContractError(
            f"{_PACKET_CLONER_NAME} needs an output for each input except the tick, all without tags",
            fix="tag the tick as TICK, or make it the last input",
        )
    anything: dict[Port, type] = dict.fromkeys(ports_of(node.inputs), object)
    return NodeContract(anything, dict.fromkeys(ports_of(node.outputs), object), processes_bounds=True)


PACKET_CLONER: Final[CalculatorKind] = StatelessKind(
    _PACKET_CLONER_NAME, _packet_cloner_contract, lambda _: _open_packet_cloner
)


# PacketResamplerCalculator

_PACKET_RESAMPLER_NAME: Final = "PacketResamplerCalculator"
_PACKET_RESAMPLER_OPTIONS: Final = "mediapipe.PacketResamplerCalculatorOptions"
_DATA: Final = (Port("", 0), Port("DATA", 0))
_SECOND: Final = 1_000_000
_MAX_GAP_PERIODS: Final = 100_000
"""Limit of periods filled at once; a larger gap is a wrong timestamp and would fill the memory."""


class _Resampler:
    """Converts a stream to a fixed rate (packets per second) by dropping and repeating packets."""

    __slots__ = ("_end", "_first", "_flushes", "_input", "_last", "_output", "_period", "_rate", "_start")

    def __init__(self, options: Any, data: Port, output: Port) -> None:
        self._rate = _rate(options)
        margin = int(_SECOND / self._rate) // 2 if options.round_limits else 0
        self._start = (options.start_time if options.HasField("start_time") else MIN) - margin
        self._end = (options.end_time if options.HasField("end_time") else MAX) + margin
        self._flushes = options.flush_last_packet
        self._first: int | None = None
        self._input, self._output = data, output
        self._last: Packet | None = None
        self._period = 0

    async def process(self, context: NodeContext) -> None:
        now, value = context.timestamp, context.inputs[self._input]
        if self._first is None:
            self._first = self._aligned(context)
        period = self._period_of(now)
        if period - self._period > _MAX_GAP_PERIODS:
            raise NodeFailure(
                f"gap of {period - self._period} periods before the packet at {now}; at most {_MAX_GAP_PERIODS} can be "
                "filled",
                "INVALID_ARGUMENT",
            )
        if period >= self._period:
            while self._last is not None and self._period < period:
                self._send(context, self._last.value)
                self._period += 1
            self._choose(context, Packet(value, now))
            context.advance_bound(self._output, self._time_of(self._period))
        self._last = Packet(value, now)

    async def close(self, context: NodeContext) -> None:
        last = self._last
        if self._flushes and last is not None and self._period_of(last.timestamp) == self._period:
            self._send(context, last.value)

    def _aligned(self, context: NodeContext) -> int:
        options, now = options_or_defaults(context.node, _PACKET_RESAMPLER_OPTIONS), context.timestamp
        if not options.HasField("base_timestamp"):
            return now
        base: int = options.base_timestamp
        return base + _round(_round((now - base) / _SECOND * self._rate) / self._rate * _SECOND)

    def _choose(self, context: NodeContext, packet: Packet) -> None:
        """Send the packet closest to the period's timestamp, once a packet at or after it has arrived."""
        target = self._time_of(self._period)
        if packet.timestamp < target:
            return
        last = self._last
        is_closer = last is None or packet.timestamp - target <= target - last.timestamp
        self._send(context, packet.value if last is None or is_closer else last.value)
        self._period += 1

    def _send(self, context: NodeContext, value: Any) -> None:
        timestamp = self._time_of(self._period)
        if self._start <= timestamp < self._end:
            context.emit(self._output, value, timestamp)

    def _time_of(self, period: int) -> int:
        return (self._first or 0) + _round(period / self._rate * _SECOND)

    def _period_of(self, timestamp: int) -> int:
        return _round((timestamp - (self._first or 0)) / _SECOND * self._rate)


def _round(number: float) -> int:
    """Round to the nearest integer, halves away from 0."""
    return int(math.copysign(math.floor(abs(number) + 0.5), number))


def _rate(options: Any) -> float:
    rate: float = options.frame_rate
    return min(rate, options.max_frame_rate) if options.max_frame_rate > 0 else rate


def _packet_resampler_contract(node: NodeConfig) -> NodeContract:
    options = options_or_defaults(node, _PACKET_RESAMPLER_OPTIONS)
    if len(node.inputs) != 1 or len(node.outputs) != 1 or {*ports_of(node.inputs + node.outputs)} - {*_DATA}:
        raise ContractError(f"{_PACKET_RESAMPLER_NAME} needs one input and one output, tagged DATA or without a tag")
    if not 0 < _rate(options) <= _SECOND:
        raise ContractError(
            f"{_PACKET_RESAMPLER_NAME} needs a frame_rate above 0 and at most {_SECOND}, not {_rate(options):g}",
            fix="set frame_rate, in packets per second",
        )
    unsupported = ("jitter", "jitter_with_reflection", "reproducible_sampling", "use_input_frame_rate", "output_header")
    given = [name for name in unsupported if getattr(options, name)]
    if given:
        raise ContractError(
            f"{_PACKET_RESAMPLER_NAME}: not supported: {', '.join(given)}", fix="remove it", code="UNIMPLEMENTED"
        )
    return NodeContract({node.inputs[0].port: object}, {node.outputs[0].port: object})


def _open_packet_resampler(context: NodeContext) -> _Resampler:
    node = context.node
    return _Resampler(options_or_defaults(node, _PACKET_RESAMPLER_OPTIONS), node.inputs[0].port, node.outputs[0].port)


PACKET_RESAMPLER: Final[CalculatorKind] = StatelessKind(
    _PACKET_RESAMPLER_NAME, _packet_resampler_contract, lambda _: _open_packet_resampler
)
