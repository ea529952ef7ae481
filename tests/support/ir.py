"""Small models built by code, and version directories made of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino.opset13 as op

TYPES = {
    "BOOL": ov.Type.boolean,
    "INT8": ov.Type.i8,
    "INT16": ov.Type.i16,
    "INT32": ov.Type.i32,
    "INT64": ov.Type.i64,
    "UINT8": ov.Type.u8,
    "UINT16": ov.Type.u16,
    "UINT32": ov.Type.u32,
    "UINT64": ov.Type.u64,
    "FP16": ov.Type.f16,
    "BF16": ov.Type.bf16,
    "FP32": ov.Type.f32,
    "FP64": ov.Type.f64,
    "BYTES": ov.Type.string,
}
"""OpenVINO's element types by KServe's names."""

_MADE_UP = re.compile(r"[A-Z]\w*_\d+")

Shape = Any
"""Sizes, -1 for any, or OpenVINO's own form of a shape."""


def parameter(name: str, shape: Shape, datatype: str = "FP32", layout: str = "") -> Any:
    wanted = shape if isinstance(shape, ov.PartialShape) else ov.PartialShape(list(shape))
    node = op.parameter(wanted, TYPES[datatype])
    node.output(0).set_names({name})
    if layout:
        node.layout = ov.Layout(layout)
    return node


def named_model(outputs: dict[str, Any], parameters: list[Any], name: str = "built") -> ov.Model:
    results = []
    for output, node in outputs.items():
        node.output(0).set_names({output})
        results.append(op.result(node))
    return ov.Model(results, parameters, name)


def dummy(shape: Shape = (1, 10), *, datatype: str = "FP32", layout: str = "", addend: int = 1) -> ov.Model:
    """Input ``b``, output ``a`` = b + ``addend``."""
    b = parameter("b", shape, datatype, layout)
    constant = op.convert(op.constant(addend, dtype=np.int32), TYPES[datatype].get_type_name())
    return named_model({"a": op.add(b, constant)}, [b], "dummy")


def dynamic(rank: int = 2) -> ov.Model:
    """Return :func:`dummy` with dynamic dimensions."""
    return dummy([-1] * rank)


def scalar(datatype: str = "FP32") -> ov.Model:
    """Input ``b`` and output ``a`` = b + 1, both without dimensions."""
    return dummy((), datatype=datatype)


def ones() -> ov.Model:
    """Return a model whose output has ``count`` ones."""
    count = parameter("count", [1], "INT64")
    return named_model({"ones": op.broadcast(op.constant(np.float32(1)), count)}, [count], "ones")


def sum_of_two(shape: Shape = (1, 10)) -> ov.Model:
    """Inputs ``x`` and ``y``, outputs ``difference`` and ``sum``."""
    x, y = parameter("x", shape), parameter("y", shape)
    return named_model({"sum": op.add(x, y), "difference": op.subtract(x, y)}, [x, y], "sum_of_two")


def passthrough(
    datatype: str, shape: Shape = (2, 3), *, layout: str = "", input_name: str = "x", output_name: str = "y"
) -> ov.Model:
    """Output = input, of any datatype but BYTES, through an operation that keeps the two names apart."""
    x = parameter(input_name, shape, datatype, layout)
    # A reshape to its own shape keeps every bit and is not a plain alias of the parameter.
    return named_model({output_name: op.reshape(x, op.shape_of(x), special_zero=False)}, [x], "passthrough")


def string_passthrough(shape: Shape = (-1,)) -> ov.Model:
    """BYTES input ``strings`` given back as BYTES output ``strings``."""
    x = parameter("strings", shape, "BYTES")
    return ov.Model([op.result(x)], [x], "strings")


def image_passthrough(height: int = 4, width: int = 4, datatype: str = "FP32", batch: int = 1) -> ov.Model:
    """NHWC input ``image`` of three channels, given back as ``pixels``."""
    return passthrough(datatype, (batch, height, width, 3), layout="NHWC", input_name="image", output_name="pixels")


def matmul() -> ov.Model:
    """Inputs ``x`` and ``y`` of any shape, output ``z`` their product; fails where the shapes do not agree."""
    x, y = parameter("x", [-1, -1]), parameter("y", [-1, -1])
    return named_model({"z": op.matmul(x, y, transpose_a=False, transpose_b=False)}, [x, y], "matmul")


def reshape_by_data() -> ov.Model:
    """Inputs ``numbers`` [4] and ``shape`` [2], output ``y``: the numbers in that shape, if they fit it."""
    shape, numbers = parameter("shape", [2], "INT64"), parameter("numbers", [4])
    return named_model({"y": op.reshape(numbers, shape, special_zero=False)}, [numbers, shape], "reshape_by_data")


def steps(*, bad: int = 0) -> ov.Model:
    """INT32 input ``step``, output ``numbers``: those below 10 by the step, minus ``bad``.

    A step of 0 divides by it in OpenVINO 2026.4, and ends the process with SIGFPE.
    """
    step = parameter("step", (), "INT32")
    taken = op.subtract(step, op.constant(np.int32(bad)))
    numbers = op.range(op.constant(np.int32(0)), op.constant(np.int32(10)), taken, "i32", name="counting")
    return named_model({"numbers": numbers}, [step], "steps")


def first_string() -> ov.Model:
    """BYTES input ``strings``, output ``first``: a slice, which spoils the heap in OpenVINO 2026.4, and so SIGABRT."""
    strings = parameter("strings", (-1,), "BYTES")
    bounds = [op.constant(np.array([number], np.int64)) for number in (0, 1, 1, 0)]
    return named_model({"first": op.slice(strings, *bounds, name="cutting")}, [strings], "first_string")


def slow(size: int = 512, layers: int = 60) -> ov.Model:
    """Input ``x`` [size, size] through many large products into ``y``: tens to hundreds of milliseconds."""
    x = parameter("x", [size, size])
    weights = op.constant(np.eye(size, dtype=np.float32) + np.float32(1e-6))
    node = x
    for _ in range(layers):
        node = op.matmul(node, weights, transpose_a=False, transpose_b=False)
    return named_model({"y": node}, [x], "slow")


def _memory(name: str, shape: Shape) -> tuple[Any, Any]:
    variable = ov.op.util.VariableInfo()
    variable.data_shape, variable.data_type, variable.variable_id = ov.PartialShape(list(shape)), ov.Type.f32, name
    cell = ov.op.util.Variable(variable)
    start = op.constant(np.zeros(shape, np.float32))
    return op.read_value(start, cell), cell


def accumulator(width: int = 2, *, offset: float = 0.0) -> ov.Model:
    """Input ``x`` [1, width]; output ``y``: the sum of all inputs of the sequence, and ``offset`` besides."""
    x = parameter("x", [1, width])
    before, cell = _memory("total", [1, width])
    total = op.add(before, x)
    model = named_model({"y": op.add(total, op.constant(np.float32(offset)))}, [x], "accumulator")
    model.add_sinks([op.assign(total, cell)])
    return model


def slow_accumulator(size: int = 512, layers: int = 60) -> ov.Model:
    """Return an :func:`accumulator` of [size, size] after large products that take tens of milliseconds."""
    x = parameter("x", [size, size])
    before, cell = _memory("total", [size, size])
    weights = op.constant(np.eye(size, dtype=np.float32))
    node = x
    for _ in range(layers):
        node = op.matmul(node, weights, transpose_a=False, transpose_b=False)
    total = op.add(before, node)
    model = named_model({"y": total}, [x], "slow_accumulator")
    model.add_sinks([op.assign(total, cell)])
    return model


def lstm_weights(features: int, hidden: int) -> tuple[Any, Any, Any]:
    """Make the weights, recurrent weights and biases of :func:`lstm`; the same ones each time."""
    random = np.random.default_rng(7)
    shapes = ((4 * hidden, features), (4 * hidden, hidden), (4 * hidden,))
    weights, recurrent, biases = (random.normal(0, 0.5, shape).astype(np.float32) for shape in shapes)
    return weights, recurrent, biases


def lstm(features: int = 4, hidden: int = 8, *, explicit: bool = False) -> ov.Model:
    """One LSTM cell: input ``x`` [1, features], output ``y`` [1, hidden].

    What it remembers are the variables ``hidden`` and ``cell``, or if ``explicit`` the inputs ``hidden`` and ``cell``
    and the outputs ``next_hidden`` and ``next_cell``.
    """
    x = parameter("x", [1, features])
    weights = [op.constant(array) for array in lstm_weights(features, hidden)]
    if explicit:
        states = [parameter(name, [1, hidden]) for name in ("hidden", "cell")]
        cell = op.lstm_cell(x, *states, *weights, hidden)
        copies = [op.add(cell.output(index), op.constant(np.float32(0))) for index in (0, 1)]
        y = op.add(cell.output(0), op.constant(np.float32(0)))
        return named_model({"y": y, "next_hidden": copies[0], "next_cell": copies[1]}, [x, *states], "lstm")
    (hidden_before, hidden_cell), (cell_before, cell_cell) = (_memory(name, [1, hidden]) for name in ("hidden", "cell"))
    cell = op.lstm_cell(x, hidden_before, cell_before, *weights, hidden)
    y, next_cell = (op.add(cell.output(index), op.constant(np.float32(0))) for index in (0, 1))
    model = named_model({"y": y}, [x], "lstm")
    model.add_sinks([op.assign(y, hidden_cell), op.assign(next_cell, cell_cell)])
    return model


def summing_loop(width: int = 2) -> ov.Model:
    """Input ``x`` [1, 1, width], output ``y`` [1, width]: a TensorIterator that sums over the second axis."""
    x = parameter("x", [1, 1, width])
    step, before = op.parameter([1, 1, width]), op.parameter([1, width])
    total = op.add(before, op.squeeze(step, op.constant(np.array([1], np.int64))))
    body = ov.Model([op.result(total)], [step, before], "body")
    loop = op.tensor_iterator()
    loop.set_body(body)
    loop.set_sliced_input(step, x.output(0), 0, 1, 1, -1, 1)
    loop.set_merged_input(before, op.constant(np.zeros((1, width), np.float32)).output(0), body.results[0].output(0))
    y = loop.get_iter_value(body.results[0].output(0), -1)
    identity = op.add(y, op.constant(np.float32(0)))
    return named_model({"y": identity}, [x], "summing_loop")


def save(model: ov.Model, repository: Path, name: str, version: int = 1) -> Path:
    """Write the model into ``<repository>/<name>/<version>``; gives ``<repository>/<name>``, its base path."""
    directory = repository / name / str(version)
    directory.mkdir(parents=True, exist_ok=True)
    name_by_place(model)
    ov.save_model(model, directory / "model.xml", compress_to_fp16=False)
    return repository / name


def name_by_place(model: ov.Model) -> None:
    """Replace names that OpenVINO has made up, so that equal models are equal files.

    OpenVINO numbers the operations of a process. Verdicts of trials and compiled models are found by a file's content.
    """
    for place, node in enumerate(model.get_ordered_ops()):
        if _MADE_UP.fullmatch(node.get_friendly_name()):
            node.set_friendly_name(f"{node.get_type_name()}_{place}")
