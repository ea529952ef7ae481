"""``PredictResponse``: from an :class:`InferResponse` to the bytes of a message.

A message is joined from serialised pieces, which is the same as merging them; a tensor's bytes are copied once.

::

    outputs: key | value: dtype, tensor_shape | tensor_content      model_spec
                          └─── remembered ───┘                      └─ remembered ─┘
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ovmstrio.api.kserve.grpc.wire_fields import delimited, encode_varint
from ovmstrio.api.raw_contents import raw_contents, split_elements
from ovmstrio.api.tensorflow.tensorflow_types import BY_DATATYPE
from ovmstrio.core.errors import NotSupported
from ovmstrio.core.tensor import RawTensor
from ovmstrio.protocol.descriptors import message_class

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ovmstrio.api.tensorflow.tensorflow_types import TensorFlowType
    from ovmstrio.core.request import Buffer, InferResponse
    from ovmstrio.core.tensor import Tensor

__all__ = ["PredictResponse", "encode_predict"]

_Response: Final = message_class("tensorflow.serving.PredictResponse")
_Tensor: Final = message_class("tensorflow.TensorProto")

_OUTPUTS_TAG: Final = b"\x0a"
_KEY_TAG: Final = b"\x0a"
_VALUE_TAG: Final = b"\x12"
_CONTENT_TAG: Final = b"\x22"
_STRING_TAG: Final = b"\x42"


@dataclass(slots=True)
class PredictResponse:
    """What a servable answered, and the names of the outputs that are wanted of it, none for all of them."""

    response: InferResponse
    output_filter: tuple[str, ...] = ()


def encode_predict(answer: PredictResponse) -> bytes:
    """Write a ``PredictResponse``.

    Raises:
        NotSupported: an output has an element type that TensorFlow has not.
    """
    response = answer.response
    parts: list[Buffer] = []
    for tensor in response.outputs:
        if not answer.output_filter or tensor.name in answer.output_filter:
            key = b"".join(delimited(_KEY_TAG, tensor.name.encode()))
            value = _tensor_parts(tensor)
            size = sum(map(len, value))
            head = key + _VALUE_TAG + encode_varint(size)
            parts += (_OUTPUTS_TAG, encode_varint(len(head) + size), head, *value)
    parts.append(_encode_spec(response.model_name, response.model_version))
    return b"".join(parts)


def _tensor_parts(tensor: Tensor | RawTensor) -> list[Buffer]:
    """Give the pieces of a ``TensorProto``; each is of bytes, so that its length is its size."""
    name = tensor.datatype if isinstance(tensor, RawTensor) else tensor.datatype.name
    row = BY_DATATYPE.get(name)
    if row is None:
        raise NotSupported(f"TensorFlow has no element type {name}, which the output {tensor.name!r} has; use KServe")
    head = _encode_head(row.number, tensor.shape)
    if row.name == "DT_STRING":
        return [head, *(part for element in _strings(tensor) for part in delimited(_STRING_TAG, element))]
    if row.name == "DT_UINT64":
        return [head, _encode_uint64(tensor, row)]
    return [head, *delimited(_CONTENT_TAG, raw_contents(tensor))]


def _encode_uint64(tensor: Tensor | RawTensor, row: TensorFlowType) -> bytes:
    """Write numbers one by one: that is where clients look for ``sequence_id``."""
    values = np.frombuffer(raw_contents(tensor), row.datatype.numpy)
    serialised: bytes = _Tensor(uint64_val=values.tolist()).SerializeToString()
    return serialised


def _strings(tensor: Tensor | RawTensor) -> Sequence[bytes]:
    if not isinstance(tensor, RawTensor):
        flat: Any = tensor.array.flat
        return list(flat)
    elements = split_elements(raw_contents(tensor))
    if elements is None:
        raise NotSupported(
            f"the bytes of the output {tensor.name!r} are no strings, each behind its length; use KServe for them"
        )
    return elements


@lru_cache(maxsize=1024)
def _encode_head(number: int, shape: tuple[int, ...]) -> bytes:
    dims = [{"size": size} for size in shape]
    serialised: bytes = _Tensor(dtype=number, tensor_shape={"dim": dims}).SerializeToString()
    return serialised


@lru_cache(maxsize=1024)
def _encode_spec(name: str, version: str) -> bytes:
    spec = {"name": name, "version": {"value": int(version)}}
    serialised: bytes = _Response(model_spec=spec).SerializeToString()
    return serialised
