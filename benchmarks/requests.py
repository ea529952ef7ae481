"""Encoded requests for load generators."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, Final

from ovmstrio.encoding.messages import message_class

if TYPE_CHECKING:
    from collections.abc import Mapping


from ovmstrio.core.tensor import Array

__all__ = ["framed_bytes_request", "framed_infer_request", "framed_message", "framed_tensors_request"]

_DATATYPES: Final = {"float32": "FP32", "uint64": "UINT64", "uint32": "UINT32"}


def framed_infer_request(model: str, name: str, array: Array) -> bytes:
    """Encode one ModelInfer request with an FP32 input, with gRPC's five-byte prefix."""
    return framed_tensors_request(model, {name: array})


def framed_tensors_request(model: str, arrays: Mapping[str, Array]) -> bytes:
    """Encode one ModelInfer request with an input of each name, with gRPC's five-byte prefix."""
    request = message_class("inference.ModelInferRequest")(model_name=model)
    for name, array in arrays.items():
        request.inputs.add(name=name, datatype=_DATATYPES[array.dtype.name], shape=array.shape)
        request.raw_input_contents.append(array.tobytes())
    return framed_message(request)


def framed_bytes_request(model: str, name: str, content: bytes) -> bytes:
    """Encode one request with a BYTES input in the form of Python nodes: raw, without lengths."""
    request = message_class("inference.ModelInferRequest")(model_name=model)
    request.inputs.add(name=name, datatype="BYTES", shape=[len(content)])
    request.raw_input_contents.append(content)
    return framed_message(request)


def framed_message(request: Any) -> bytes:
    """Encode a message of Google's protobuf with gRPC's five-byte prefix."""
    body = request.SerializeToString()
    return struct.pack(">BI", 0, len(body)) + bytes(body)
