"""EndLoopTensorCalculator: what the body of a loop has made becomes a vector, at the timestamp where the loop began."""

from __future__ import annotations

from typing import Any, Final

from ovmstrio.runtimes.graphs.calculator import CalculatorKind, ContractError, NodeContext, NodeContract
from ovmstrio.runtimes.graphs.calculators.begin_loop import BATCH_END, ITEM, ITERABLE, BatchEnd
from ovmstrio.runtimes.graphs.calculators.nodes import Stateless, StatelessKind, ports_of
from ovmstrio.runtimes.graphs.config.graph_config import NodeConfig
from ovmstrio.runtimes.graphs.timestamps import next_allowed

__all__ = ["END_LOOP"]

_NAME: Final = "EndLoopTensorCalculator"


class _EndLoop(Stateless):
    """Holds the elements that have come since the last end."""

    __slots__ = ("_elements",)

    def __init__(self) -> None:
        self._elements: list[Any] = []

    async def process(self, context: NodeContext) -> None:
        """Collect an element, and send the vector at the end; where there is none, say so by a bound.  Never waits."""
        if ITEM in context.inputs:
            self._elements.append(context.inputs[ITEM])
        end = context.inputs.get(BATCH_END)
        if end is None:
            return
        if self._elements:
            context.emit(ITERABLE, tuple(self._elements), end.timestamp)
            self._elements = []
        else:
            context.advance_bound(ITERABLE, next_allowed(end.timestamp))


def _contract(node: NodeConfig) -> NodeContract:
    """Accept ``ITEM`` and ``BATCH_END``, and give ``ITERABLE``.

    Raises:
        ContractError: the node has other ports.
    """
    if set(ports_of(node.inputs)) != {ITEM, BATCH_END} or ports_of(node.outputs) != (ITERABLE,):
        raise ContractError(f"{_NAME} needs the inputs ITEM and BATCH_END, and the output ITERABLE")
    return NodeContract({ITEM: object, BATCH_END: BatchEnd}, {ITERABLE: tuple})


END_LOOP: Final[CalculatorKind] = StatelessKind(_NAME, _contract, lambda _: lambda _: _EndLoop())
