"""BeginLoopTensorCalculator: the elements of a vector go into the body of a loop, one after the other.

The body has timestamps of its own, which count from 0.  ``EndLoopTensorCalculator`` puts the results together again, at
the timestamp of the vector, which ``BATCH_END`` tells it beside the last element.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ovmstrio.runtimes.graphs.calculator import CalculatorKind, ContractError, NodeContext, NodeContract
from ovmstrio.runtimes.graphs.calculators.nodes import Stateless, StatelessKind, check_tags, ports_of
from ovmstrio.runtimes.graphs.config.graph_config import NodeConfig, Port

__all__ = ["BATCH_END", "BEGIN_LOOP", "ITEM", "ITERABLE", "BatchEnd"]

_NAME: Final = "BeginLoopTensorCalculator"
_CLONE: Final = "CLONE"
_TICK: Final = "TICK"
ITEM: Final = Port("ITEM", 0)
ITERABLE: Final = Port("ITERABLE", 0)
BATCH_END: Final = Port("BATCH_END", 0)


@dataclass(frozen=True, slots=True)
class BatchEnd:
    """The timestamp of the vector whose elements have all been sent."""

    timestamp: int


class _BeginLoop(Stateless):
    """Counts the timestamps of the loop's body."""

    __slots__ = ("_next",)

    def __init__(self) -> None:
        self._next = 0

    async def process(self, context: NodeContext) -> None:
        """Send each element with copies of what is constant in the loop, and tell the end.  Never waits.

        A vector without elements, and a timestamp at which there is none, use up one timestamp of the body.
        """
        clones = [(port, value) for port, value in context.inputs.items() if port.tag == _CLONE]
        for element in context.inputs.get(ITERABLE, ()):
            context.emit(ITEM, element, self._next)
            for port, value in clones:
                context.emit(port, value, self._next)
            self._next += 1
        if not context.inputs.get(ITERABLE):
            self._next += 1
        for ref in context.node.outputs:
            context.advance_bound(ref.port, self._next)
        context.emit(BATCH_END, BatchEnd(context.timestamp), self._next - 1)


def _contract(node: NodeConfig) -> NodeContract:
    """Accept ``ITERABLE``, any ``CLONE`` and perhaps ``TICK``, and give ``ITEM``, ``BATCH_END`` and the clones.

    Raises:
        ContractError: the node has other ports, or a clone has no partner.
    """
    inputs, outputs = set(ports_of(node.inputs)), set(ports_of(node.outputs))
    check_tags(_NAME, "input", node.inputs, [ITERABLE.tag, _CLONE, _TICK])
    check_tags(_NAME, "output", node.outputs, [ITEM.tag, BATCH_END.tag, _CLONE])
    clones = {port for port in inputs if port.tag == _CLONE}
    if ITERABLE not in inputs or outputs != {ITEM, BATCH_END, *clones}:
        raise ContractError(f"{_NAME} needs ITERABLE, ITEM, BATCH_END, and an output CLONE for each input CLONE")
    return NodeContract(
        {port: tuple if port == ITERABLE else object for port in inputs},
        {ITEM: object, BATCH_END: BatchEnd} | dict.fromkeys(clones, object),
        processes_bounds=True,
    )


BEGIN_LOOP: Final[CalculatorKind] = StatelessKind(_NAME, _contract, lambda _: lambda _: _BeginLoop())
