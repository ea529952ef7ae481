"""PacketResamplerCalculator: makes a stream of a fixed rate, by leaving out and repeating packets.

Periods are counted from the first packet, or aligned to ``base_timestamp``.  The packet of a period is the one that is
closest to its timestamp, and where there is none, a copy of the last one before.
"""

from __future__ import annotations

import math
from typing import Any, Final

from ovmstrio.runtimes.graphs.calculator import CalculatorKind, ContractError, NodeContext, NodeContract, NodeFailure
from ovmstrio.runtimes.graphs.calculators.nodes import StatelessKind, given_options, ports_of
from ovmstrio.runtimes.graphs.config.graph_config import NodeConfig, Port
from ovmstrio.runtimes.graphs.packets import Packet
from ovmstrio.runtimes.graphs.timestamps import MAX, MIN

__all__ = ["PACKET_RESAMPLER"]

_NAME: Final = "PacketResamplerCalculator"
_OPTIONS: Final = "mediapipe.PacketResamplerCalculatorOptions"
_DATA: Final = (Port("", 0), Port("DATA", 0))
_SECOND: Final = 1_000_000
_MOST_PERIODS: Final = 100_000
"""How many empty periods one packet may end; more is a mistake in its timestamp, and would fill the memory."""


class _Resampler:
    """Counts periods; ``rate`` is in packets a second."""

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
        """Send what the packet settles.  Never waits.

        Raises:
            NodeFailure: the packet is later than the one before by more periods than can be filled.
        """
        now, value = context.timestamp, context.inputs[self._input]
        if self._first is None:
            self._first = self._aligned(context)
        period = self._period_of(now)
        if period - self._period > _MOST_PERIODS:
            raise NodeFailure(
                f"the packet at {now} comes {period - self._period} periods after the one before, and at most "
                f"{_MOST_PERIODS} can be filled",
                "INVALID_ARGUMENT",
            )
        if period >= self._period:
            self._fill(context, period)
            self._choose(context, Packet(value, now))
            context.advance_bound(self._output, self._time_of(self._period))
        self._last = Packet(value, now)

    async def close(self, context: NodeContext) -> None:
        """Send the last packet, if nothing has been sent for its period.  Never waits."""
        last = self._last
        if self._flushes and last is not None and self._period_of(last.timestamp) == self._period:
            self._send(context, last.value)

    def _aligned(self, context: NodeContext) -> int:
        options, now = given_options(context.node, _OPTIONS), context.timestamp
        if not options.HasField("base_timestamp"):
            return now
        base: int = options.base_timestamp
        return base + _round(_round((now - base) / _SECOND * self._rate) / self._rate * _SECOND)

    def _fill(self, context: NodeContext, period: int) -> None:
        while self._last is not None and self._period < period:
            self._send(context, self._last.value)
            self._period += 1

    def _choose(self, context: NodeContext, packet: Packet) -> None:
        """Send for the period what is closest to its timestamp, once that has come."""
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
    """Round to the nearest, halves away from 0."""
    return int(math.copysign(math.floor(abs(number) + 0.5), number))


def _rate(options: Any) -> float:
    rate: float = options.frame_rate
    return min(rate, options.max_frame_rate) if options.max_frame_rate > 0 else rate


def _contract(node: NodeConfig) -> NodeContract:
    """Accept one stream, tagged ``DATA`` or without a tag, and one of these as output.

    Raises:
        ContractError: the node has other ports, no rate, or options for video headers or random sampling.
    """
    options = given_options(node, _OPTIONS)
    if len(node.inputs) != 1 or len(node.outputs) != 1 or {*ports_of(node.inputs + node.outputs)} - {*_DATA}:
        raise ContractError(f"{_NAME} needs one input and one output, tagged DATA or without a tag")
    if not 0 < _rate(options) <= _SECOND:
        raise ContractError(
            f"{_NAME} needs a frame_rate above 0 and at most {_SECOND}, not {_rate(options):g}",
            fix="set frame_rate, in packets a second",
        )
    refused = ("jitter", "jitter_with_reflection", "reproducible_sampling", "use_input_frame_rate", "output_header")
    given = [name for name in refused if getattr(options, name)]
    if given:
        raise ContractError(f"{_NAME}: not supported here: {', '.join(given)}", fix="remove it", code="UNIMPLEMENTED")
    return NodeContract({node.inputs[0].port: object}, {node.outputs[0].port: object})


def _open(context: NodeContext) -> _Resampler:
    node = context.node
    return _Resampler(given_options(node, _OPTIONS), node.inputs[0].port, node.outputs[0].port)


PACKET_RESAMPLER: Final[CalculatorKind] = StatelessKind(_NAME, _contract, lambda _: _open)
