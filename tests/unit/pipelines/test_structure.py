from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ovmstrio.config.specs import PipelineNode
from ovmstrio.pipelines.plan import draw_pipeline
from ovmstrio.pipelines.structure import validate_structure
from ovmstrio.util.drawing import to_svg
from tests.support.pipelines import make_node, make_pipeline


def _codes(nodes: Sequence[PipelineNode], outputs: dict[str, str], **settings: Any) -> list[str]:
    _, problems = validate_structure(make_pipeline(nodes, outputs, **settings))
    return sorted(problem.message.partition(":")[0] for problem in problems)


def test_nodes_follow_their_sources() -> None:
    nodes = [make_node("last", {"i": "first.y"}), make_node("first", {"i": "request.x"})]
    structure, _ = validate_structure(make_pipeline(nodes, {"o": "last.y"}))
    assert structure is not None
    assert list(structure.nodes) == ["request", "first", "last", "response"]


ONE = make_node("one", {"i": "request.x"})
SPLIT = make_node("split", {"i": "request.x"}, demultiply_count=2)

INVALID: dict[str, tuple[Sequence[PipelineNode], dict[str, str], list[str]]] = {
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


@pytest.mark.parametrize("case", INVALID)
def test_problems_have_the_codes_of_ovms(case: str) -> None:
    nodes, outputs, codes = INVALID[case]
    assert _codes(nodes, outputs) == codes


def test_input_connected_twice_is_refused() -> None:
    node = make_node("one", {"i": "request.x"})
    twice = node.model_copy(update={"inputs": node.inputs * 2})
    assert _codes([twice], {"o": "one.y"}) == ["PIPELINE_MODEL_INPUT_CONNECTED_TO_MULTIPLE_DATA_SOURCES"]


def test_unused_input_is_a_warning() -> None:
    structure, problems = validate_structure(make_pipeline([ONE], {"o": "one.y"}, inputs=("x", "z")))
    assert structure is not None
    assert [(problem.severity, problem.message) for problem in problems] == [
        ("warning", "PIPELINE_CONTAINS_UNCONNECTED_NODES: node 'request': the input 'z' is not used")
    ]


def test_problems_have_file_line_and_suggestion() -> None:
    nodes = [make_node("one", {"i": "requst.x"}), make_node("three", {"i": "one.z"})]
    _, problems = validate_structure(make_pipeline(nodes, {"o": "one.y"}))
    assert [(problem.file, problem.line) for problem in problems] == [("config.json", line) for line in (3, 5, 5)]
    assert problems[0].suggestion == "did you mean 'request'?"


def test_dynamic_entry_with_another_demultiplexer_is_refused() -> None:
    assert _codes([SPLIT], {"o": "split.y"}, demultiply_count=-1) == ["NOT_IMPLEMENTED"]


NODES = [
    make_node("faces", {"image": "request.x"}, {"crops": "images"}, demultiply_count=3),
    make_node("parts", {"i": "faces.crops"}, demultiply_count=-1),
    make_node("eyes", {"b": "parts.y"}, ("a",), model_name="eye", version=2),
    make_node("best", {"i": "eyes.a"}, gather_from_node="parts"),
]
SPEC = make_pipeline(
    NODES, {"face": "best.y", "eye": "eyes.a"}, demultiply_count=1, libraries={"arithmetic": Path("/lib/sums.py")}
)


def test_boxes_have_their_callees_and_level() -> None:
    drawing = draw_pipeline(SPEC)
    boxes = [[(box.title, box.subtitle, *box.notes) for box in layer] for layer in drawing.layers]
    library = "library arithmetic (sums.py)"
    assert boxes == [
        [("x", "", "splits into 1 shard")],
        [("faces", library, "once for each shard of the request", "splits into 3 shards")],
        [("parts", library, "once for each shard of faces in the request", "splits into shards")],
        [("eyes", "model eye version 2", "once for each shard of parts in faces in the request")],
        [("best", library, "once for each shard of faces in the request", "gathers parts")],
        [("face", "", "gathers faces in the request"), ("eye", "", "gathers parts in faces in the request")],
    ]


def test_edges_have_the_names_of_outputs_aliases_and_inputs() -> None:
    edges = [(edge.source, edge.label, edge.target) for edge in draw_pipeline(SPEC).edges]
    assert edges == [
        ("i0", "x image", "n0"),
        ("n0", "images crops i", "n1"),
        ("n1", "y b", "n2"),
        ("n2", "a i", "n3"),
        ("n3", "y", "o0"),
        ("n2", "a", "o1"),
    ]


def test_invalid_pipeline_is_drawn() -> None:
    nodes = [make_node("one", {"i": "two.y"}), make_node("two", {"i": "one.y", "j": "nobody.y", "k": "request.z"})]
    drawing = draw_pipeline(make_pipeline(nodes, {"o": "two.z"}))
    assert [[box.title for box in layer] for layer in drawing.layers] == [["x"], ["one"], ["two"], ["o"]]
    assert [(edge.source, edge.target) for edge in drawing.edges] == [("n1", "n0"), ("n0", "n1")]
    assert to_svg(drawing).startswith("<svg ")
