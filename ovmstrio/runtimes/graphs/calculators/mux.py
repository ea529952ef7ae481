"""MuxCalculator: sends on one of several inputs, the one whose index ``SELECT`` gives."""

from __future__ import annotations

from typing import Final

from ovmstrio.runtimes.graphs.calculator import CalculatorKind, ContractError, NodeContext, NodeContract, NodeFailure
from ovmstrio.runtimes.graphs.calculators.nodes import Stateless, StatelessKind, ports_of, required_input
from ovmstrio.runtimes.graphs.config.graph_config import NodeConfig, Port

__all__ = ["MUX"]

_NAME: Final = "MuxCalculator"
_SELECT: Final = Port("SELECT", 0)
_OUTPUT: Final = Port("OUTPUT", 0)
_INPUT: Final = "INPUT"


class _Mux(Stateless):
    async def process(self, context: NodeContext) -> None:
        """Send on the input that is selected, if something has come there.  Never waits.

        Raises:
            NodeFailure: nothing is selected, or there is no such input.
        """
        selected = context.side[_SELECT] if _SELECT in context.side else required_input(context, _SELECT)
        port = Port(_INPUT, selected)
        if port not in ports_of(context.node.inputs):
            raise NodeFailure(f"SELECT is {selected}, and there is no input {port}")
        if port in context.inputs:
            context.emit(_OUTPUT, context.inputs[port])


def _contract(node: NodeConfig) -> NodeContract:
    """Accept inputs ``INPUT:0``, ``INPUT:1`` ..., one ``SELECT`` as stream or side packet, and ``OUTPUT``.

    Raises:
        ContractError: the node has other ports.
    """
    inputs, side = set(ports_of(node.inputs)), set(ports_of(node.side_inputs))
    data = {port for port in inputs if port.tag == _INPUT}
    controls = [port for port in (*inputs, *side) if port == _SELECT]
    if not data or len(controls) != 1 or (inputs | side) != {*data, _SELECT}:
        raise ContractError(
            f"{_NAME} needs inputs INPUT:0, INPUT:1, ... and one SELECT, as input stream or side packet"
        )
    if set(ports_of(node.outputs)) != {_OUTPUT} or node.side_outputs:
        raise ContractError(f"{_NAME} has exactly one output, OUTPUT")
    types: dict[Port, type] = {port: int if port == _SELECT else object for port in inputs}
    return NodeContract(types, {_OUTPUT: object}, dict.fromkeys(side, int), propagates_bounds=True)


MUX: Final[CalculatorKind] = StatelessKind(_NAME, _contract, lambda _: lambda _: _Mux())
