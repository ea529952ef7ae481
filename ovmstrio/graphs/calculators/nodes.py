"""What calculators have in common: options, ports, and bases for those that hold or share nothing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from ovmstrio.encoding.messages import message_class
from ovmstrio.graphs.calculator import ContractError, DefinitionScope, NodeContext, NodeContract, NodeFailure
from ovmstrio.graphs.graph_config import NodeConfig, Port, StreamRef

__all__ = [
    "SharedNothing",
    "Stateless",
    "StatelessKind",
    "check_tags",
    "given_options",
    "joining_contract",
    "map_entry",
    "options_of",
    "ports_of",
    "required_input",
    "untagged",
]


def options_of(node: NodeConfig, message: str) -> Any:
    """Give a node's options of one message type, None where it has none; ``node_options`` go before ``options``."""
    for options in (*node.node_options, *node.options):
        if options.DESCRIPTOR.full_name == message:
            return options
    return None


def given_options(node: NodeConfig, message: str) -> Any:
    """Give a node's options of one message type, with every field at its default where it has none."""
    found = options_of(node, message)
    return found if found is not None else message_class(message)()


def untagged(refs: Sequence[StreamRef]) -> tuple[Port, ...]:
    """Give the ports of streams without a tag, by index."""
    return tuple(sorted(ref.port for ref in refs if not ref.port.tag))


def check_tags(name: str, what: str, refs: Sequence[StreamRef], known: Collection[str]) -> None:
    """Check the tags of one side of a node; ``""`` stands for streams without one.

    Raises:
        ContractError: there is a tag that the calculator does not know.
    """
    strangers = [str(ref.port) for ref in refs if ref.port.tag not in known]
    if strangers:
        tags = ", ".join(tag or "(no tag)" for tag in known) or "none"
        raise ContractError(f"{name} has no {what} {', '.join(strangers)}; there are: {tags}")


def ports_of(refs: Sequence[StreamRef]) -> tuple[Port, ...]:
    """Give the ports of streams, in their order."""
    return tuple(ref.port for ref in refs)


def joining_contract(name: str, node: NodeConfig, output: type) -> NodeContract:
    """Accept inputs without tags and one output without, of this type.

    Raises:
        ContractError: the node has other ports.
    """
    check_tags(name, "input", node.inputs, [""])
    outputs = ports_of(node.outputs)
    if not node.inputs or outputs != (Port("", 0),):
        raise ContractError(f"{name} needs at least one input and exactly one output, without tags")
    return NodeContract(
        dict.fromkeys(ports_of(node.inputs), object), dict.fromkeys(outputs, output), propagates_bounds=True
    )


def map_entry(entries: Any, port: Port) -> str | None:
    """Give what a map of options says of a port; ``TAG`` stands for index 0 and ``TAG:1`` for others."""
    key = str(port) if port.index else port.tag
    return entries[key] if key in entries else None  # noqa: SIM401 - a protobuf map is no dict


def required_input(context: NodeContext, port: Port) -> Any:
    """Give the value on an input.

    Raises:
        NodeFailure: nothing came there at this timestamp.
    """
    try:
        return context.inputs[port]
    except KeyError:
        raise NodeFailure(f"input {port} is missing at timestamp {context.timestamp}") from None


class Stateless:
    """A base for calculators that hold nothing to close."""

    __slots__ = ()

    async def close(self, context: NodeContext) -> None:
        """Nothing to do.  Never waits."""


class SharedNothing:
    """The resources of a node whose instances share nothing."""

    __slots__ = ("_make",)

    def __init__(self, make: Callable[[NodeContext], Any]) -> None:
        self._make = make

    async def open(self, context: NodeContext) -> Any:
        """Make the calculator of one instance.  Never waits."""
        return self._make(context)

    async def aclose(self) -> None:
        """Nothing to do.  Never waits."""


@dataclass(slots=True, eq=False)
class StatelessKind:
    """A calculator whose nodes share nothing but what the graph file says of them.

    Attributes:
        name: under which graph files know it.
        contract: see :meth:`CalculatorKind.contract`.
        prepare: gives, for a node, what makes the calculator of one instance.
    """

    name: str
    contract: Callable[[NodeConfig], NodeContract]
    prepare: Callable[[NodeConfig], Callable[[NodeContext], Any]]

    async def load(self, node: NodeConfig, scope: DefinitionScope) -> SharedNothing:
        """Share what the file says.  Never waits."""
        del scope
        return SharedNothing(self.prepare(node))
