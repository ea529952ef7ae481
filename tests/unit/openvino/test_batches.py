from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import openvino as ov
import openvino.opset13 as op
import pytest

from ovmstrio.config.mapping import NO_MAPPING
from ovmstrio.config.specs import BatchingSpec
from ovmstrio.core.errors import ConfigError
from ovmstrio.openvino.batch_ranges import take_batches
from tests.support import ir


def of_rows(build: Callable[[Any], Any], rows: int = 1) -> ov.Model:
    """Make a model of one input ``x`` of ten columns; ``build`` makes its output ``y``."""
    x = op.parameter([rows, 10], np.float32)
    x.output(0).set_names({"x"})
    y = build(x)
    y.output(0).set_names({"y"})
    return ov.Model([op.result(y)], [x], "rows")


def taken(model: ov.Model, largest: int = 16) -> list[str]:
    """Let a model take batches; gives the shapes of its inputs and outputs."""
    take_batches(model, BatchingSpec(max_batch_size=largest, batch_timeout_ms=1), NO_MAPPING, "model.xml")
    return [str(port.get_partial_shape()) for port in (*model.inputs, *model.outputs)]


@pytest.mark.parametrize(
    ("model", "shapes"),
    [
        (ir.dummy((1, 10)), ["[1..16,10]"] * 2),
        (ir.dummy((32, 10)), ["[1..16,10]"] * 2),
        (ir.dummy((-1, 10)), ["[?,10]"] * 2),
        (ir.dynamic(), ["[?,?]"] * 2),
        (ir.sum_of_two(), ["[1..16,10]"] * 4),
        (ir.dummy((2, 3, 4, 5), layout="CHWN"), ["[2,3,4,1..16]", "[2..16,3,4,1..16]"]),
    ],
)
def test_the_batch_dimension_takes_every_batch(model: ov.Model, shapes: list[str]) -> None:
    """A dimension that does not take all of them becomes a range; one that does stays as it is."""
    if "CHWN" in str(model.inputs[0].node.layout).replace(",", ""):
        model.outputs[0].node.layout = ov.Layout("CHWN")
        shapes = ["[2,3,4,1..16]"] * 2
    assert taken(model) == shapes


def test_batches_of_one() -> None:
    """The smallest batching there is leaves a fixed batch of one."""
    assert taken(ir.dummy((4, 10)), 1) == ["[1,10]"] * 2


@pytest.mark.parametrize(
    "build",
    [
        lambda x: op.reshape(x, np.array([-1, 10]), special_zero=False),
        lambda x: op.reshape(op.reshape(x, np.array([0, 2, 5]), special_zero=True), np.array([-1, 10]), False),
        lambda x: op.topk(x, op.constant(3), 1, "max", "value").output(0).node,
    ],
)
def test_outputs_of_as_many_rows(build: Callable[[Any], Any]) -> None:
    """Rows are followed through reshapes."""
    assert taken(of_rows(build))[1].startswith("[1..16,")


@pytest.mark.parametrize(
    ("model", "message", "found"),
    [
        (ir.scalar(), "input 'b' has no batch dimension", "FP32 []"),
        (ir.dummy((3, 4, 5), layout="CHW"), "input 'b' has no batch dimension", "FP32 [3,4,5]"),
        (of_rows(lambda x: op.reduce_mean(x, np.array([0, 1]))), "output 'y' has no batch dimension", "FP32 []"),
        (of_rows(lambda x: op.reduce_mean(x, np.array([0]), keep_dims=True)), "output 'y' has not one row", "[1,10]"),
        (of_rows(lambda x: op.concat([x, x], 0)), "output 'y' has not one row", "[[2~32],10]"),
        (
            of_rows(lambda x: op.transpose(op.non_zero(x), np.array([1, 0]))),
            "output 'y' has not one row",
            "[[0~160],2]",
        ),
        (of_rows(lambda x: op.reshape(x, np.array([10, 1]), special_zero=False)), "output 'y' has not one", "[10,1]"),
        (of_rows(lambda x: op.concat([x, op.constant(np.zeros((32, 1), np.float32))], 1), 32), "of another size", ""),
        (
            of_rows(lambda x: op.reshape(x, np.array([-1, 5]), special_zero=False), -1),
            "output 'y' has not one",
            "[2~32]",
        ),
    ],
)
def test_models_that_cannot_be_batched(model: ov.Model, message: str, found: str) -> None:
    """The error says which tensor is in the way, what it is, and what to do."""
    with pytest.raises(ConfigError, match=message) as caught:
        taken(model)
    (problem,) = caught.value.problems
    assert (problem.file, problem.path) == ("model.xml", "batching")
    assert found in problem.found
    assert "leave batching out" in problem.suggestion
