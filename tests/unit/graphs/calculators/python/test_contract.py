"""What a Python node must look like."""

from __future__ import annotations

from typing import Any

import pytest

from ovmstrio.runtimes.graphs.calculator import ContractError
from ovmstrio.runtimes.graphs.calculators import find_kind
from ovmstrio.runtimes.graphs.config.graph_config import NodeConfig, Port
from pyovms import Tensor
from tests.support.graph_nodes import options
from tests.support.python_nodes import LOOP, make_node


def contract(node: NodeConfig) -> Any:
    """Have the calculator look at a node."""
    kind = find_kind("PythonExecutorCalculator")
    assert kind is not None
    return kind.contract(node)


def test_streams_carry_tensors_and_the_loopback_truth_values() -> None:
    """Runs that emit nothing say nothing of the future."""
    made = contract(make_node(inputs=["B:b", "A:a"], outputs=["OUT:0:c"], generative=True))
    assert made.inputs == {Port("B", 0): Tensor, Port("A", 0): Tensor, LOOP: bool}
    assert made.outputs == {Port("OUT", 0): Tensor, LOOP: bool}
    assert set(made.side_inputs) == {Port("PYTHON_NODE_RESOURCES", 0)}
    assert not made.propagates_bounds


@pytest.mark.parametrize(("inputs", "outputs"), [(["a"], ["b"]), (["IN:a"], ["OUT:b"]), (["IN:0:a"], ["OUT:0:b"])])
def test_streams_may_be_written_in_three_ways(inputs: list[str], outputs: list[str]) -> None:
    """Without tag, with one, and with index 0."""
    assert len(contract(make_node(inputs=inputs, outputs=outputs)).inputs) == 1


@pytest.mark.parametrize(
    ("node", "text", "fix"),
    [
        (make_node(inputs=[]), "at least one input stream", "input_stream"),
        (make_node(outputs=[]), "at least one output stream", "output_stream"),
        (make_node(inputs=["a", "b"]), 'Tag "" index 1 was not expected', "tag of its own"),
        (make_node(inputs=["IN:a", "IN:1:b"]), 'Tag "IN" index 1 was not expected', "IN1:b"),
        (make_node(outputs=["OUT:1:b"]), 'Tag "OUT" index 1 was not expected', "OUT1:b"),
        (make_node(side=[]), 'Failed to get tag "PYTHON_NODE_RESOURCES" index 0', "PYTHON_NODE_RESOURCES:py"),
        (make_node(side=["PYTHON_NODE_RESOURCES:py", "OTHER:x"]), 'Tag "OTHER" index 0 was not expected', "remove"),
        (make_node(side_outputs=(make_node().side_inputs)), "makes no side packets", "remove"),
        (make_node(inputs=["IN:a", "LOOPBACK:l"]), "If LOOPBACK is used, it must be defined on both", "output_stream"),
        (make_node(outputs=["OUT:a", "LOOPBACK:l"]), "If LOOPBACK is used, it must be defined on both", "input_stream"),
        (make_node(node_options=()), "The Python Node is missing options definition", "handler_path"),
        (
            make_node(node_options=(), options=(options("PythonExecutorCalculatorOptions", handler_path="a"),)),
            "The Python Node is missing options definition - node_options is empty; options { ... } is not looked at",
            "handler_path",
        ),
        (make_node(node_options=(options("Other", x="y"),)), "found mediapipe.Other", "PythonExecutor"),
        (make_node(""), "handler_path is empty", "handler_path"),
        (make_node(name=""), "The Python Node is missing name definition", "name"),
        (make_node(canonical_name="node_1"), "The Python Node name is already present in nodes list", "own"),
    ],
)
def test_mistakes_are_named_with_the_way_out(node: NodeConfig, text: str, fix: str) -> None:
    """The text begins as OVMS's does."""
    with pytest.raises(ContractError) as raised:
        contract(node)
    assert text in raised.value.message
    assert fix in raised.value.fix
