"""PassThroughCalculator: every input goes out unchanged where it has the same tag and index."""

from __future__ import annotations

from typing import Final

from ovmstrio.runtimes.graphs.calculator import CalculatorKind, ContractError, NodeContext, NodeContract
from ovmstrio.runtimes.graphs.calculators.nodes import Stateless, StatelessKind, ports_of
from ovmstrio.runtimes.graphs.config.graph_config import NodeConfig, Port

__all__ = ["PASS_THROUGH"]

_NAME: Final = "PassThroughCalculator"


class _PassThrough(Stateless):
    async def process(self, context: NodeContext) -> None:
        """Send on what has come.  Never waits."""
        for port, value in context.inputs.items():
            context.emit(port, value)


def _open(context: NodeContext) -> _PassThrough:
    for port in ports_of(context.node.side_outputs):
        context.emit_side(port, context.side[port])
    return _PassThrough()


def _contract(node: NodeConfig) -> NodeContract:
    """Accept any streams, as long as inputs and outputs have the same tags and indexes.

    Raises:
        ContractError: an input has no output, or an output no input.
    """
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
        lonely = ", ".join(sorted(map(str, inputs ^ outputs)))
        raise ContractError(
            f"{what} to {_NAME} must use matching tags and indexes; without a partner: {lonely}",
            fix="give each output the tag of its input",
        )


PASS_THROUGH: Final[CalculatorKind] = StatelessKind(_NAME, _contract, lambda _: _open)
