"""ConstantSidePacketCalculator: side packets whose values stand in the graph file."""

from __future__ import annotations

from typing import Any, Final

from ovmstrio.runtimes.graphs.calculator import CalculatorKind, ContractError, NodeContext, NodeContract
from ovmstrio.runtimes.graphs.calculators.nodes import Stateless, StatelessKind, check_tags, given_options, ports_of
from ovmstrio.runtimes.graphs.config.graph_config import NodeConfig, Port

__all__ = ["CONSTANT_SIDE_PACKET"]

_NAME: Final = "ConstantSidePacketCalculator"
_OPTIONS: Final = "mediapipe.ConstantSidePacketCalculatorOptions"
_TAG: Final = "PACKET"


class _Nothing(Stateless):
    async def process(self, context: NodeContext) -> None:
        """Nothing to do: the values are given when the node opens.  Never waits."""


def _values(node: NodeConfig) -> list[Any]:
    """Give the values in the order of the file: numbers, truth values, texts, and tuples of numbers or texts.

    Raises:
        ContractError: a packet has no value.
    """
    values = []
    for number, packet in enumerate(given_options(node, _OPTIONS).packet):
        kind = packet.WhichOneof("value")
        if kind is None:
            raise ContractError(f"{_NAME}: packet number {number} has no value", fix="give it, as in int_value: 2")
        value = getattr(packet, kind)
        if kind.endswith("_vector_value"):
            value = tuple(getattr(value, f"{kind.partition('_')[0]}_value"))
        values.append(value)
    return values


def _open(context: NodeContext) -> _Nothing:
    for number, value in enumerate(_values(context.node)):
        context.emit_side(Port(_TAG, number), value)
    return _Nothing()


def _contract(node: NodeConfig) -> NodeContract:
    """Accept a side output ``PACKET`` for each packet of the options.

    Raises:
        ContractError: there are not as many, or the node has other ports.
    """
    check_tags(_NAME, "output side packet", node.side_outputs, [_TAG])
    values = _values(node)
    if node.inputs or node.outputs or node.side_inputs or len(values) != len(node.side_outputs):
        raise ContractError(
            f"{_NAME} has no streams and an output_side_packet PACKET for each packet of its options: "
            f"{len(values)} packets, {len(node.side_outputs)} outputs"
        )
    return NodeContract(side_outputs={port: type(values[port.index]) for port in ports_of(node.side_outputs)})


CONSTANT_SIDE_PACKET: Final[CalculatorKind] = StatelessKind(_NAME, _contract, lambda _: _open)
