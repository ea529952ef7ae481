"""What a node must look like for its calculator to be PythonExecutorCalculator; the rules are OVMS's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from ovmstrio.runtimes.graphs.calculator import ContractError, NodeContract
from ovmstrio.runtimes.graphs.calculators.nodes import ports_of
from ovmstrio.runtimes.graphs.config.graph_config import NodeConfig, Port, StreamRef
from pyovms import Tensor

__all__ = ["LOOPBACK", "OPTIONS", "contract_of", "handler_path_of", "has_loopback"]

LOOPBACK: Final = Port("LOOPBACK", 0)
OPTIONS: Final = "mediapipe.PythonExecutorCalculatorOptions"
_RESOURCES: Final = Port("PYTHON_NODE_RESOURCES", 0)
_NAME: Final = "PythonExecutorCalculator"
_SIDE_FIX: Final = 'write input_side_packet: "PYTHON_NODE_RESOURCES:py"'
_OPTIONS_FIX: Final = f'add node_options {{ [type.googleapis.com/{OPTIONS}]: {{ handler_path: "handler.py" }} }}'


def contract_of(node: NodeConfig) -> NodeContract:
    """Say what the node's streams carry: tensors, and truth values on the loopback.

    Raises:
        ContractError: the node is not written as it must be.
    """
    _check_streams(node)
    _check_side_packets(node)
    _check_loopback(node)
    handler_path_of(node)
    _check_name(node)
    side: dict[Port, type] = {_RESOURCES: object}
    return NodeContract(_types(node.inputs), _types(node.outputs), side)


def has_loopback(node: NodeConfig) -> bool:
    """Tell whether the node has the cycle that generators need."""
    return LOOPBACK in ports_of(node.inputs)


def handler_path_of(node: NodeConfig) -> str:
    """Give the handler's path as the file has it.

    Raises:
        ContractError: the node's options do not say it.
    """
    missing = "The Python Node is missing options definition"
    if not node.node_options:
        hint = "; options { ... } is not looked at" if node.options else ""
        raise ContractError(f"{missing} - node_options is empty{hint}", fix=_OPTIONS_FIX)
    options: Any = node.node_options[0]
    found = options.DESCRIPTOR.full_name
    if found != OPTIONS:
        raise ContractError(f"{missing} - expected {OPTIONS} in node_options, found {found}", fix=_OPTIONS_FIX)
    path: str = options.handler_path
    if not path:
        raise ContractError(f"{missing} - handler_path is empty", fix="name the Python file in handler_path")
    return path


def _types(refs: Sequence[StreamRef]) -> dict[Port, type]:
    return {port: bool if port == LOOPBACK else Tensor for port in ports_of(refs)}


def _check_streams(node: NodeConfig) -> None:
    for what, refs in (("input", node.inputs), ("output", node.outputs)):
        if not refs:
            raise ContractError(
                f"{_NAME} needs at least one {what} stream", fix=f'add {what}_stream: "TAG:name"', code="INTERNAL"
            )
        for port, name in ((ref.port, ref.name) for ref in refs):
            if port.index:
                raise ContractError(
                    f'Tag "{port.tag}" index {port.index} was not expected: {_NAME} takes one stream of each tag, and '
                    f'{what} "{name}" is another',
                    fix=f'give it a tag of its own, such as {what}_stream: "{port.tag}{port.index}:{name}"',
                )
    if node.side_outputs:
        raise ContractError(f"{_NAME} makes no side packets", fix="remove output_side_packet")


def _check_side_packets(node: NodeConfig) -> None:
    if _RESOURCES not in ports_of(node.side_inputs):
        raise ContractError('Failed to get tag "PYTHON_NODE_RESOURCES" index 0 of the side packets', fix=_SIDE_FIX)
    for ref in node.side_inputs:
        if ref.port != _RESOURCES:
            raise ContractError(
                f'Tag "{ref.port.tag}" index {ref.port.index} was not expected among the side packets',
                fix=f'remove input_side_packet "{ref.name}"; {_NAME} takes no other than PYTHON_NODE_RESOURCES:py',
            )


def _check_loopback(node: NodeConfig) -> None:
    has_input, has_output = LOOPBACK in ports_of(node.inputs), LOOPBACK in ports_of(node.outputs)
    if has_input != has_output:
        missing = "output" if has_input else "input"
        raise ContractError(
            "If LOOPBACK is used, it must be defined on both input and output of the node",
            fix=f'add {missing}_stream: "LOOPBACK:loopback", with the same name on both sides',
        )


def _check_name(node: NodeConfig) -> None:
    if not node.name:
        raise ContractError(
            "The Python Node is missing name definition", fix='add name: "...", which is unique in the graph'
        )
    if node.canonical_name != node.name:
        raise ContractError(
            f"The Python Node name is already present in nodes list - {node.name!r}",
            fix="give each node of the graph a name of its own",
        )
