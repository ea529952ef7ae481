"""PacketClonerCalculator: repeats the newest packet of each input at every tick."""

from __future__ import annotations

from typing import Any, Final

from ovmstrio.runtimes.graphs.calculator import CalculatorKind, ContractError, NodeContext, NodeContract
from ovmstrio.runtimes.graphs.calculators.nodes import (
    Stateless,
    StatelessKind,
    check_tags,
    given_options,
    ports_of,
    untagged,
)
from ovmstrio.runtimes.graphs.config.graph_config import NodeConfig, Port
from ovmstrio.runtimes.graphs.timestamps import next_allowed

__all__ = ["PACKET_CLONER"]

_NAME: Final = "PacketClonerCalculator"
_OPTIONS: Final = "mediapipe.PacketClonerCalculatorOptions"
_TICK: Final = Port("TICK", 0)


class _Cloner(Stateless):
    """Holds the newest packet of each input.

    Args:
        cloned: the ports of inputs and outputs that are repeated.
        tick: when.
        waits: whether nothing is sent before each input has had a packet.
        tells: whether bounds are sent before that.
    """

    __slots__ = ("_cloned", "_newest", "_tells", "_tick", "_waits")

    def __init__(self, cloned: tuple[Port, ...], tick: Port, *, waits: bool, tells: bool) -> None:
        self._cloned = cloned
        self._tick = tick
        self._waits = waits
        self._tells = tells
        self._newest: dict[Port, Any] = {}

    async def process(self, context: NodeContext) -> None:
        """Keep what has come, and send what is kept if there is a tick.  Never waits."""
        self._newest.update((port, context.inputs[port]) for port in self._cloned if port in context.inputs)
        is_complete = len(self._newest) == len(self._cloned)
        if self._tick in context.inputs and (is_complete or not self._waits):
            for port, value in self._newest.items():
                context.emit(port, value)
        if is_complete or self._tells or not self._waits:
            for port in self._cloned:
                context.advance_bound(port, next_allowed(context.timestamp))


def _ports(node: NodeConfig) -> tuple[tuple[Port, ...], Port]:
    """Give the inputs that are repeated and the one that says when."""
    found = untagged(node.inputs)
    return (found, _TICK) if _TICK in ports_of(node.inputs) else (found[:-1], found[-1])


def _open(context: NodeContext) -> _Cloner:
    options = given_options(context.node, _OPTIONS)
    tells = options.output_packets_only_when_all_inputs_received
    cloned, tick = _ports(context.node)
    return _Cloner(cloned, tick, waits=options.output_only_when_all_inputs_received or tells, tells=tells)


def _contract(node: NodeConfig) -> NodeContract:
    """Accept inputs without tags, an output for each, and the tick: tagged ``TICK``, or the last input.

    Raises:
        ContractError: the node has other ports, or an input has no output.
    """
    check_tags(_NAME, "input", node.inputs, ["", _TICK.tag])
    if not node.inputs or set(ports_of(node.outputs)) != set(_ports(node)[0]) or not node.outputs:
        raise ContractError(
            f"{_NAME} needs an output for each input but the tick, all without tags",
            fix="tag the tick as TICK, or let it be the last input",
        )
    anything: dict[Port, type] = dict.fromkeys(ports_of(node.inputs), object)
    return NodeContract(anything, dict.fromkeys(ports_of(node.outputs), object), processes_bounds=True)


PACKET_CLONER: Final[CalculatorKind] = StatelessKind(_NAME, _contract, lambda _: _open)
