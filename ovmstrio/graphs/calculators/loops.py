"""MediaPipe's loop calculators: begin loop, end loop and previous loopback.

A loop body has separate timestamps that count from 0. ``BATCH_END`` carries the timestamp of the vector to
``EndLoopTensorCalculator``, which restores it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from ovmstrio.graphs.calculator import CalculatorKind, ContractError, NodeContext, NodeContract
from ovmstrio.graphs.calculators.nodes import CalculatorBase, StatelessKind, check_tags, ports_of
from ovmstrio.graphs.graph_config import NodeConfig, Port
from ovmstrio.graphs.packets import next_allowed
from ovmstrio.graphs.policies import BEFORE_ALL

# BeginLoopTensorCalculator: sends the elements of a vector one by one

_BEGIN_LOOP_NAME: Final = "BeginLoopTensorCalculator"
_CLONE: Final = "CLONE"
_TICK: Final = "TICK"
_ITEM: Final = Port("ITEM", 0)
_ITERABLE: Final = Port("ITERABLE", 0)
_BATCH_END: Final = Port("BATCH_END", 0)


@dataclass(frozen=True, slots=True)
class BatchEnd:
    """Timestamp of a vector whose elements have all been sent."""

    timestamp: int


class _BeginLoop(CalculatorBase):
    __slots__ = ("_next",)

    def __init__(self) -> None:
        self._next = 0

    async def process(self, context: NodeContext) -> None:
        clones = [(port, value) for port, value in context.inputs.items() if port.tag == _CLONE]
        for element in context.inputs.get(_ITERABLE, ()):
            context.emit(_ITEM, element, self._next)
            for port, value in clones:
                context.emit(port, value, self._next)
            self._next += 1
        if not context.inputs.get(_ITERABLE):
            # An empty or absent vector also uses one timestamp of the body.
            self._next += 1
        for ref in context.node.outputs:
            context.advance_bound(ref.port, self._next)
        context.emit(_BATCH_END, BatchEnd(context.timestamp), self._next - 1)


def _begin_loop_contract(node: NodeConfig) -> NodeContract:
    inputs, outputs = set(ports_of(node.inputs)), set(ports_of(node.outputs))
    check_tags(_BEGIN_LOOP_NAME, "input", node.inputs, [_ITERABLE.tag, _CLONE, _TICK])
    check_tags(_BEGIN_LOOP_NAME, "output", node.outputs, [_ITEM.tag, _BATCH_END.tag, _CLONE])
    clones = {port for port in inputs if port.tag == _CLONE}
    if _ITERABLE not in inputs or outputs != {_ITEM, _BATCH_END, *clones}:
        raise ContractError(
            f"{_BEGIN_LOOP_NAME} needs ITERABLE, ITEM, BATCH_END, and an output CLONE for each input CLONE"
        )
    return NodeContract(
        {port: tuple if port == _ITERABLE else object for port in inputs},
        {_ITEM: object, _BATCH_END: BatchEnd} | dict.fromkeys(clones, object),
        processes_bounds=True,
    )


BEGIN_LOOP: Final[CalculatorKind] = StatelessKind(
    _BEGIN_LOOP_NAME, _begin_loop_contract, lambda _: lambda _: _BeginLoop()
)


# EndLoopTensorCalculator: collects results into a vector

_END_LOOP_NAME: Final = "EndLoopTensorCalculator"


class _EndLoop(CalculatorBase):
    __slots__ = ("_elements",)

    def __init__(self) -> None:
        self._elements: list[Any] = []

    async def process(self, context: NodeContext) -> None:
        if _ITEM in context.inputs:
            self._elements.append(context.inputs[_ITEM])
        end = context.inputs.get(_BATCH_END)
        if end is None:
            return
        if self._elements:
            context.emit(_ITERABLE, tuple(self._elements), end.timestamp)
            self._elements = []
        else:
            context.advance_bound(_ITERABLE, next_allowed(end.timestamp))


def _end_loop_contract(node: NodeConfig) -> NodeContract:
    if set(ports_of(node.inputs)) != {_ITEM, _BATCH_END} or ports_of(node.outputs) != (_ITERABLE,):
        raise ContractError(f"{_END_LOOP_NAME} needs the inputs ITEM and BATCH_END, and the output ITERABLE")
    return NodeContract({_ITEM: object, _BATCH_END: BatchEnd}, {_ITERABLE: tuple})


END_LOOP: Final[CalculatorKind] = StatelessKind(_END_LOOP_NAME, _end_loop_contract, lambda _: lambda _: _EndLoop())


# PreviousLoopbackCalculator: pairs each packet with the loop's previous result

_PREVIOUS_LOOPBACK_NAME: Final = "PreviousLoopbackCalculator"
_MAIN: Final = Port("MAIN", 0)
_LOOP: Final = Port("LOOP", 0)
_PREVIOUS: Final = Port("PREV_LOOP", 0)
_NO_PARTNER: Final = BEFORE_ALL - 1


class _Main(NamedTuple):
    """A timestamp of ``MAIN``, and the timestamp of its ``LOOP`` packet."""

    timestamp: int
    partner: int


class _Loop(NamedTuple):
    """A settled timestamp of ``LOOP``, with or without a packet."""

    timestamp: int
    has_packet: bool
    value: Any


class _PreviousLoopback(CalculatorBase):
    __slots__ = ("_last_loop", "_last_main", "_last_packet", "_loop", "_main")

    def __init__(self) -> None:
        self._main: deque[_Main] = deque()
        self._loop: deque[_Loop] = deque()
        self._last_main = BEFORE_ALL
        self._last_packet = BEFORE_ALL
        self._last_loop = _NO_PARTNER

    async def process(self, context: NodeContext) -> None:
        self._note_main(context)
        self._note_loop(context)
        while self._main and self._loop:
            main, loop = self._main[0], self._loop[0]
            if main.partner <= loop.timestamp:
                self._main.popleft()
                if main.partner == loop.timestamp and loop.has_packet:
                    context.emit(_PREVIOUS, loop.value, main.timestamp)
                context.advance_bound(_PREVIOUS, next_allowed(main.timestamp))
            if main.partner >= loop.timestamp:
                self._loop.popleft()

    def _note_main(self, context: NodeContext) -> None:
        now = context.settled[_MAIN]
        if now <= self._last_main:
            return
        partner = _NO_PARTNER
        if _MAIN in context.inputs:
            partner, self._last_packet = self._last_packet, now
        self._main.append(_Main(now, partner))
        self._last_main = now

    def _note_loop(self, context: NodeContext) -> None:
        now = context.settled[_LOOP]
        if now > self._last_loop:
            self._loop.append(_Loop(now, _LOOP in context.inputs, context.inputs.get(_LOOP)))
            self._last_loop = now


def _previous_loopback_contract(node: NodeConfig) -> NodeContract:
    if set(ports_of(node.inputs)) != {_MAIN, _LOOP} or ports_of(node.outputs) != (_PREVIOUS,):
        raise ContractError(
            f"{_PREVIOUS_LOOPBACK_NAME} needs the inputs MAIN and LOOP, and the output PREV_LOOP",
            fix='declare LOOP as back edge: input_stream_info { tag_index: "LOOP" back_edge: true }',
        )
    return NodeContract(
        {_MAIN: object, _LOOP: object},
        {_PREVIOUS: object},
        processes_bounds=True,
        policy="ImmediateInputStreamHandler",
    )


PREVIOUS_LOOPBACK: Final[CalculatorKind] = StatelessKind(
    _PREVIOUS_LOOPBACK_NAME, _previous_loopback_contract, lambda _: lambda _: _PreviousLoopback()
)
