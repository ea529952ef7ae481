"""Loops over vectors, and calculators that join and split them."""

from __future__ import annotations

from typing import Any

import pytest

from ovmstrio.core.errors import GraphFailure
from ovmstrio.protocol.descriptors import message_class
from ovmstrio.runtimes.graphs.calculator import ContractError
from ovmstrio.runtimes.graphs.config.graph_config import NodeConfig
from ovmstrio.runtimes.graphs.packets import Packet
from tests.support.graph_nodes import Feed, contract_of, refs, run_nodes


def node(calculator: str, inputs: list[str], outputs: list[str], options: Any = None) -> NodeConfig:
    """Make a node called like its calculator."""
    return NodeConfig(
        "", calculator, calculator, refs(*inputs), refs(*outputs), node_options=() if options is None else (options,)
    )


def ranges(*pairs: tuple[int, int], **more: bool) -> Any:
    """Make the options of a split."""
    made = message_class("mediapipe.SplitVectorCalculatorOptions")(**more)
    for begin, end in pairs:
        made.ranges.add(begin=begin, end=end)
    return made


BEGIN = node(
    "BeginLoopTensorCalculator",
    ["ITERABLE:vector", "CLONE:constant"],
    ["ITEM:item", "CLONE:copy", "BATCH_END:end"],
)
END = node("EndLoopTensorCalculator", ["ITEM:item", "BATCH_END:end"], ["ITERABLE:result"])


async def test_the_body_of_a_loop_sees_one_element_after_the_other() -> None:
    """Its timestamps count from 0 over all vectors, and what is constant is copied for each element."""
    loop = node("BeginLoopTensorCalculator", ["ITERABLE:v", "CLONE:c"], ["ITEM:i", "CLONE:k", "BATCH_END:e"])
    made = await run_nodes([loop], [(10, {"v": ("a", "b"), "c": "x"}), (20, {"v": ("d",), "c": "y"})])
    assert made["i"] == [Packet("a", 0), Packet("b", 1), Packet("d", 2)]
    assert made["k"] == [Packet("x", 0), Packet("x", 1), Packet("y", 2)]
    assert [(packet.value.timestamp, packet.timestamp) for packet in made["e"]] == [(10, 1), (20, 2)]


async def test_a_loop_gives_the_vector_of_results_at_the_vectors_timestamp() -> None:
    """The result leaves as soon as the last element is through, before the next vector comes."""
    seen: list[dict[str, list[Packet]]] = []
    feed = [(10, {"vector": (1, 2), "constant": 0}), (20, {"vector": (3,), "constant": 0})]
    await run_nodes([BEGIN, END], feed, steps_seen=seen)
    assert [step["result"] for step in seen] == [[Packet((1, 2), 10)], [Packet((3,), 20)]]


async def test_an_empty_vector_is_told_by_a_bound() -> None:
    """Whoever waits behind the loop goes on without a result at that timestamp."""
    begin = node("BeginLoopTensorCalculator", ["ITERABLE:vector"], ["ITEM:item", "BATCH_END:end"])
    behind = node("MergeCalculator", ["result", "other"], ["merged"])
    seen: list[dict[str, list[Packet]]] = []
    feed = [(10, {"vector": (), "other": "alone"}), (20, {"vector": ("a",), "other": "late"})]
    await run_nodes([begin, END, behind], feed, steps_seen=seen)
    assert seen == [{"merged": [Packet("alone", 10)]}, {"merged": [Packet(("a",), 20)]}]


async def test_vectors_and_elements_are_joined_in_the_order_of_inputs() -> None:
    """What is missing at a timestamp is left out, or keeps everything back if the options say so."""
    joined = node("ConcatenateTensorVectorCalculator", ["a", "b"], ["out"])
    feed: Feed = [(1, {"a": ("x", "y"), "b": ("z",)}), (2, {"b": ("w",)})]
    assert await run_nodes([joined], feed) == {"out": [Packet(("x", "y", "z"), 1), Packet(("w",), 2)]}
    options = message_class("mediapipe.ConcatenateVectorCalculatorOptions")(only_emit_if_all_present=True)
    strict = node("ConcatenateTensorVectorCalculator", ["a", "b"], ["out"], options)
    assert await run_nodes([strict], feed) == {"out": [Packet(("x", "y", "z"), 1)]}


@pytest.mark.parametrize(
    ("options", "outputs", "expected"),
    [
        (ranges((0, 1), (1, 3)), ["x", "y"], {"x": ("a",), "y": ("b", "c")}),
        (ranges((2, 3), (0, 1), element_only=True), ["x", "y"], {"x": "c", "y": "a"}),
        (ranges((2, 3), (0, 1), combine_outputs=True), ["x"], {"x": ("c", "a")}),
    ],
)
async def test_ranges_of_a_vector_go_to_outputs(options: Any, outputs: list[str], expected: dict[str, Any]) -> None:
    """As vectors, as elements, or together."""
    split = node("SplitTensorVectorCalculator", ["v"], outputs, options)
    made = await run_nodes([split], [(5, {"v": ("a", "b", "c")})])
    assert made == {name: [Packet(value, 5)] for name, value in expected.items()}


async def test_a_vector_that_is_too_short_cannot_be_split() -> None:
    """The message tells both lengths."""
    split = node("SplitTensorVectorCalculator", ["v"], ["x"], ranges((0, 4)))
    with pytest.raises(GraphFailure, match="the vector has 1 elements, and the ranges ask for 4"):
        await run_nodes([split], [(5, {"v": ("a",)})])


@pytest.mark.parametrize(
    "wrong",
    [
        node("SplitTensorVectorCalculator", ["v"], ["x"]),
        node("SplitTensorVectorCalculator", ["v"], ["x"], ranges((0, 1), (1, 2))),
        node("SplitTensorVectorCalculator", ["v"], ["x"], ranges((1, 1))),
        node("SplitTensorVectorCalculator", ["v"], ["x"], ranges((0, 2), element_only=True)),
        node("SplitTensorVectorCalculator", ["v"], ["x", "y"], ranges((0, 2), (1, 3))),
        node("BeginLoopTensorCalculator", ["ITERABLE:v"], ["ITEM:i"]),
        node("BeginLoopTensorCalculator", ["ITERABLE:v", "CLONE:c"], ["ITEM:i", "BATCH_END:e"]),
        node("BeginLoopTensorCalculator", ["ITERABLE:v", "OTHER:c"], ["ITEM:i", "BATCH_END:e"]),
        node("EndLoopTensorCalculator", ["ITEM:i"], ["ITERABLE:v"]),
        node("ConcatenateTensorVectorCalculator", ["T:a"], ["x"]),
        node("MergeCalculator", ["a"], ["T:x"]),
    ],
)
def test_nodes_that_cannot_be(wrong: NodeConfig) -> None:
    """Ports and ranges are checked when the graph is loaded."""
    with pytest.raises(ContractError):
        contract_of(wrong)
