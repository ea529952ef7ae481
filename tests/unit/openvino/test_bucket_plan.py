from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino.opset13 as op
import pytest

from ovmstrio.config.mapping import NO_MAPPING
from ovmstrio.config.shape_buckets import parse_shape_buckets
from ovmstrio.config.specs import ModelSpec
from ovmstrio.core.errors import ConfigError
from ovmstrio.openvino.bucket_plan import plan_buckets
from tests.support import ir

AXIS_1 = op.constant(np.array([1], np.int64))


def planned(model: ov.Model, **buckets: Any) -> dict[str, tuple[tuple[int, int], ...]]:
    """Plan buckets; gives the axes of outputs that follow each dimension."""
    spec = ModelSpec(name="m", base_path=Path("m"), origin="config.json:3", shape_buckets=parse_shape_buckets(buckets))
    plan = plan_buckets(model, spec, NO_MAPPING, "model.xml")
    assert plan is not None
    return {dimension.name: dimension.outputs for dimension in plan.dimensions}


def problems(model: ov.Model, **buckets: Any) -> list[tuple[str, str]]:
    """Give the paths and texts of what is wrong."""
    with pytest.raises(ConfigError) as caught:
        planned(model, **buckets)
    return [(problem.path.removeprefix("shape_buckets."), str(problem)) for problem in caught.value.problems]


def words(count: Any = -1, length: Any = -1) -> tuple[Any, Any, Any]:
    """Make the inputs ``ids`` and ``mask`` [count, length], and their product."""
    ids, mask = ir.parameter("ids", [count, length]), ir.parameter("mask", [count, length])
    return ids, mask, op.multiply(ids, mask)


def both(length: int, **extra: Any) -> dict[str, Any]:
    """Give a dimension that both inputs have."""
    return {"sizes": [4, length], "inputs": {"ids": 1, "mask": 1}, **extra}


def test_outputs_follow_the_dimensions_that_they_have() -> None:
    """Rows, positions, both, or positions twice, however they get through the model."""
    ids, mask, product = words()
    flat = op.reshape(product, op.constant(np.array([-1], np.int64)), special_zero=False)
    again = op.reshape(flat, op.shape_of(product), special_zero=False)
    outputs = {
        "again": again,
        "first": op.reduce_sum(product, AXIS_1, keep_dims=False),
        "pairs": op.matmul(op.unsqueeze(ids, op.constant(2)), op.unsqueeze(mask, op.constant(1)), False, False),
        "turned": op.transpose(product, op.constant(np.array([1, 0], np.int64))),
    }
    model = ir.named_model(outputs, [ids, mask])
    assert planned(model, batch=[2, 8], words=both(16)) == {
        "batch": ((0, 0), (1, 0), (2, 0), (3, 1)),
        "words": ((0, 1), (2, 1), (2, 2), (3, 0)),
    }
    assert [str(port.partial_shape) for port in model.inputs] == ["[?,?]", "[?,?]"]


def test_other_open_dimensions_tell_nothing() -> None:
    """They stay out of it, though the model's shapes are open all over."""
    ids, mask, product = words()
    model = ir.named_model({"y": product}, [ids, mask])
    assert planned(model, batch=[1]) == {"batch": ((0, 0),)}
    assert planned(model, words=both(16)) == {"words": ((0, 1),)}


@pytest.mark.parametrize("sizes", [[1], [2], [1, 2], [31, 32], [2**30]])
def test_few_and_large_buckets_are_enough_to_tell(sizes: list[int]) -> None:
    """Sizes that are no buckets are looked at as well."""
    assert planned(ir.dynamic(), batch=sizes) == {"batch": ((0, 0),)}


def test_what_cannot_be_cut_back_is_refused() -> None:
    """All rows in a line, each second position, and sums over rows of two dimensions."""
    ids, mask, product = words()
    outputs = {
        "flat": op.reshape(product, op.constant(np.array([-1], np.int64)), special_zero=False),
        "halves": op.slice(product, *(op.constant(np.array([n], np.int64)) for n in (0, 2**40, 2, 1))),
    }
    told = problems(ir.named_model(outputs, [ids, mask]), words=both(16))
    assert [path for path, _ in told] == ["words", "words"]
    assert "the output 'flat' follows in a way that cannot be cut back" in told[0][1]
    assert "the output 'halves'" in told[1][1]
    assert "2 for 4, 8 for 16" in told[1][1]


def test_what_nobody_can_tell_may_be_said() -> None:
    """Where as many numbers come as the values of an input say, the user names what follows, or nothing."""
    count = ir.parameter("count", [], "INT64")
    numbers = op.range(op.constant(np.int64(0)), count, op.constant(np.int64(1)), "i64")
    rows = ir.parameter("rows", [-1, 2])
    model = ir.named_model({"numbers": numbers, "y": op.relu(rows)}, [count, rows])
    batch = {"sizes": [4], "inputs": {"rows": 0}}
    ((path, text),) = problems(model, batch=batch)
    assert path == "batch"
    assert "'numbers' follows, as dimension 0 is known at run time only" in text
    assert planned(model, batch={**batch, "outputs": {"y": 0}}) == {"batch": ((1, 0),)}
    assert planned(model, batch={**batch, "outputs": {}}) == {"batch": ()}


def test_an_input_that_has_to_follow_and_is_not_named_is_told() -> None:
    """It would fit no padded request."""
    ids, mask, product = words()
    ((path, text),) = problems(ir.named_model({"y": product}, [ids, mask]), words={"sizes": [16], "inputs": {"ids": 1}})
    assert path == "words.inputs"
    assert "the input 'mask' has to have the same size, and is not named" in text


@pytest.mark.parametrize(
    ("model", "buckets", "path", "told"),
    [
        (ir.dynamic(), {"sizes": [4], "inputs": {"c": 0}}, "x.inputs", "names a tensor that the model does not have"),
        (ir.dynamic(), {"sizes": [4], "outputs": {"c": 0}}, "x.outputs", "names a tensor that the model does not have"),
        (ir.dynamic(), {"sizes": [4], "inputs": {"b": 2}}, "x.inputs.b", "has no dimension 2 (expected 0 to 1"),
        (ir.dynamic(), {"sizes": [4], "outputs": {"a": 2}}, "x.outputs.a", "has no dimension 2"),
        (ir.dummy((1, -1)), [1, 4], "x.inputs.b", "dimension 0 of the input 'b' is fixed"),
        (ir.dummy((ov.Dimension(1, 8), 3)), [4, 8, 16], "x.inputs.b", "does not take the size 16"),
        (ir.scalar(), [4], "x", "input 'b' has no batch dimension"),
        (ir.string_passthrough(), [4], "x.inputs.strings", "texts cannot be padded"),
        (ir.dummy((-1, 3), layout="CW"), [4], "x", "input 'b' has no batch dimension"),
        (ir.dynamic(), {"sizes": [4], "pad": {"a": 0}}, "x.pad", "names what is no input of this dimension"),
        (ir.dummy((-1,), datatype="INT8"), {"sizes": [4], "pad": {"b": 200}}, "x.pad.b", "cannot have this value"),
        (ir.dummy((-1,), datatype="INT64"), {"sizes": [4], "pad": {"b": 0.5}}, "x.pad.b", "cannot have this value"),
        (ir.dummy((-1,), datatype="FP16"), {"sizes": [4], "pad": {"b": 1e9}}, "x.pad.b", "cannot have this value"),
        (ir.accumulator(), [4], "", "would remember what was padded"),
    ],
)
def test_what_a_model_cannot_have_is_told(model: ov.Model, buckets: Any, path: str, told: str) -> None:
    """By the setting that is wrong, with what is possible."""
    texts = dict(problems(model, x=buckets))
    assert told in texts[path or "shape_buckets"]


def test_a_bucket_that_the_model_cannot_take_is_told() -> None:
    """A reshape inside knows which sizes are possible."""
    x = ir.parameter("x", [-1, 6])
    fours = op.reshape(x, op.constant(np.array([-1, 4, 6], np.int64)), special_zero=False)
    ((path, text),) = problems(
        ir.named_model({"y": op.reduce_sum(fours, AXIS_1, keep_dims=False)}, [x]), batch={"sizes": [6, 8]}
    )
    assert path == "batch.sizes"
    assert "the model cannot take the size 6" in text


def test_everything_wrong_is_told_at_once() -> None:
    """Each dimension and input has a problem of its own."""
    paths = [path for path, _ in problems(ir.dummy((1, 2)), a=[4], b={"sizes": [4], "inputs": {"b": 1, "c": 0}})]
    assert paths == ["a.inputs.b", "b.inputs"]


def test_a_dimension_has_one_set_of_buckets() -> None:
    """The batch dimension of all inputs is that of each."""
    ((path, text),) = problems(ir.dynamic(), batch=[4], rows={"sizes": [8], "inputs": {"b": 0}})
    assert path == "rows"
    assert "dimension 0 of 'b' is in 'batch' already" in text
