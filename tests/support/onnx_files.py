"""ONNX files, written without the onnx package."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from tests.support.paddle_files import write_field as _field

_FLOAT, _INT64 = 1, 7
_INTEGER, _TEXT = 2, 3
_TYPES: Final = {"float32": _FLOAT, "int64": _INT64}


class OnnxNode(NamedTuple):
    """Operation: name, inputs, output, and integer attributes."""

    operation: str
    inputs: Sequence[str]
    output: str
    attributes: Mapping[str, int] = {}


class OnnxValue(NamedTuple):
    """Input or output: name, element type and shape; names in the shape are dynamic dimensions."""

    name: str
    kind: str
    shape: Sequence[int | str]


def onnx_graph(
    nodes: Sequence[OnnxNode],
    inputs: Sequence[OnnxValue],
    outputs: Sequence[OnnxValue],
    constants: Mapping[str, np.ndarray[Any, Any]],
) -> bytes:
    graph = b"".join(_field(1, _node(each)) for each in nodes)
    graph += b"".join(_field(5, _constant(name, array)) for name, array in constants.items())
    graph += b"".join(_field(11, _value(each)) for each in inputs) + b"".join(_field(12, _value(e)) for e in outputs)
    return _model(graph, 17)


def onnx_file(operation: str) -> bytes:
    """Write a file of one operation, x FP32 [1,4] -> y."""
    ends = (OnnxValue(name, "float32", (1, 4)) for name in "xy")
    return onnx_graph([OnnxNode(operation, ("x",), "y")], [next(ends)], [next(ends)], {})


def onnx_loss_file(*, weights: str = "") -> bytes:
    """Write a file of a loss that ignores class 0: scores FP32 [2,3], target INT64 [2] -> loss FP32.

    The function that ONNX defines it by has subgraphs.  With ``weights`` the file of that name holds three of them.
    """
    node = b"".join(_field(1, name) for name in (b"scores", b"target", *([b"weights"] if weights else ())))
    node += _field(2, b"loss") + _field(4, b"NegativeLogLikelihoodLoss")
    node += _field(5, _field(1, b"ignore_index") + _field(3, 0) + _field(20, _INTEGER))
    node += _field(5, _field(1, b"reduction") + _field(4, b"mean") + _field(20, _TEXT))
    graph = _field(1, node)
    if weights:
        location = _field(1, b"location") + _field(2, weights.encode())
        graph += _field(
            5, _field(1, 3) + _field(2, _FLOAT) + _field(8, b"weights") + _field(13, location) + _field(14, 1)
        )
    graph += _field(11, _value(OnnxValue("scores", "float32", (2, 3)))) + _field(
        11, _value(OnnxValue("target", "int64", (2,)))
    )
    return _model(graph + _field(12, _value(OnnxValue("loss", "float32", ()))), 22)


EXTERNAL_PLACES: Final = ("initializer", "sparse", "attribute", "attributes", "subgraph", "function", "training")


def onnx_external_file(place: str = "initializer", /, **entries: str) -> bytes:
    """Encode x FP32 [4] + weights FP32 [4] -> y, with weights that have these entries of ``external_data``.

    In another place than ``initializer`` a second tensor has the entries, and nothing refers to that tensor.
    """
    outside = b"".join(_field(13, _field(1, key.encode()) + _field(2, text.encode())) for key, text in entries.items())
    tensor = _field(1, 4) + _field(2, _FLOAT) + _field(8, b"weights") + outside + _field(14, 1)
    node = b"".join(_field(1, name) for name in (b"x", b"weights")) + _field(2, b"y") + _field(4, b"Add")
    rest = b""
    if place == "initializer":
        weights = _field(5, tensor)
    else:
        weights = _field(5, _constant("weights", np.arange(4, dtype=np.float32)))
        graph = _field(5, tensor)
        node += {
            "attribute": _field(5, _field(1, b"a") + _field(5, tensor)),
            "attributes": _field(5, _field(1, b"a") + _field(10, tensor)),
            "subgraph": _field(5, _field(1, b"a") + _field(6, _field(1, _field(5, _field(6, graph))))),
        }.get(place, b"")
        weights += _field(15, _field(1, tensor)) if place == "sparse" else b""
        function = _field(25, _field(7, _field(5, _field(11, graph))))
        rest = {"function": function, "training": _field(20, _field(1, graph))}.get(place, b"")
    ends = [_value(OnnxValue(name, "float32", (4,))) for name in "xy"]
    return _model(_field(1, node) + weights + _field(11, ends[0]) + _field(12, ends[1]), 17) + rest


def _node(node: OnnxNode) -> bytes:
    made = b"".join(_field(1, name.encode()) for name in node.inputs) + _field(2, node.output.encode())
    made += _field(4, node.operation.encode())
    for name, value in node.attributes.items():
        made += _field(5, _field(1, name.encode()) + _field(3, value) + _field(20, _INTEGER))
    return made


def _constant(name: str, array: np.ndarray[Any, Any]) -> bytes:
    sizes = b"".join(_field(1, size) for size in array.shape)
    return sizes + _field(2, _TYPES[array.dtype.name]) + _field(8, name.encode()) + _field(9, array.tobytes())


def _value(value: OnnxValue) -> bytes:
    sizes = b"".join(
        _field(1, _field(1, size) if isinstance(size, int) else _field(2, size.encode())) for size in value.shape
    )
    kind = _field(1, _field(1, _TYPES[value.kind]) + _field(2, sizes))
    return _field(1, value.name.encode()) + _field(2, kind)


def _model(graph: bytes, opset: int) -> bytes:
    return _field(1, 8) + _field(7, graph + _field(2, b"graph")) + _field(8, _field(2, opset))
