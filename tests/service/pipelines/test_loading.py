from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino.opset13 as op
import pytest

from ovmstrio.config.specs import BatchSpec, PipelineNode, PipelineSpec
from ovmstrio.core.errors import ConfigError
from ovmstrio.core.service import Servable
from tests.support import ir
from tests.support.pipelines import make_node, make_pipeline, serving_pipeline, write_library
from tests.support.servables import load, load_stateful


def _plus_one(shape: Sequence[int] = (1, 2), kind: Any = np.float32) -> ov.Model:
    b = op.parameter(list(shape), kind, name="b")
    b.output(0).set_names({"b"})
    a = op.add(b, op.constant(np.array(1, kind)))
    a.output(0).set_names({"a"})
    return ov.Model([op.result(a)], [b], "plus")


def _model(name: str, source: str, **settings: Any) -> PipelineNode:
    return make_node(name, {"b": source}, ("a",), model_name=settings.pop("model_name", "m"), **settings)


async def _refusal(spec: PipelineSpec, **servables: Servable) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        async with serving_pipeline(spec, **servables):
            pass  # pragma: no cover
    for servable in servables.values():
        await servable.aclose()
    return caught.value


def _codes(error: ConfigError) -> list[str]:
    return [problem.message.partition(":")[0] for problem in error.problems]


@pytest.mark.parametrize(
    ("models", "nodes", "outputs", "demultiply_count", "codes"),
    [
        pytest.param(
            {"m": _plus_one},
            [make_node("one", {"c": "request.x"}, ("d",), model_name="m")],
            {"y": "one.d"},
            None,
            [
                "PIPELINE_NODE_REFERING_TO_MISSING_MODEL_OUTPUT",
                "PIPELINE_CONNECTION_TO_MISSING_MODEL_INPUT",
                "PIPELINE_NOT_ALL_INPUTS_CONNECTED",
            ],
            id="unknown input and output",
        ),
        pytest.param(
            {"m": _plus_one},
            [_model("one", "request.x", demultiply_count=2)],
            {"y": "one.a"},
            None,
            ["PIPELINE_NOT_ENOUGH_SHAPE_DIMENSIONS_TO_DEMULTIPLY"],
            id="output without dimension to split",
        ),
        pytest.param(
            {"m": partial(_plus_one, (3, 1, 2))},
            [_model("one", "request.x", demultiply_count=2)],
            {"y": "one.a"},
            None,
            ["PIPELINE_DEMULTIPLY_COUNT_DOES_NOT_MATCH_TENSOR_SHARD_COUNT"],
            id="output with another count",
        ),
        pytest.param(
            {},
            [make_node("one", {"i": "request.x"}, params={"shape": "3,1,2"}, gather_from_node="request")],
            {"y": "one.y"},
            2,
            ["PIPELINE_DEMULTIPLY_COUNT_DOES_NOT_MATCH_TENSOR_SHARD_COUNT"],
            id="entry with another count",
        ),
        pytest.param(
            {"m": ir.string_passthrough},
            [
                make_node("one", {"strings": "request.x"}, ("strings",), model_name="m", demultiply_count=2),
                make_node("two", {"strings": "one.strings"}, ("strings",), model_name="m"),
            ],
            {"y": "two.strings"},
            None,
            ["PIPELINE_STRING_DEMUILTIPLICATION_UNSUPPORTED", "NOT_IMPLEMENTED", "INVALID_SHAPE"],
            id="strings are split and passed between nodes",
        ),
    ],
)
async def test_invalid_connections_are_refused(
    tmp_path: Path,
    models: Mapping[str, Callable[[], ov.Model]],
    nodes: Sequence[PipelineNode],
    outputs: dict[str, str],
    demultiply_count: int | None,
    codes: list[str],
) -> None:
    servables = {name: await load(make(), tmp_path, name) for name, make in models.items()}
    libraries = {"arithmetic": write_library(tmp_path)}
    spec = make_pipeline(nodes, outputs, libraries=libraries, demultiply_count=demultiply_count)
    assert _codes(await _refusal(spec, **servables)) == codes


async def test_mismatch_of_models_is_refused_with_both_shapes_and_types(tmp_path: Path) -> None:
    two, three = await load(_plus_one(), tmp_path, "two"), await load(_plus_one((1, 3), np.int32), tmp_path, "three")
    nodes = [_model("a", "request.x", model_name="two"), _model("b", "a.a", model_name="three")]
    refusal = await _refusal(make_pipeline(nodes, {"y": "b.a"}), two=two, three=three)
    assert "expected [1,3], got [1,2]" in refusal.message
    assert "expected INT32, got FP32" in refusal.message


async def test_missing_dynamic_and_stateful_models_are_refused(tmp_path: Path) -> None:
    auto = await load(_plus_one(), tmp_path, "auto", batch=BatchSpec(auto=True))
    state = await load_stateful(ir.accumulator(), tmp_path, "state")
    nodes = [
        _model("a", "request.x", model_name="auto"),
        make_node("b", {"x": "request.x"}, ("y",), model_name="state"),
        _model("c", "request.x", model_name="missing", version=3),
        _model("d", "request.x", model_name="pipeline"),
    ]
    outputs = {"p": "a.a", "q": "b.y", "r": "c.a", "s": "d.a"}
    refusal = await _refusal(make_pipeline(nodes, outputs), auto=auto, state=state)
    assert sorted(set(_codes(refusal))) == [
        "FORBIDDEN_MODEL_DYNAMIC_PARAMETER",
        "PIPELINE_CALLS_ITSELF",
        "PIPELINE_NODE_REFERING_TO_MISSING_MODEL",
        "REQUESTED_STATEFUL_PARAMETERS_ON_SUBSCRIBED_MODEL",
    ]


async def test_entry_without_dimension_to_split_is_refused(tmp_path: Path) -> None:
    flat = make_node("one", {"i": "request.x"}, params={"shape": "2"})
    library = {"arithmetic": write_library(tmp_path)}
    refusal = await _refusal(make_pipeline([flat], {"y": "one.y"}, libraries=library, demultiply_count=-1))
    assert "node 'request': the input 'x' of shape [-1,2] has too few dimensions" in refusal.message


async def test_invalid_library_is_reported_with_other_problems(tmp_path: Path) -> None:
    library = write_library(tmp_path, "def get_inputs_info(:\n", "invalid")
    nodes = [make_node("one", {"i": "request.x"}), _model("two", "one.y", model_name="missing")]
    refusal = await _refusal(make_pipeline(nodes, {"y": "two.a"}, libraries={"arithmetic": library}))
    assert "invalid.py" in refusal.message
    assert "PIPELINE_NODE_REFERING_TO_MISSING_MODEL" in refusal.message
