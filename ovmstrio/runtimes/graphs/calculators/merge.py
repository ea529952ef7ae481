"""MergeCalculator: several streams become one; of packets at one timestamp the first input's goes on."""

from __future__ import annotations

from typing import Final

from ovmstrio.runtimes.graphs.calculator import CalculatorKind, NodeContext
from ovmstrio.runtimes.graphs.calculators.nodes import Stateless, StatelessKind, joining_contract
from ovmstrio.runtimes.graphs.config.graph_config import Port

__all__ = ["MERGE"]

_NAME: Final = "MergeCalculator"
_OUTPUT: Final = Port("", 0)


class _Merge(Stateless):
    async def process(self, context: NodeContext) -> None:
        """Send on the packet of the input with the smallest index that has one.  Never waits."""
        context.emit(_OUTPUT, next(iter(context.inputs.values())))


MERGE: Final[CalculatorKind] = StatelessKind(
    _NAME, lambda node: joining_contract(_NAME, node, object), lambda _: lambda _: _Merge()
)
