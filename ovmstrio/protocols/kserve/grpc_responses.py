"""Encoder of ``ModelInferResponse``: from an :class:`InferResponse` to message bytes.

Concatenated protobuf pieces are equivalent to a merged message.  Constant parts of a model's responses are serialised
once and cached; tensor bytes are copied at most once, and not at all if they are large and unshared.

::

    model_name, model_version | id | outputs (names, shapes) | raw_output_contents | raw_output_contents
    └──────── cached ─────────┘        └────── cached ───────┘
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from ovmstrio.core.tensor import RawTensor, Tensor
from ovmstrio.encoding.messages import message_class
from ovmstrio.encoding.parameters import UNSIGNED_FROM, set_parameters
from ovmstrio.encoding.raw_contents import gather_buffers, raw_contents
from ovmstrio.encoding.tensor_slices import delimited, encode_varint, write_varint

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ovmstrio.core.request import Buffer, InferResponse, ParameterValue
    from ovmstrio.core.tensor import SharedMemoryLocation
    from ovmstrio.encoding.raw_contents import WrittenMessage

_Response: Final = message_class("inference.ModelInferResponse")

_ID_TAG: Final = b"\x1a"
_PARAMETER_TAG: Final = b"\x22"
_KEY_TAG: Final = b"\x0a"
_VALUE_TAG: Final = b"\x12"
_INT64_TAG: Final = b"\x10"
_RAW_OUTPUT_TAG: Final = b"\x32"
_ERROR_MESSAGE_TAG: Final = b"\x0a"
_INFER_RESPONSE_TAG: Final = b"\x12"

_UNSIGNED_BITS: Final = 2**64 - 1
_SMALL_BYTES: Final = 16 * 1024  # Size up to which copying twice is cheaper than taking a buffer view


@dataclass(slots=True)
class StreamInferResponse:
    """Message of a response stream: a response, or an error that leaves the stream open."""

    error_message: str = ""
    response: InferResponse | None = None


def encode_response(response: InferResponse) -> WrittenMessage:
    """Encode a ``ModelInferResponse`` with raw output contents."""
    outputs = response.outputs
    if len(outputs) == 1 and type(only := outputs[0]) is Tensor and not response.id and not response.parameters:
        array = only.array
        if array.nbytes <= _SMALL_BYTES and not array.dtype.hasobject:
            model, version = response.model_name, response.model_version
            head = _encode_up_to_raw(model, version, only.name, only.datatype.name, array.shape)
            return b"".join((head, encode_varint(array.nbytes), array.tobytes()))
    return gather_buffers(_response_parts(response), response)


def encode_stream_response(message: StreamInferResponse) -> WrittenMessage:
    """Encode a ``ModelStreamInferResponse``."""
    parts: list[Buffer] = []
    if message.error_message:
        parts += delimited(_ERROR_MESSAGE_TAG, message.error_message.encode(errors="replace"))
    if message.response is not None:
        inner = _response_parts(message.response)
        parts += (_INFER_RESPONSE_TAG, encode_varint(sum(map(len, inner))), *inner)
    return gather_buffers(parts, message.response)


def _response_parts(response: InferResponse) -> list[Buffer]:
    """Return the pieces of the message; all have byte elements, so ``len`` is the size in bytes."""
    outputs = response.outputs
    if len(outputs) == 1 and not response.id and not response.parameters:
        (only,) = outputs
        if isinstance(only, Tensor):
            data = raw_contents(only)
            model, version = response.model_name, response.model_version
            head = _encode_up_to_raw(model, version, only.name, only.datatype_name, only.shape)
            return [head, encode_varint(len(data)), data]
    parts: list[Buffer] = [_encode_model(response.model_name, response.model_version)]
    if response.id:
        parts += delimited(_ID_TAG, response.id.encode())
    if response.parameters:
        parts.append(_encode_parameters(response.parameters))
    for tensor in outputs:
        if isinstance(tensor, RawTensor) and tensor.place is not None:
            parts.append(_encode_placed(tensor.name, tensor.datatype, tuple(tensor.shape), tensor.place))
        else:
            parts.append(_encode_output(tensor.name, tensor.datatype_name, tensor.shape))
    for tensor in outputs:
        data = raw_contents(tensor)
        parts += (_RAW_OUTPUT_TAG, encode_varint(len(data)), data)
    return parts


@lru_cache(maxsize=1024)
def _encode_up_to_raw(model: str, version: str, name: str, datatype: str, shape: tuple[int, ...]) -> bytes:
    """Encode a single-output response up to the size of the raw contents."""
    return _encode_model(model, version) + _encode_output(name, datatype, shape) + _RAW_OUTPUT_TAG


@lru_cache(maxsize=1024)
def _encode_model(name: str, version: str) -> bytes:
    serialised: bytes = _Response(model_name=name, model_version=version).SerializeToString()
    return serialised


@lru_cache(maxsize=1024)
def _encode_output(name: str, datatype: str, shape: tuple[int, ...]) -> bytes:
    output = {"name": name, "datatype": datatype, "shape": shape}
    serialised: bytes = _Response(outputs=[output]).SerializeToString()
    return serialised


@lru_cache(maxsize=1024)
def _encode_placed(name: str, datatype: str, shape: tuple[int, ...], place: SharedMemoryLocation) -> bytes:
    """Encode an output in shared memory, whose raw contents are empty."""
    message = _Response(outputs=[{"name": name, "datatype": datatype, "shape": shape}])
    set_parameters(message.outputs[0], place.parameters)
    serialised: bytes = message.SerializeToString()
    return serialised


def _encode_parameters(parameters: Mapping[str, ParameterValue]) -> bytes:
    if len(parameters) == 1:
        ((name, value),) = parameters.items()
        if type(value) is int and value < UNSIGNED_FROM:
            return _encode_int64_parameter(name, value)
    message = _Response()
    set_parameters(message, parameters)
    serialised: bytes = message.SerializeToString()
    return serialised


def _encode_int64_parameter(name: str, value: int) -> bytes:
    """Encode a single integer by hand: a stream's timestamp differs in every reply."""
    # Negative numbers are encoded as 64-bit two's complement.
    number = write_varint(value & _UNSIGNED_BITS)
    return _int64_parameter_head(name, len(number)) + number


@lru_cache(maxsize=1024)
def _int64_parameter_head(name: str, digits: int) -> bytes:
    key = b"".join(delimited(_KEY_TAG, name.encode()))
    value_head = _VALUE_TAG + encode_varint(len(_INT64_TAG) + digits) + _INT64_TAG
    return _PARAMETER_TAG + encode_varint(len(key) + len(value_head) + digits) + key + value_head
