"""MediaPipe's side-packet calculators: constants of the graph file, and defaults for missing side packets."""

from __future__ import annotations

from typing import Any, Final

from ovmstrio.graphs.calculator import CalculatorKind, ContractError, NodeContext, NodeContract
from ovmstrio.graphs.calculators.nodes import CalculatorBase, StatelessKind, check_tags, options_or_defaults, ports_of
from ovmstrio.graphs.graph_config import NodeConfig, Port

# ConstantSidePacketCalculator

_CONSTANT_NAME: Final = "ConstantSidePacketCalculator"
_CONSTANT_OPTIONS: Final = "mediapipe.ConstantSidePacketCalculatorOptions"
_TAG: Final = "PACKET"


class _SidePacketSource(CalculatorBase):
    async def process(self, context: NodeContext) -> None:
        """Do nothing; the node has no streams."""


def _values(node: NodeConfig) -> list[Any]:
    """Return the constants in file order: numbers, booleans, strings, and tuples of numbers or strings."""
    values = []
    for number, packet in enumerate(options_or_defaults(node, _CONSTANT_OPTIONS).packet):
        kind = packet.WhichOneof("value")
        if kind is None:
            raise ContractError(
                f"{_CONSTANT_NAME}: packet number {number} has no value", fix="add a value, as in int_value: 2"
            )
        value = getattr(packet, kind)
        if kind.endswith("_vector_value"):
            value = tuple(getattr(value, f"{kind.partition('_')[0]}_value"))
        values.append(value)
    return values


def _open_constant(context: NodeContext) -> _SidePacketSource:
    for number, value in enumerate(_values(context.node)):
        context.emit_side(Port(_TAG, number), value)
    return _SidePacketSource()


def _constant_contract(node: NodeConfig) -> NodeContract:
    check_tags(_CONSTANT_NAME, "output side packet", node.side_outputs, [_TAG])
    values = _values(node)
    if node.inputs or node.outputs or node.side_inputs or len(values) != len(node.side_outputs):
        raise ContractError(
            f"{_CONSTANT_NAME} has no streams and one output_side_packet PACKET per packet in its options: "
            f"{len(values)} packets, {len(node.side_outputs)} outputs"
        )
    return NodeContract(side_outputs={port: type(values[port.index]) for port in ports_of(node.side_outputs)})


CONSTANT_SIDE_PACKET: Final[CalculatorKind] = StatelessKind(
    _CONSTANT_NAME, _constant_contract, lambda _: _open_constant
)


# DefaultSidePacketCalculator

_DEFAULT_NAME: Final = "DefaultSidePacketCalculator"
_OPTIONAL: Final = Port("OPTIONAL_VALUE", 0)
_DEFAULT: Final = Port("DEFAULT_VALUE", 0)
_VALUE: Final = Port("VALUE", 0)


def _open_default(context: NodeContext) -> _SidePacketSource:
    context.emit_side(_VALUE, context.side.get(_OPTIONAL, context.side[_DEFAULT]))
    return _SidePacketSource()


def _default_contract(node: NodeConfig) -> NodeContract:
    side = set(ports_of(node.side_inputs))
    streams = (*node.inputs, *node.outputs)
    if streams or side | {_OPTIONAL} != {_OPTIONAL, _DEFAULT} or ports_of(node.side_outputs) != (_VALUE,):
        raise ContractError(
            f"{_DEFAULT_NAME} has the input side packets DEFAULT_VALUE and OPTIONAL_VALUE, "
            "the output side packet VALUE, and no streams"
        )
    anything: dict[Port, type] = dict.fromkeys(side, object)
    return NodeContract(side_inputs=anything, side_outputs={_VALUE: object}, optional_side=frozenset({_OPTIONAL}))


DEFAULT_SIDE_PACKET: Final[CalculatorKind] = StatelessKind(_DEFAULT_NAME, _default_contract, lambda _: _open_default)
