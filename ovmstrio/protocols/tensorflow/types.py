"""TensorFlow element types, their value fields in ``TensorProto``, and model signatures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ovmstrio.core.tensor import BY_NAME
from ovmstrio.encoding.generated import tensorflow as tf
from ovmstrio.encoding.generated.tensorflow import serving as pb

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ovmstrio.core.tensor import Datatype, TensorSpec
    from ovmstrio.serving.data_plane import ModelMetadata


def describe_signature(model: ModelMetadata) -> pb.SignatureDefMap:
    """Return the signature of a model."""
    signature = tf.SignatureDef(
        inputs={spec.name: _describe(spec) for spec in model.inputs},
        outputs={spec.name: _describe(spec) for spec in model.outputs},
    )
    return pb.SignatureDefMap({"serving_default": signature})


def _describe(spec: TensorSpec) -> tf.TensorInfo:
    row = BY_DATATYPE.get(spec.datatype.name)
    dims = [tf.TensorShapeProtoDim(size) for size in spec.reported_shape]
    return tf.TensorInfo(
        name=spec.name,
        dtype=tf.DataType(_INVALID_NUMBER if row is None else row.number),
        tensor_shape=tf.TensorShapeProto(dim=dims),
    )


_INVALID_NUMBER: Final = 0


@dataclass(frozen=True, slots=True)
class TensorFlowType:
    """TensorFlow element type, such as ``DT_FLOAT``.

    ``values_field`` of ``TensorProto`` has elements of ``values_dtype`` (``half_val``: the bits); ``packed`` if the
    wire
    format equals numpy's memory layout.
    """

    name: str
    number: int
    datatype: Datatype
    values_field: str
    values_dtype: np.dtype[Any]
    packed: bool = False


def _row(name: str, number: int, datatype: str, field: str, dtype: str, *, packed: bool = False) -> TensorFlowType:
    return TensorFlowType(name, number, BY_NAME[datatype], field, np.dtype(dtype), packed)


_ALL: Final = (
    _row("DT_FLOAT", 1, "FP32", "float_val", "<f4", packed=True),
    _row("DT_DOUBLE", 2, "FP64", "double_val", "<f8", packed=True),
    _row("DT_INT32", 3, "INT32", "int_val", "<i4"),
    _row("DT_UINT8", 4, "UINT8", "int_val", "<i4"),
    _row("DT_INT16", 5, "INT16", "int_val", "<i4"),
    _row("DT_INT8", 6, "INT8", "int_val", "<i4"),
    _row("DT_STRING", 7, "BYTES", "string_val", "O"),
    _row("DT_INT64", 9, "INT64", "int64_val", "<i8"),
    _row("DT_BOOL", 10, "BOOL", "bool_val", "?", packed=True),
    _row("DT_BFLOAT16", 14, "BF16", "half_val", "<i4"),
    _row("DT_UINT16", 17, "UINT16", "int_val", "<i4"),
    _row("DT_HALF", 19, "FP16", "half_val", "<i4"),
    _row("DT_UINT32", 22, "UINT32", "uint32_val", "<u4"),
    _row("DT_UINT64", 23, "UINT64", "uint64_val", "<u8"),
)

BY_NUMBER: Final[Mapping[int, TensorFlowType]] = {row.number: row for row in _ALL}
BY_DATATYPE: Final[Mapping[str, TensorFlowType]] = {row.datatype.name: row for row in _ALL}
