"""MergeCalculator: several streams become one; of packets at one timestamp the first input's goes on."""

from __future__ import annotations

from typing import Final

from ovmstrio.runtimes.graphs.calculator import CalculatorKind, ContractError, NodeContext, NodeContract
from ovmstrio.runtimes.graphs.calculators.nodes import Stateless, StatelessKind, check_tags, ports_of
from ovmstrio.runtimes.graphs.config.graph_config import NodeConfig, Port

__all__ = ["MERGE"]

_NAME: Final = "MergeCalculator"
_OUTPUT: Final = Port("", 0)


class _Merge(Stateless):
    async def process(self, context: NodeContext) -> None:
        """Send on the packet of the input with the smallest index that has one.  Never waits."""
        context.emit(_OUTPUT, next(iter(context.inputs.values())))


def _contract(node: NodeConfig) -> NodeContract:
    """Accept inputs without tags and one output without.

    Raises:
        ContractError: the node has other ports.
    """
    check_tags(_NAME, "input", node.inputs, [""])
    if not node.inputs or ports_of(node.outputs) != (_OUTPUT,):
        raise ContractError(f"{_NAME} needs at least one input and exactly one output, without tags")
    return NodeContract(dict.fromkeys(ports_of(node.inputs), object), {_OUTPUT: object}, propagates_bounds=True)


MERGE: Final[CalculatorKind] = StatelessKind(_NAME, _contract, lambda _: lambda _: _Merge())
