from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ovmstrio.config.specs import PipelineNode
from ovmstrio.core.errors import Problem
from ovmstrio.core.tensor import ANY_SIZE, BY_NAME, INVALID, Dim, TensorSpec
from ovmstrio.pipelines.signatures import NodeSignature, describe_inputs, describe_outputs
from ovmstrio.pipelines.structure import validate_structure
from tests.support import ir
from tests.support.pipelines import call, make_node, make_pipeline, serving_pipeline, write_library
from tests.support.servables import load

Described = tuple[dict[str, TensorSpec], dict[str, TensorSpec], list[Problem]]


def _spec(name: str, *sizes: int | Dim, layout: str = "", datatype: str = "FP32") -> TensorSpec:
    dims = tuple(size if isinstance(size, Dim) else ANY_SIZE if size < 0 else Dim.fixed(size) for size in sizes)
    return TensorSpec(name, BY_NAME[datatype], dims, layout=layout)


def _signature(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> NodeSignature:
    return NodeSignature({spec.name: spec for spec in inputs}, {spec.name: spec for spec in outputs})


def _describe(
    nodes: Sequence[PipelineNode], outputs: Mapping[str, str], signatures: Mapping[str, NodeSignature], **settings: Any
) -> Described:
    structure, wrong = validate_structure(make_pipeline(nodes, outputs, **settings))
    assert structure is not None
    assert wrong == []
    inputs, problems = describe_inputs(structure, signatures)
    described = describe_outputs(structure, signatures, inputs)
    return {spec.name: spec for spec in inputs}, {spec.name: spec for spec in described}, problems


IMAGE = _signature([_spec("image", 1, 3, -1, -1, layout="NCHW")], [_spec("out", 1, 2, layout="NC")])
ONE = make_node("one", {"image": "request.x"}, ("out",), model_name="m")
ROW = _spec("i", 1, 2)
ADDS, SPLITS = _signature([ROW], [_spec("y", 1, 2)]), _signature([ROW], [_spec("y", -1, 1, 2)])


@pytest.mark.parametrize(("count", "first"), [(4, 4), (1, 1), (-1, -1)])
def test_split_entry_has_another_first_dimension(count: int, first: int) -> None:
    outputs = {"y": "one.out", "z": "request.x"}
    described = _describe([ONE], outputs, {"one": IMAGE}, demultiply_count=count)
    inputs, found, _ = described
    assert inputs["x"].batch_axis == 0
    assert [(spec.name, spec.reported_shape, spec.layout) for spec in (inputs["x"], found["y"], found["z"])] == [
        ("x", [first, 1, 3, -1, -1], "N?CHW"),
        ("y", [first, 1, 2], "N?C"),
        ("z", [first, 1, 3, -1, -1], "N?CHW"),
    ]


def test_gathered_entry_has_no_other_dimension() -> None:
    node = make_node("one", {"image": "request.x"}, ("out",), model_name="m", gather_from_node="request")
    inputs, outputs, _ = _describe([node], {"y": "one.out"}, {"one": IMAGE}, demultiply_count=-1)
    assert inputs["x"].reported_shape == [1, 3, -1, -1]
    assert outputs["y"].reported_shape == [1, 2]


@pytest.mark.parametrize(("entry", "prefix"), [(None, []), (5, [5])])
def test_levels_add_dimensions_outermost_first(entry: int | None, prefix: list[int]) -> None:
    nodes = [
        make_node("outer", {"i": "request.x"}, demultiply_count=2),
        make_node("between", {"i": "outer.y"}),
        make_node("inner", {"i": "outer.y"}, demultiply_count=3),
        make_node("deep", {"i": "inner.y"}),
        make_node("back", {"i": "deep.y"}, gather_from_node="inner"),
    ]
    gathers = _signature([_spec("i", -1, 1, 2)], [_spec("y", 1, 2, layout="NC")])
    signatures = {"outer": SPLITS, "between": ADDS, "inner": SPLITS, "deep": ADDS, "back": gathers}
    outputs = {node.name: f"{node.name}.y" for node in nodes}
    _, found, _ = _describe(nodes, outputs, signatures, demultiply_count=entry)
    assert {name: spec.reported_shape for name, spec in found.items()} == {
        "outer": [*prefix, -1, 1, 2],
        "between": [*prefix, 2, 1, 2],
        "inner": [*prefix, 2, -1, 1, 2],
        "deep": [*prefix, 2, 3, 1, 2],
        "back": [*prefix, 2, 1, 2],
    }
    # Only the outermost dimension is a batch.
    assert found["back"].layout == "N?" + "?" * len(prefix) + "C"


@pytest.mark.parametrize(("own", "reported"), [(ANY_SIZE, -1), (Dim.fixed(7), 7)])
def test_dynamic_count_is_that_of_the_library(own: Dim, reported: int) -> None:
    nodes = [make_node("split", {"i": "request.x"}, demultiply_count=-1), make_node("add", {"i": "split.y"})]
    signatures = {"split": _signature([ROW], [_spec("y", own, 1, 2)]), "add": ADDS}
    _, outputs, _ = _describe(nodes, {"y": "add.y"}, signatures)
    assert outputs["y"].reported_shape == [reported, 1, 2]


PAIRS: dict[str, tuple[TensorSpec, TensorSpec, tuple[str, str] | None]] = {
    "ranges": (_spec("i", Dim(1, 4), 2), _spec("i", Dim(3, 9), -1), ("FP32 [[3~4],2]", "")),
    "one layout": (_spec("i", 1, 2, layout="NC"), _spec("i", 1, 2), ("FP32 [1,2]", "NC")),
    "the other layout": (_spec("i", 1, 2), _spec("i", 1, 2, layout="NC"), ("FP32 [1,2]", "NC")),
    "two layouts": (_spec("i", 1, 2, layout="CN"), _spec("i", 1, 2, layout="NC"), None),
    "two types": (_spec("i", 1, 2), _spec("i", 1, 2, datatype="INT32"), None),
    "two ranks": (_spec("i", 1, 2), _spec("i", 1, 2, 3), None),
    "no common size": (_spec("i", Dim(1, 2)), _spec("i", Dim(3, 4)), None),
    "an open one first": (TensorSpec("i", INVALID, ()), _spec("i", 1, 2), ("FP32 [1,2]", "")),
    "an open one last": (_spec("i", 1, 2), TensorSpec("i", INVALID, ()), ("FP32 [1,2]", "")),
}


@pytest.mark.parametrize("case", PAIRS)
def test_input_of_two_nodes_has_the_type_that_both_accept(case: str) -> None:
    one, two, expected = PAIRS[case]
    nodes = [make_node(name, {"i": "request.x"}, model_name="m") for name in ("one", "two")]
    signatures = {"one": _signature([one], [_spec("y", 1)]), "two": _signature([two], [_spec("y", 1)])}
    inputs, _, problems = _describe(nodes, {"y": "one.y", "z": "two.y"}, signatures)
    if expected is None:
        (problem,) = problems
        assert problem.message.startswith("PIPELINE_INPUTS_AMBIGUOUS_METADATA")
        assert all(str(spec) in problem.message for spec in (one, two))
        assert problem.suggestion == "add a separate input for each"
    else:
        assert problems == []
        assert (str(inputs["x"]), inputs["x"].layout) == expected


async def test_metadata_of_a_loaded_pipeline(tmp_path: Path) -> None:
    model = await load(ir.image_passthrough(), tmp_path)
    nodes = [
        make_node("images", {"image": "request.pictures"}, ("pixels",), model_name="m"),
        make_node("sums", {"i": "request.a"}, params={"shape": "1,2"}),
    ]
    spec = make_pipeline(
        nodes,
        {"z": "images.pixels", "y": "sums.y"},
        inputs=["pictures", "a"],
        demultiply_count=-1,
        libraries={"arithmetic": write_library(tmp_path)},
    )
    async with serving_pipeline(spec, m=model) as pipeline:
        metadata = pipeline.metadata
        assert [(each.name, each.reported_shape, each.layout) for each in metadata.inputs] == [
            ("a", [-1, 1, 2], ""),
            ("pictures", [-1, 1, 4, 4, 3], "N?HWC"),
        ]
        assert [(each.name, each.reported_shape) for each in metadata.outputs] == [
            ("y", [-1, 1, 2]),
            ("z", [-1, 1, 4, 4, 3]),
        ]
        found = await call(pipeline, a=np.ones((2, 1, 2)), pictures=np.ones((2, 1, 4, 4, 3)))
    assert (metadata.name, metadata.platform) == ("pipeline", "OpenVINO")
    assert {name: array.shape for name, array in found.items()} == {"y": (2, 1, 2), "z": (2, 1, 4, 4, 3)}
    await model.aclose()
