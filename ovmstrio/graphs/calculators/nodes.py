"""Shared parts of calculators: options, ports, and bases for calculators without state."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from ovmstrio.encoding.messages import message_class
from ovmstrio.graphs.calculator import ContractError, DefinitionScope, NodeContext, NodeContract, NodeFailure
from ovmstrio.graphs.graph_config import NodeConfig, Port, StreamRef


def find_options(node: NodeConfig, message: str) -> Any:
    """Return a node's options of one message type, or None; ``node_options`` take precedence over ``options``."""
    for options in (*node.node_options, *node.options):
        if options.DESCRIPTOR.full_name == message:
            return options
    return None


def options_or_defaults(node: NodeConfig, message: str) -> Any:
    """Return a node's options of one message type, or a message with default values."""
    found = find_options(node, message)
    return found if found is not None else message_class(message)()


def untagged_ports(refs: Sequence[StreamRef]) -> tuple[Port, ...]:
    """Return the ports of streams without a tag, by index."""
    return tuple(sorted(ref.port for ref in refs if not ref.port.tag))


def check_tags(name: str, what: str, refs: Sequence[StreamRef], known: Collection[str]) -> None:
    """Check the tags of one side of a node; ``""`` stands for streams without a tag."""
    unknown = [str(ref.port) for ref in refs if ref.port.tag not in known]
    if unknown:
        tags = ", ".join(tag or "(no tag)" for tag in known) or "none"
        raise ContractError(f"{name} has no {what} {', '.join(unknown)}; known: {tags}")


def ports_of(refs: Sequence[StreamRef]) -> tuple[Port, ...]:
    """Return the ports of streams, in order."""
    return tuple(ref.port for ref in refs)


def joining_contract(name: str, node: NodeConfig, output: type) -> NodeContract:
    """Return the contract of a node that joins untagged inputs into one untagged output."""
    check_tags(name, "input", node.inputs, [""])
    outputs = ports_of(node.outputs)
    if not node.inputs or outputs != (Port("", 0),):
        raise ContractError(f"{name} needs at least one input and exactly one output, without tags")
    return NodeContract(
        dict.fromkeys(ports_of(node.inputs), object), dict.fromkeys(outputs, output), propagates_bounds=True
    )


def map_entry(entries: Any, port: Port) -> str | None:
    """Return a port's entry in an options map, or None; the key is ``TAG``, or ``TAG:1`` for indexes above 0."""
    key = str(port) if port.index else port.tag
    return entries[key] if key in entries else None  # noqa: SIM401 - a protobuf map is not a dict


def required_input(context: NodeContext, port: Port) -> Any:
    """Return the value of an input."""
    try:
        return context.inputs[port]
    except KeyError:
        raise NodeFailure(f"input {port} is missing at timestamp {context.timestamp}") from None


class CalculatorBase:
    """Base of calculators that have nothing to close."""

    __slots__ = ()

    async def close(self, context: NodeContext) -> None:
        """Do nothing."""


class StatelessResources:
    """Resources of a node whose instances share no state."""

    __slots__ = ("_make",)

    def __init__(self, make: Callable[[NodeContext], Any]) -> None:
        self._make = make

    async def open(self, context: NodeContext) -> Any:
        """Create the calculator of one instance."""
        return self._make(context)

    async def aclose(self) -> None:
        """Do nothing."""


@dataclass(slots=True, eq=False)
class StatelessKind:
    """A calculator whose nodes share only their configuration.

    Attributes:
        name: the name in graph files.
        contract: see :meth:`CalculatorKind.contract`.
        prepare: returns, for a node, the factory of its calculators.
    """

    name: str
    contract: Callable[[NodeConfig], NodeContract]
    prepare: Callable[[NodeConfig], Callable[[NodeContext], Any]]

    async def load(self, node: NodeConfig, scope: DefinitionScope) -> StatelessResources:
        """Return the node's calculator factory as its shared resources."""
        del scope
        return StatelessResources(self.prepare(node))
