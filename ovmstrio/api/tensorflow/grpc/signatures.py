"""What a servable is called with, as TensorFlow's one signature ``serving_default``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ovmstrio.api.tensorflow.tensorflow_types import BY_DATATYPE, INVALID_NUMBER
from ovmstrio.protocol.generated import tensorflow as tf
from ovmstrio.protocol.generated.tensorflow import serving as pb

if TYPE_CHECKING:
    from ovmstrio.core.tensor import TensorSpec
    from ovmstrio.dataplane.plane import ModelMetadata

__all__ = ["describe_signature"]


def describe_signature(model: ModelMetadata) -> pb.SignatureDefMap:
    """Make the signature of a model."""
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
        dtype=tf.DataType(INVALID_NUMBER if row is None else row.number),
        tensor_shape=tf.TensorShapeProto(dim=dims),
    )
