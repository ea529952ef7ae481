"""Decoder of ``ModelInferRequest`` and encoder of ``ModelInferResponse``.

Google's C parser reads a request; the raw tensors of a large message are views of the received bytes, not copies.

::

    model_name | id | inputs (names, shapes) | raw_input_contents | raw_input_contents
    └────────────── C parser ──────────────┘   └──── view ──────┘   └──── view ──────┘
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from google.protobuf.message import DecodeError

from ovmstrio.core.errors import InvalidRequest
from ovmstrio.core.request import Contents, InferInput, InferRequest, RequestedOutput
from ovmstrio.core.tensor import BY_NAME, RawTensor, Tensor
from ovmstrio.encoding.messages import UNSIGNED_FROM, message_class, set_parameters
from ovmstrio.encoding.protobuf_wire import delimited, encode_varint, split_raw_contents, write_varint
from ovmstrio.encoding.raw_contents import gather_buffers, raw_contents
from ovmstrio.protocols.kserve.request_templates import ProtobufTemplates

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ovmstrio.core.request import Buffer, InferResponse, ParameterValue
    from ovmstrio.core.tensor import SharedMemoryLocation
    from ovmstrio.encoding.raw_contents import WrittenMessage

# ----------------------------------------------------------------------
# Requests
# ----------------------------------------------------------------------

# Parsing

_LIST_MAX_ELEMENTS: Final = 64  # Element count up to which a list is cheaper than an array


def read_elements(
    message: Any, field: str, dtype: np.dtype[Any], *, packed: bool
) -> Sequence[Any] | np.ndarray[Any, Any]:
    """Return the elements of a repeated field; ``packed``: the wire format is numpy's.  Consumes the message."""
    elements = getattr(message, field)
    count = len(elements)
    if count <= _LIST_MAX_ELEMENTS:
        return list(elements)
    if not packed:
        return np.fromiter(elements, dtype, count)
    # Serialised alone, the field is a tag, a length and the elements in numpy's layout.
    for other, _ in message.ListFields():
        if other.name != field:
            message.ClearField(other.name)
    message.DiscardUnknownFields()
    serialised: bytes = message.SerializeToString()
    return np.frombuffer(serialised, dtype, offset=len(serialised) - count * dtype.itemsize)


_Request: Final = message_class("inference.ModelInferRequest")

_VIEW_MIN_BYTES: Final = 32 * 1024  # Message size from which on locating raw tensors is cheaper than copying them

_MAX_ENTRIES: Final = 1_024
"""Limit of dimensions and parameters: an entry takes two bytes on the wire and many as an object."""

_PACKED_DTYPES: Final[Mapping[str, np.dtype[Any]]] = {
    "bool_contents": np.dtype("?"),
    "fp32_contents": np.dtype("<f4"),
    "fp64_contents": np.dtype("<f8"),
}
"""Fields whose wire format equals numpy's memory layout."""

_VARINT_DTYPES: Final[Mapping[str, np.dtype[Any]]] = {
    "int_contents": np.dtype("<i4"),
    "int64_contents": np.dtype("<i8"),
    "uint_contents": np.dtype("<u4"),
    "uint64_contents": np.dtype("<u8"),
}

_REGION: Final = "shared_memory_region"

_MESSAGE: Final = "inference.ModelInferRequest"
_RAW_INPUT_TAG: Final = 0x3A
_templates: Final = ProtobufTemplates(_RAW_INPUT_TAG, _MESSAGE)


def decode_request(data: bytes | memoryview) -> InferRequest:
    """Parse a ``ModelInferRequest``; the raw inputs of a large message are views of ``data``."""
    if len(data) >= _VIEW_MIN_BYTES or not isinstance(data, bytes):
        return _parse(data)
    request = _templates.read(data)
    if request is None:
        request = _parse(data)
        _templates.note(data, request)
    return request


def _parse(data: bytes | memoryview) -> InferRequest:
    try:
        head, views = (
            split_raw_contents(data, _RAW_INPUT_TAG, _MESSAGE) if len(data) >= _VIEW_MIN_BYTES else (data, None)
        )
        message = _Request.FromString(head)
    except (DecodeError, IndexError):
        raise InvalidRequest(
            f"malformed inference.ModelInferRequest: its {len(data)} bytes are not a protobuf message of that type"
        ) from None
    inputs = [_decode_input(tensor) for tensor in message.inputs]
    raws: list[Buffer | None] = list(message.raw_input_contents) if views is None else views
    if len(raws) != len(inputs) and raws:
        raws = _by_position(inputs, raws)
    return InferRequest(
        message.model_name,
        message.model_version,
        message.id,
        _decode_parameters(message.parameters),
        inputs,
        [RequestedOutput(output.name, _decode_parameters(output.parameters)) for output in message.outputs],
        raws,
        received=len(data),
    )


def _by_position(inputs: Sequence[InferInput], raws: list[Buffer | None]) -> list[Buffer | None]:
    """Insert None for inputs in shared memory if exactly these lack raw contents."""
    loaded_keys = [_REGION in given.parameters for given in inputs]
    if loaded_keys.count(False) != len(raws):
        return raws
    rest = iter(raws)
    return [None if is_in_memory else next(rest) for is_in_memory in loaded_keys]


def _decode_input(message: Any) -> InferInput:
    datatype = message.datatype
    return InferInput(
        message.name,
        datatype,
        tuple(_bounded(message.shape, "dimensions")),
        _decode_contents(message.contents, datatype) if message.HasField("contents") else None,
        _decode_parameters(message.parameters),
    )


def _decode_contents(message: Any, datatype: str) -> Contents | None:
    """Return the field that fits the datatype, else the first filled field, which validation reports.

    None if no field is filled: some clients send an empty message in addition to raw contents.
    """
    filled = [field.name for field, _ in message.ListFields()]
    if not filled:
        return None
    known = BY_NAME.get(datatype)
    fitting = known.contents_field if known is not None else ""
    if fitting in filled:
        return Contents(fitting, _decode_elements(message, fitting))
    return Contents(filled[0], _decode_elements(message, filled[0]))


def _decode_elements(message: Any, field: str) -> Sequence[Any] | np.ndarray[Any, Any]:
    if field == "bytes_contents":
        return list(message.bytes_contents)
    packed = _PACKED_DTYPES.get(field)
    if packed is not None:
        return read_elements(message, field, packed, packed=True)
    return read_elements(message, field, _VARINT_DTYPES[field], packed=False)


def _decode_parameters(messages: Any) -> dict[str, ParameterValue]:
    parameters: dict[str, ParameterValue] = {}
    if messages:
        for name, message in _bounded(messages, "parameters").items():
            choice = message.WhichOneof("parameter_choice")
            if choice is not None:
                parameters[name] = getattr(message, choice)
    return parameters


def _bounded(repeated: Any, what: str) -> Any:
    if len(repeated) > _MAX_ENTRIES:
        raise InvalidRequest(
            f"inference.ModelInferRequest: expected at most {_MAX_ENTRIES} {what}, got {len(repeated)}"
        )
    return repeated


# ----------------------------------------------------------------------
# Responses
# ----------------------------------------------------------------------

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
