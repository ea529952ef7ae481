"""ONNX files, written without the onnx package."""

from __future__ import annotations

__all__ = ["onnx_file", "onnx_loss_file"]

_FLOAT, _INT64 = 1, 7
_INTEGER, _TEXT = 2, 3


def _varint(value: int) -> bytes:
    low = value & 0x7F
    return bytes([low]) if value == low else bytes([low | 0x80]) + _varint(value >> 7)


def _field(number: int, value: int | bytes) -> bytes:
    """Encode one protobuf field, a number or anything with a length."""
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _tensor(name: str, element_type: int, *shape: int) -> bytes:
    sizes = b"".join(_field(1, _field(1, size)) for size in shape)
    return _field(1, name.encode()) + _field(2, _field(1, _field(1, element_type) + _field(2, sizes)))


def _model(graph: bytes, opset: int) -> bytes:
    return _field(1, 8) + _field(7, graph + _field(2, b"graph")) + _field(8, _field(2, opset))


def onnx_file(operation: str) -> bytes:
    """Write a file of one operation, x FP32 [1,4] -> y."""
    node = _field(1, b"x") + _field(2, b"y") + _field(4, operation.encode())
    ends = _field(11, _tensor("x", _FLOAT, 1, 4)) + _field(12, _tensor("y", _FLOAT, 1, 4))
    return _model(_field(1, node) + ends, 17)


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
    graph += _field(11, _tensor("scores", _FLOAT, 2, 3)) + _field(11, _tensor("target", _INT64, 2))
    return _model(graph + _field(12, _tensor("loss", _FLOAT)), 22)
