"""DefaultSidePacketCalculator: a side packet that the caller may leave out, with what holds then."""

from __future__ import annotations

from typing import Final

from ovmstrio.runtimes.graphs.calculator import CalculatorKind, ContractError, NodeContext, NodeContract
from ovmstrio.runtimes.graphs.calculators.nodes import Stateless, StatelessKind, ports_of
from ovmstrio.runtimes.graphs.config.graph_config import NodeConfig, Port

__all__ = ["DEFAULT_SIDE_PACKET"]

_NAME: Final = "DefaultSidePacketCalculator"
_OPTIONAL: Final = Port("OPTIONAL_VALUE", 0)
_DEFAULT: Final = Port("DEFAULT_VALUE", 0)
_VALUE: Final = Port("VALUE", 0)


class _Nothing(Stateless):
    async def process(self, context: NodeContext) -> None:
        """Nothing to do: the value is given when the node opens.  Never waits."""


def _open(context: NodeContext) -> _Nothing:
    context.emit_side(_VALUE, context.side.get(_OPTIONAL, context.side[_DEFAULT]))
    return _Nothing()


def _contract(node: NodeConfig) -> NodeContract:
    """Accept the side packets ``DEFAULT_VALUE`` and perhaps ``OPTIONAL_VALUE``, and give ``VALUE``.

    Raises:
        ContractError: the node has other ports.
    """
    side = set(ports_of(node.side_inputs))
    streams = (*node.inputs, *node.outputs)
    if streams or side | {_OPTIONAL} != {_OPTIONAL, _DEFAULT} or ports_of(node.side_outputs) != (_VALUE,):
        raise ContractError(
            f"{_NAME} has the input side packets DEFAULT_VALUE and OPTIONAL_VALUE, the output side packet VALUE, "
            "and no streams"
        )
    anything: dict[Port, type] = dict.fromkeys(side, object)
    return NodeContract(side_inputs=anything, side_outputs={_VALUE: object}, optional_side=frozenset({_OPTIONAL}))


DEFAULT_SIDE_PACKET: Final[CalculatorKind] = StatelessKind(_NAME, _contract, lambda _: _open)
