"""PreviousLoopbackCalculator: brings each packet together with what the one before it has led to.

For every packet of ``MAIN`` the packet of ``LOOP`` at the timestamp of the ``MAIN`` packet before goes out on
``PREV_LOOP``, at the timestamp of the new one; where there is none, a bound says so.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Final, NamedTuple

from ovmstrio.runtimes.graphs.calculator import CalculatorKind, ContractError, NodeContext, NodeContract
from ovmstrio.runtimes.graphs.calculators.nodes import Stateless, StatelessKind, ports_of
from ovmstrio.runtimes.graphs.config.graph_config import NodeConfig, Port
from ovmstrio.runtimes.graphs.policies.settled import BEFORE_ALL
from ovmstrio.runtimes.graphs.timestamps import next_allowed

__all__ = ["PREVIOUS_LOOPBACK"]

_NAME: Final = "PreviousLoopbackCalculator"
_MAIN: Final = Port("MAIN", 0)
_LOOP: Final = Port("LOOP", 0)
_PREVIOUS: Final = Port("PREV_LOOP", 0)
_NO_PARTNER: Final = BEFORE_ALL - 1


class _Main(NamedTuple):
    """A timestamp of ``MAIN``, and that of the ``LOOP`` packet that belongs to it."""

    timestamp: int
    partner: int


class _Loop(NamedTuple):
    """What is known of ``LOOP`` at a timestamp: a packet, or that there is none."""

    timestamp: int
    has_packet: bool
    value: Any


class _PreviousLoopback(Stateless):
    """Holds what waits on either side for the other."""

    __slots__ = ("_last_loop", "_last_main", "_last_packet", "_loop", "_main")

    def __init__(self) -> None:
        self._main: deque[_Main] = deque()
        self._loop: deque[_Loop] = deque()
        self._last_main = BEFORE_ALL
        self._last_packet = BEFORE_ALL
        self._last_loop = _NO_PARTNER

    async def process(self, context: NodeContext) -> None:
        """Note what is new on both sides, and send what has found its partner.  Never waits."""
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


def _contract(node: NodeConfig) -> NodeContract:
    """Accept ``MAIN``, ``LOOP`` as a back edge, and ``PREV_LOOP``.

    Raises:
        ContractError: the node has other ports.
    """
    if set(ports_of(node.inputs)) != {_MAIN, _LOOP} or ports_of(node.outputs) != (_PREVIOUS,):
        raise ContractError(
            f"{_NAME} needs the inputs MAIN and LOOP, and the output PREV_LOOP",
            fix='declare LOOP as back edge: input_stream_info { tag_index: "LOOP" back_edge: true }',
        )
    return NodeContract(
        {_MAIN: object, _LOOP: object},
        {_PREVIOUS: object},
        processes_bounds=True,
        policy="ImmediateInputStreamHandler",
    )


PREVIOUS_LOOPBACK: Final[CalculatorKind] = StatelessKind(_NAME, _contract, lambda _: lambda _: _PreviousLoopback())
