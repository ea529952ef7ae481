from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino.opset13 as op
import pytest

from ovmstrio.config.shapes import parse_shape_buckets
from ovmstrio.config.specs import BatchingSpec, ModelSpec
from ovmstrio.config.tensor_mapping import NO_MAPPING
from ovmstrio.core.errors import ConfigError
from ovmstrio.inference.compile import enable_dynamic_batch
from ovmstrio.inference.shape_buckets import plan_buckets
from tests.support import ir

AXIS_1 = op.constant(np.array([1], np.int64))


def planned(model: ov.Model, **buckets: Any) -> dict[str, tuple[tuple[int, int], ...]]:
    spec = ModelSpec(name="m", base_path=Path("m"), origin="config.json:3", shape_buckets=parse_shape_buckets(buckets))
    plan = plan_buckets(model, spec, NO_MAPPING, "model.xml")
    assert plan is not None
    return {dimension.name: dimension.outputs for dimension in plan.dimensions}


def problems(model: ov.Model, **buckets: Any) -> list[tuple[str, str]]:
    with pytest.raises(ConfigError) as caught:
        planned(model, **buckets)
    return [(problem.path.removeprefix("shape_buckets."), str(problem)) for problem in caught.value.problems]


def words(count: Any = -1, length: Any = -1) -> tuple[Any, Any, Any]:
    ids, mask = ir.parameter("ids", [count, length]), ir.parameter("mask", [count, length])
    return ids, mask, op.multiply(ids, mask)


def both(length: int, **extra: Any) -> dict[str, Any]:
    return {"sizes": [4, length], "inputs": {"ids": 1, "mask": 1}, **extra}


@pytest.mark.parametrize("sizes", [[1], [2], [1, 2], [31, 32], [2**30]])
def test_any_sizes_of_buckets_are_enough_to_plan(sizes: list[int]) -> None:
    assert planned(ir.dynamic(), batch=sizes) == {"batch": ((0, 0),)}


def test_outputs_that_cannot_be_cut_back_are_refused() -> None:
    ids, mask, product = words()
    outputs = {
        "flat": op.reshape(product, op.constant(np.array([-1], np.int64)), special_zero=False),
        "halves": op.slice(product, *(op.constant(np.array([n], np.int64)) for n in (0, 2**40, 2, 1))),
    }
    found = problems(ir.named_model(outputs, [ids, mask]), words=both(16))
    assert [path for path, _ in found] == ["words", "words"]
    assert "padding of output 'flat' cannot be removed" in found[0][1]
    assert "output 'halves'" in found[1][1]
    assert "2 for 4, 8 for 16" in found[1][1]


def test_configuration_names_outputs_of_unknown_dimensions() -> None:
    count = ir.parameter("count", [], "INT64")
    numbers = op.range(op.constant(np.int64(0)), count, op.constant(np.int64(1)), "i64")
    rows = ir.parameter("rows", [-1, 2])
    model = ir.named_model({"numbers": numbers, "y": op.relu(rows)}, [count, rows])
    batch = {"sizes": [4], "inputs": {"rows": 0}}
    ((path, text),) = problems(model, batch=batch)
    assert path == "batch"
    assert "'numbers' follows: dimension 0 is known at run time only" in text
    assert planned(model, batch={**batch, "outputs": {"y": 0}}) == {"batch": ((1, 0),)}
    assert planned(model, batch={**batch, "outputs": {}}) == {"batch": ()}


def test_missing_input_of_a_dimension_is_reported() -> None:
    ids, mask, product = words()
    ((path, text),) = problems(ir.named_model({"y": product}, [ids, mask]), words={"sizes": [16], "inputs": {"ids": 1}})
    assert path == "words.inputs"
    assert "input 'mask' must have the same size, but is not listed" in text


@pytest.mark.parametrize(
    ("model", "buckets", "path", "problem"),
    [
        (ir.dynamic(), {"sizes": [4], "inputs": {"c": 0}}, "x.inputs", "names a tensor that the model does not have"),
        (ir.dynamic(), {"sizes": [4], "outputs": {"c": 0}}, "x.outputs", "names a tensor that the model does not have"),
        (ir.dynamic(), {"sizes": [4], "inputs": {"b": 2}}, "x.inputs.b", "has no dimension 2 (expected 0 to 1"),
        (ir.dynamic(), {"sizes": [4], "outputs": {"a": 2}}, "x.outputs.a", "has no dimension 2"),
        (ir.dummy((1, -1)), [1, 4], "x.inputs.b", "dimension 0 of the input 'b' is fixed"),
        (ir.dummy((ov.Dimension(1, 8), 3)), [4, 8, 16], "x.inputs.b", "does not accept the size 16"),
        (ir.scalar(), [4], "x", "input 'b' has no batch dimension"),
        (ir.string_passthrough(), [4], "x.inputs.strings", "string inputs cannot be padded"),
        (ir.dummy((-1, 3), layout="CW"), [4], "x", "input 'b' has no batch dimension"),
        (ir.dynamic(), {"sizes": [4], "pad": {"a": 0}}, "x.pad", "names an unknown input of this dimension"),
        (ir.dummy((-1,), datatype="INT8"), {"sizes": [4], "pad": {"b": 200}}, "x.pad.b", "padding value does not fit"),
        (ir.dummy((-1,), datatype="INT64"), {"sizes": [4], "pad": {"b": 0.5}}, "x.pad.b", "padding value does not fit"),
        (ir.dummy((-1,), datatype="FP16"), {"sizes": [4], "pad": {"b": 1e9}}, "x.pad.b", "padding value does not fit"),
        (ir.accumulator(), [4], "", "requires a stateless model"),
    ],
)
def test_invalid_buckets_are_refused(model: ov.Model, buckets: Any, path: str, problem: str) -> None:
    texts = dict(problems(model, x=buckets))
    assert problem in texts[path or "shape_buckets"]


def test_bucket_that_the_model_cannot_take_is_refused() -> None:
    x = ir.parameter("x", [-1, 6])
    fours = op.reshape(x, op.constant(np.array([-1, 4, 6], np.int64)), special_zero=False)
    ((path, text),) = problems(
        ir.named_model({"y": op.reduce_sum(fours, AXIS_1, keep_dims=False)}, [x]), batch={"sizes": [6, 8]}
    )
    assert path == "batch.sizes"
    assert "the model does not accept the size 6" in text


def test_all_problems_are_reported_at_once() -> None:
    paths = [path for path, _ in problems(ir.dummy((1, 2)), a=[4], b={"sizes": [4], "inputs": {"b": 1, "c": 0}})]
    assert paths == ["a.inputs.b", "b.inputs"]


def test_dimension_has_one_set_of_buckets() -> None:
    ((path, text),) = problems(ir.dynamic(), batch=[4], rows={"sizes": [8], "inputs": {"b": 0}})
    assert path == "rows"
    assert "dimension 0 of 'b' is in 'batch' already" in text


def of_rows(build: Callable[[Any], Any], rows: int = 1) -> ov.Model:
    x = op.parameter([rows, 10], np.float32)
    x.output(0).set_names({"x"})
    y = build(x)
    y.output(0).set_names({"y"})
    return ov.Model([op.result(y)], [x], "rows")


def taken(model: ov.Model, largest: int = 16) -> list[str]:
    enable_dynamic_batch(model, BatchingSpec(max_batch_size=largest, batch_timeout_ms=1), NO_MAPPING, "model.xml")
    return [str(port.get_partial_shape()) for port in (*model.inputs, *model.outputs)]


def _rows_last() -> ov.Model:
    model = ir.dummy((2, 3, 4, 5), layout="CHWN")
    model.outputs[0].node.layout = ov.Layout("CHWN")
    return model


@pytest.mark.parametrize(
    ("model", "largest", "shapes"),
    [
        (ir.dummy((1, 10)), 16, ["[1..16,10]"] * 2),
        (ir.dummy((32, 10)), 16, ["[1..16,10]"] * 2),
        (ir.dummy((-1, 10)), 16, ["[?,10]"] * 2),
        (ir.dynamic(), 16, ["[?,?]"] * 2),
        (ir.sum_of_two(), 16, ["[1..16,10]"] * 4),
        (_rows_last(), 16, ["[2,3,4,1..16]"] * 2),
        (ir.dummy((4, 10)), 1, ["[1,10]"] * 2),
    ],
)
def test_batch_dimension_becomes_a_range_unless_it_is_open(model: ov.Model, largest: int, shapes: list[str]) -> None:
    assert taken(model, largest) == shapes


@pytest.mark.parametrize(
    "build",
    [
        lambda x: op.reshape(x, np.array([-1, 10]), special_zero=False),
        lambda x: op.reshape(op.reshape(x, np.array([0, 2, 5]), special_zero=True), np.array([-1, 10]), False),
        lambda x: op.topk(x, op.constant(3), 1, "max", "value").output(0).node,
    ],
)
def test_rows_are_followed_through_reshapes(build: Callable[[Any], Any]) -> None:
    assert taken(of_rows(build))[1].startswith("[1..16,")


@pytest.mark.parametrize(
    ("model", "message", "found"),
    [
        (ir.scalar(), "input 'b' has no batch dimension", "FP32 []"),
        (ir.dummy((3, 4, 5), layout="CHW"), "input 'b' has no batch dimension", "FP32 [3,4,5]"),
        (of_rows(lambda x: op.reduce_mean(x, np.array([0, 1]))), "output 'y' has no batch dimension", "FP32 []"),
        (
            of_rows(lambda x: op.reduce_mean(x, np.array([0]), keep_dims=True)),
            "output 'y' does not have one row",
            "[1,10]",
        ),
        (of_rows(lambda x: op.concat([x, x], 0)), "output 'y' does not have one row", "[[2~32],10]"),
        (
            of_rows(lambda x: op.transpose(op.non_zero(x), np.array([1, 0]))),
            "output 'y' does not have one row",
            "[[0~160],2]",
        ),
        (
            of_rows(lambda x: op.reshape(x, np.array([10, 1]), special_zero=False)),
            "output 'y' does not have one",
            "[10,1]",
        ),
        (
            of_rows(lambda x: op.concat([x, op.constant(np.zeros((32, 1), np.float32))], 1), 32),
            "does not accept another batch size",
            "",
        ),
        (
            of_rows(lambda x: op.reshape(x, np.array([-1, 5]), special_zero=False), -1),
            "output 'y' does not have one",
            "[2~32]",
        ),
    ],
)
def test_models_that_cannot_be_batched_are_refused(model: ov.Model, message: str, found: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        taken(model)
    (problem,) = caught.value.problems
    assert (problem.file, problem.path) == ("model.xml", "batching")
    assert found in problem.found
    assert "leave batching out" in problem.suggestion
