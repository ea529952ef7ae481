"""What a pipeline's configuration alone says: levels, and everything that is wrong with it at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from ovmstrio.config.specs import PipelineNode
from ovmstrio.runtimes.pipelines.structure import examine_structure
from tests.support.pipelines import make_node, make_pipeline


def _codes(nodes: Sequence[PipelineNode], outputs: dict[str, str], **settings: Any) -> list[str]:
    _, problems = examine_structure(make_pipeline(nodes, outputs, **settings))
    return sorted(problem.message.partition(":")[0] for problem in problems)


def test_levels_follow_demultiplexers_and_gathers() -> None:
    """A node is as deep as what comes to it, less what it gathers; the exit gathers all that is left."""
    nodes = [
        make_node("outer", {"i": "request.x"}, demultiply_count=2),
        make_node("inner", {"i": "outer.y"}, demultiply_count=3),
        make_node("between", {"i": "inner.y"}),
        make_node("gathers", {"i": "between.y"}, gather_from_node="inner"),
    ]
    structure, problems = examine_structure(make_pipeline(nodes, {"o": "gathers.y", "p": "between.y"}))
    assert structure is not None
    assert problems == []
    assert structure.levels["between"] == ("outer", "inner")
    assert structure.levels["gathers"] == ("outer",)
    assert [edge.gathers for edge in structure.into("response")] == [("outer",), ("inner", "outer")]
    assert structure.levels["response"] == ()


def test_nodes_come_behind_what_they_need() -> None:
    """The order is not that of the file."""
    nodes = [make_node("last", {"i": "first.y"}), make_node("first", {"i": "request.x"})]
    structure, _ = examine_structure(make_pipeline(nodes, {"o": "last.y"}))
    assert structure is not None
    assert list(structure.nodes) == ["request", "first", "last", "response"]


ONE = make_node("one", {"i": "request.x"})
SPLIT = make_node("split", {"i": "request.x"}, demultiply_count=2)

WRONG: dict[str, tuple[Sequence[PipelineNode], dict[str, str], list[str]]] = {
    "a name twice": ([ONE, ONE], {"o": "one.y"}, ["PIPELINE_NODE_NAME_DUPLICATE"]),
    "a node called request": (
        [ONE, make_node("request", {"i": "one.y"})],
        {"o": "one.y"},
        ["PIPELINE_MULTIPLE_ENTRY_NODES"],
    ),
    "a node called response": (
        [ONE, make_node("response", {"i": "one.y"})],
        {"o": "one.y"},
        ["PIPELINE_MULTIPLE_EXIT_NODES"],
    ),
    "a missing node": ([ONE], {"o": "one.y", "p": "two.y"}, ["PIPELINE_NODE_REFERING_TO_MISSING_NODE"]),
    "a missing alias": ([ONE], {"o": "one.y", "p": "one.z"}, ["PIPELINE_NODE_REFERING_TO_MISSING_DATA_SOURCE"]),
    "a missing input": (
        [ONE, make_node("two", {"i": "request.z", "j": "one.y"})],
        {"o": "two.y"},
        ["PIPELINE_NODE_REFERING_TO_MISSING_DATA_SOURCE"],
    ),
    "the exit as a source": (
        [ONE, make_node("two", {"i": "response.o", "j": "one.y"})],
        {"o": "two.y"},
        ["PIPELINE_EXIT_USED_AS_NODE_DEPENDENCY"],
    ),
    "a cycle": (
        [make_node("one", {"i": "two.y"}), make_node("two", {"i": "one.y"})],
        {"o": "two.y"},
        ["PIPELINE_CYCLE_FOUND"],
    ),
    "a node that feeds itself": (
        [make_node("one", {"i": "one.y", "j": "request.x"})],
        {"o": "one.y"},
        ["PIPELINE_CYCLE_FOUND"],
    ),
    "an unused node": (
        [ONE, make_node("two", {"i": "one.y"})],
        {"o": "one.y"},
        ["PIPELINE_CONTAINS_UNCONNECTED_NODES"],
    ),
    "gathering from nothing": (
        [make_node("one", {"i": "request.x"}, gather_from_node="other")],
        {"o": "one.y"},
        ["PIPELINE_NODE_GATHER_FROM_NOT_EXISTING_NODE", "PIPELINE_WRONG_DEMULTIPLEXER_GATHER_NODES_ORDER"],
    ),
    "gathering from what splits nothing": (
        [ONE, make_node("two", {"i": "one.y"}, gather_from_node="one")],
        {"o": "two.y"},
        ["PIPELINE_NODE_GATHER_FROM_NOT_DEMULTIPLEXER", "PIPELINE_WRONG_DEMULTIPLEXER_GATHER_NODES_ORDER"],
    ),
    "gathering what is not before it": (
        [SPLIT, make_node("two", {"i": "request.x"}, gather_from_node="split")],
        {"o": "two.y", "p": "split.y"},
        ["PIPELINE_WRONG_DEMULTIPLEXER_GATHER_NODES_ORDER"],
    ),
    "gathering the outer one first": (
        [
            SPLIT,
            make_node("inner", {"i": "split.y"}, demultiply_count=2),
            make_node("two", {"i": "inner.y"}, gather_from_node="split"),
        ],
        {"o": "two.y"},
        ["PIPELINE_WRONG_DEMULTIPLEXER_GATHER_NODES_ORDER"],
    ),
    "inputs split differently": (
        [SPLIT, make_node("two", {"i": "split.y", "j": "request.x"})],
        {"o": "two.y"},
        ["PIPELINE_WRONG_DEMULTIPLEXER_GATHER_NODES_ORDER"],
    ),
    "two demultiplexers, one of them dynamic": (
        [SPLIT, make_node("two", {"i": "split.y"}, demultiply_count=-1)],
        {"o": "two.y"},
        ["NOT_IMPLEMENTED"],
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_named_as_ovms_names_it(case: str) -> None:
    """Each kind of mistake has its code."""
    nodes, outputs, codes = WRONG[case]
    assert _codes(nodes, outputs) == codes


def test_a_dynamic_entry_counts_among_the_demultiplexers() -> None:
    """The pipeline's own demultiply_count is one like the others."""
    assert _codes([SPLIT], {"o": "split.y"}, demultiply_count=-1) == ["NOT_IMPLEMENTED"]


def test_an_input_connected_twice_is_refused() -> None:
    """Two sources for one input contradict each other."""
    node = make_node("one", {"i": "request.x"})
    twice = node.model_copy(update={"inputs": node.inputs * 2})
    assert _codes([twice], {"o": "one.y"}) == ["PIPELINE_MODEL_INPUT_CONNECTED_TO_MULTIPLE_DATA_SOURCES"]


def test_an_input_that_goes_nowhere_is_a_warning() -> None:
    """Clients have to send it, for nothing."""
    structure, problems = examine_structure(make_pipeline([ONE], {"o": "one.y"}, inputs=("x", "z")))
    assert structure is not None
    assert [(problem.severity, problem.message) for problem in problems] == [
        ("warning", "PIPELINE_CONTAINS_UNCONNECTED_NODES: node 'request': the input 'z' goes nowhere")
    ]


def test_everything_wrong_is_told_at_once_with_its_place() -> None:
    """Each problem has file, line and the way out."""
    nodes = [make_node("one", {"i": "requst.x"}), make_node("three", {"i": "one.z"})]
    _, problems = examine_structure(make_pipeline(nodes, {"o": "one.y"}))
    assert [(problem.file, problem.line) for problem in problems] == [("config.json", 3), ("config.json", 5)] * 1 + [
        ("config.json", 5)
    ]
    assert problems[0].suggestion == "did you mean 'request'?"
