"""Whether nodes fit together is found out when a pipeline is loaded, against real models and custom nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino.opset13 as op
import pytest

from ovmstrio.config.specs import BatchSpec, PipelineNode, PipelineSpec
from ovmstrio.core.errors import ConfigError
from ovmstrio.core.servable import Servable
from tests.support import ir
from tests.support.pipelines import call, make_node, make_pipeline, serving_pipeline, write_library
from tests.support.servables import load, load_stateful


def _plus(number: float, shape: list[Any] | None = None, kind: Any = np.float32) -> ov.Model:
    """Input ``b`` and output ``a`` of [1,2] or another shape."""
    b = op.parameter(shape or [1, 2], kind, name="b")
    b.output(0).set_names({"b"})
    a = op.add(b, op.constant(np.array(number, kind)))
    a.output(0).set_names({"a"})
    return ov.Model([op.result(a)], [b], "plus")


def _model(name: str, source: str, **settings: Any) -> PipelineNode:
    return make_node(name, {"b": source}, ("a",), model_name=settings.pop("model_name", "m"), **settings)


async def _codes(spec: PipelineSpec, **servables: Servable) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        async with serving_pipeline(spec, **servables):
            pass  # pragma: no cover
    return [problem.message.partition(":")[0] for problem in caught.value.problems]


async def test_a_chain_of_models_adds_up(tmp_path: Path) -> None:
    """Each node calls its model with what the one before gave."""
    model = await load(_plus(1), tmp_path)
    nodes = [_model("one", "request.x"), _model("two", "one.a"), _model("three", "two.a")]
    async with serving_pipeline(make_pipeline(nodes, {"y": "three.a"}), m=model) as pipeline:
        found = await call(pipeline, x=[[1, 2]])
        assert pipeline.metadata.inputs[0].reported_shape == [1, 2]
        assert [spec.name for spec in pipeline.metadata.outputs] == ["y"]
    np.testing.assert_array_equal(found["y"], [[4, 5]])
    await model.aclose()


async def test_a_dynamic_entry_batches_a_model_of_batch_one(tmp_path: Path) -> None:
    """Each row goes through the model by itself, and the answer has all of them."""
    model = await load(_plus(1), tmp_path)
    spec = make_pipeline([_model("one", "request.x")], {"y": "one.a"}, demultiply_count=-1)
    async with serving_pipeline(spec, m=model) as pipeline:
        rows = np.arange(10, dtype=np.float32).reshape(5, 1, 2)
        found = await call(pipeline, x=rows)
        assert pipeline.metadata.inputs[0].reported_shape == [-1, 1, 2]
        assert pipeline.metadata.outputs[0].reported_shape == [-1, 1, 2]
    np.testing.assert_array_equal(found["y"], rows + 1)
    await model.aclose()


async def test_an_input_is_what_all_its_nodes_accept(tmp_path: Path) -> None:
    """Ranges are cut to what they have in common."""
    small = await load(_plus(1, [ov.Dimension(1, 4), 2]), tmp_path, "small")
    large = await load(_plus(2, [ov.Dimension(3, 8), -1]), tmp_path, "large")
    nodes = [_model("one", "request.x", model_name="small"), _model("two", "request.x", model_name="large")]
    spec = make_pipeline(nodes, {"y": "one.a", "z": "two.a"})
    async with serving_pipeline(spec, small=small, large=large) as pipeline:
        assert str(pipeline.metadata.inputs[0]) == "FP32 [[3~4],2]"
        found = await call(pipeline, x=np.ones((3, 2)))
    np.testing.assert_array_equal(found["z"], np.full((3, 2), 3))
    await small.aclose()
    await large.aclose()


async def test_an_input_of_two_minds_is_refused(tmp_path: Path) -> None:
    """Two nodes that want different things cannot share an input."""
    one, two = await load(_plus(1), tmp_path, "one"), await load(_plus(1, [1, 3]), tmp_path, "two")
    nodes = [_model("a", "request.x", model_name="one"), _model("b", "request.x", model_name="two")]
    codes = await _codes(make_pipeline(nodes, {"y": "a.a", "z": "b.a"}), one=one, two=two)
    assert codes == ["PIPELINE_INPUTS_AMBIGUOUS_METADATA"]
    await one.aclose()
    await two.aclose()


async def test_models_that_do_not_fit_are_refused_with_both_shapes(tmp_path: Path) -> None:
    """Shape and precision are compared along each connection, and all that is wrong is told."""
    two, three = await load(_plus(1), tmp_path, "two"), await load(_plus(1, [1, 3], np.int32), tmp_path, "three")
    nodes = [_model("a", "request.x", model_name="two"), _model("b", "a.a", model_name="three")]
    spec = make_pipeline(nodes, {"y": "b.a"})
    with pytest.raises(ConfigError, match=r"expected \[1,3\], got \[1,2\]") as caught:
        async with serving_pipeline(spec, two=two, three=three):
            pass  # pragma: no cover
    assert "expected INT32, got FP32" in caught.value.message
    await two.aclose()
    await three.aclose()


async def test_what_a_model_does_not_have_is_refused_by_name(tmp_path: Path) -> None:
    """Unknown inputs and outputs, and inputs that nothing is connected to."""
    model = await load(_plus(1), tmp_path)
    node = make_node("one", {"c": "request.x"}, ("d",), model_name="m")
    codes = await _codes(make_pipeline([node], {"y": "one.d"}), m=model)
    assert codes == [
        "PIPELINE_NODE_REFERING_TO_MISSING_MODEL_OUTPUT",
        "PIPELINE_CONNECTION_TO_MISSING_MODEL_INPUT",
        "PIPELINE_NOT_ALL_INPUTS_CONNECTED",
    ]
    await model.aclose()


async def test_missing_and_forbidden_models_are_refused(tmp_path: Path) -> None:
    """A model that is not there, follows its requests, or keeps state is no node of a pipeline."""
    auto = await load(_plus(1), tmp_path, "auto", batch=BatchSpec(auto=True))
    state = await load_stateful(ir.accumulator(), tmp_path, "state")
    nodes = [
        _model("a", "request.x", model_name="auto"),
        make_node("b", {"x": "request.x"}, ("y",), model_name="state"),
        _model("c", "request.x", model_name="missing", version=3),
        _model("d", "request.x", model_name="pipeline"),
    ]
    outputs = {"p": "a.a", "q": "b.y", "r": "c.a", "s": "d.a"}
    codes = await _codes(make_pipeline(nodes, outputs), auto=auto, state=state)
    assert sorted(set(codes)) == [
        "FORBIDDEN_MODEL_DYNAMIC_PARAMETER",
        "PIPELINE_CALLS_ITSELF",
        "PIPELINE_NODE_REFERING_TO_MISSING_MODEL",
        "REQUESTED_STATEFUL_PARAMETERS_ON_SUBSCRIBED_MODEL",
    ]
    await auto.aclose()
    await state.aclose()


async def test_a_flat_output_cannot_be_split(tmp_path: Path) -> None:
    """There must be a dimension to split and a batch behind it."""
    model = await load(_plus(1), tmp_path)
    spec = make_pipeline([_model("one", "request.x", demultiply_count=2)], {"y": "one.a"})
    assert await _codes(spec, m=model) == ["PIPELINE_NOT_ENOUGH_SHAPE_DIMENSIONS_TO_DEMULTIPLY"]
    await model.aclose()


async def test_an_entry_that_could_never_be_split_is_refused(tmp_path: Path) -> None:
    """What a client sends has too few dimensions, or another first one than the count."""
    flat = make_node("one", {"i": "request.x"}, params={"shape": "2"})
    library = {"arithmetic": write_library(tmp_path)}
    spec = make_pipeline([flat], {"y": "one.y"}, libraries=library, demultiply_count=-1)
    with pytest.raises(ConfigError, match=r"node 'request': the input 'x' of shape \[-1,2\] has too few dimensions"):
        async with serving_pipeline(spec):
            pass  # pragma: no cover
    gathers = make_node("one", {"i": "request.x"}, params={"shape": "3,1,2"}, gather_from_node="request")
    spec = make_pipeline([gathers], {"y": "one.y"}, libraries=library, demultiply_count=2)
    assert await _codes(spec) == ["PIPELINE_DEMULTIPLY_COUNT_DOES_NOT_MATCH_TENSOR_SHARD_COUNT"]


async def test_a_count_must_be_that_of_the_output(tmp_path: Path) -> None:
    """Where the first dimension is fixed the count is compared with it."""
    model = await load(_plus(1, [3, 1, 2]), tmp_path)
    spec = make_pipeline([_model("one", "request.x", demultiply_count=2)], {"y": "one.a"})
    assert await _codes(spec, m=model) == ["PIPELINE_DEMULTIPLY_COUNT_DOES_NOT_MATCH_TENSOR_SHARD_COUNT"]
    await model.aclose()


async def test_strings_go_neither_split_nor_between_nodes(tmp_path: Path) -> None:
    """Native strings come from the client and go back to it, at most through one model."""
    model = await load(ir.string_passthrough(), tmp_path)
    (name,), (given,) = [spec.name for spec in model.metadata.inputs], [spec.name for spec in model.metadata.outputs]
    nodes = [
        make_node("one", {name: "request.x"}, (given,), model_name="m", demultiply_count=2),
        make_node("two", {name: f"one.{given}"}, (given,), model_name="m"),
    ]
    codes = await _codes(make_pipeline(nodes, {"y": f"two.{given}"}), m=model)
    assert codes[:2] == ["PIPELINE_STRING_DEMUILTIPLICATION_UNSUPPORTED", "NOT_IMPLEMENTED"]
    await model.aclose()


async def test_a_library_that_cannot_be_opened_is_told_with_all_else(tmp_path: Path) -> None:
    """What the library says comes besides what is wrong elsewhere."""
    broken = write_library(tmp_path, "def get_inputs_info(:\n", "broken")
    nodes = [make_node("one", {"i": "request.x"}), _model("two", "one.y", model_name="missing")]
    spec = make_pipeline(nodes, {"y": "two.a"}, libraries={"arithmetic": broken})
    with pytest.raises(ConfigError) as caught:
        async with serving_pipeline(spec):
            pass  # pragma: no cover
    assert "broken.py" in caught.value.message
    assert "PIPELINE_NODE_REFERING_TO_MISSING_MODEL" in caught.value.message
