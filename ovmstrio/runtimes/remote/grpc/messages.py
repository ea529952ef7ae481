"""KServe's messages as a client has them: requests in pieces that are not copied, answers whose tensors are views."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
from google.protobuf.message import DecodeError

from ovmstrio.core.datatypes import BY_NAME, BYTES
from ovmstrio.core.errors import InvalidRequest, ModelFailure
from ovmstrio.core.request import InferResponse
from ovmstrio.core.tensor import Dim, RawTensor, Tensor, TensorSpec
from ovmstrio.protocol.descriptors import message_class
from ovmstrio.protocol.parameters import set_parameters
from ovmstrio.protocol.split_messages import delimited, split_raw_contents
from ovmstrio.runtimes.models.buffers import buffer_of, framed, wrapped
from ovmstrio.runtimes.models.contents import to_array

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ovmstrio.core.request import Buffer, Contents, InferInput, InferRequest, ParameterValue

__all__ = ["Message", "buffers_of", "decode_response", "encode_request", "parameters_sent", "tensor_of"]

Message = list["Buffer"]
"""A message in pieces."""

_Request: Final = message_class("inference.ModelInferRequest")
_Response: Final = message_class("inference.ModelInferResponse")
_RAW_INPUT_TAG: Final = b"\x3a"
_RAW_OUTPUT_TAG: Final = 0x32
_SHARED_MEMORY: Final = frozenset({"shared_memory_region", "shared_memory_offset", "shared_memory_byte_size"})
_ABOUT_BODIES: Final = frozenset({"binary_data", "binary_data_size", "binary_data_output"})


def encode_request(request: InferRequest, model: str, version: str) -> Message:
    """Write a ``ModelInferRequest`` for a model of another server; its tensors are the request's own buffers.

    Raises:
        InvalidRequest: values that came one by one are not of their type.
    """
    message = _Request(model_name=model, model_version=version, id=request.id)
    set_parameters(message, parameters_sent(request.parameters))
    for given in request.inputs:
        tensor = message.inputs.add(name=given.name, datatype=given.datatype, shape=given.shape)
        set_parameters(tensor, parameters_sent(given.parameters))
    for output in request.outputs:
        message.outputs.add(name=output.name)
    pieces: Message = [message.SerializeToString()]
    for buffer in buffers_of(request):
        pieces += delimited(_RAW_INPUT_TAG, buffer)
    return pieces


def buffers_of(request: InferRequest) -> list[Buffer]:
    """Give a buffer for each input; values that came one by one are packed, and of those without any there is none.

    Raises:
        InvalidRequest: values are not of their type, or there are more buffers than inputs.
    """
    raws: Sequence[Buffer | None] = request.raw_inputs or [None] * len(request.inputs)
    if len(raws) != len(request.inputs):
        raise InvalidRequest(f"{len(request.inputs)} inputs came with {len(raws)} buffers; expected one an input")
    pairs = zip(request.inputs, raws, strict=True)
    return [_packed(given, given.contents) if raw is None else raw for given, raw in pairs]


def parameters_sent(parameters: dict[str, ParameterValue]) -> dict[str, ParameterValue]:
    """Leave out what is between a client and this server alone: where tensors lie, and how they are written."""
    left_out = parameters.keys() & (_SHARED_MEMORY | _ABOUT_BODIES)
    return {name: value for name, value in parameters.items() if name not in left_out} if left_out else parameters


def _packed(given: InferInput, contents: Contents | None) -> Buffer:
    datatype = BY_NAME.get(given.datatype)
    if datatype is None:
        raise InvalidRequest(f"input {given.name!r}: expected a datatype of {', '.join(BY_NAME)}, got {given.datatype}")
    if datatype is BYTES:
        return framed([] if contents is None else contents.values)
    dims = tuple(map(Dim.fixed, given.shape))
    spec = TensorSpec(given.name, datatype, dims, batch_axis=None)
    return buffer_of(to_array(contents, given.shape, int(np.prod(given.shape, dtype=object)), spec))


def decode_response(data: bytearray) -> InferResponse:
    """Read a ``ModelInferResponse``, whose tensors are views of the message.

    Raises:
        ModelFailure: the bytes are no such message.
    """
    try:
        head, raws = split_raw_contents(data, _RAW_OUTPUT_TAG, "inference.ModelInferResponse")
        message = _Response.FromString(head)
    except (DecodeError, IndexError, InvalidRequest):
        raise ModelFailure(f"an answer of {len(data)} bytes is no inference.ModelInferResponse") from None
    if raws and len(raws) != len(message.outputs):
        raise ModelFailure(f"an answer has {len(message.outputs)} outputs and {len(raws)} buffers")
    outputs = [
        tensor_of(each.name, each.datatype, tuple(each.shape), (raws[index] if raws else None) or _values_of(each))
        for index, each in enumerate(message.outputs)
    ]
    parameters = {
        name: getattr(value, choice)
        for name, value in message.parameters.items()
        if (choice := value.WhichOneof("parameter_choice")) is not None
    }
    return InferResponse(message.model_name, message.model_version, outputs, message.id, parameters, is_private=True)


def tensor_of(name: str, datatype: str, shape: tuple[int, ...], data: Buffer) -> Tensor | RawTensor:
    """Make an output of its bytes: an array over them where they are its elements."""
    known = BY_NAME.get(datatype)
    if known is None or known is BYTES or min(shape, default=0) < 0:
        return RawTensor(name, datatype, shape, data)
    if int(np.prod(shape, dtype=object)) * known.itemsize != len(data):
        raise ModelFailure(f"output {name!r} of {len(data)} bytes is no tensor of {datatype} {list(shape)}")
    return Tensor(name, known, wrapped(data, shape, known.numpy))


def _values_of(output: Any) -> Buffer:
    """Pack an output that came as values one by one."""
    datatype = BY_NAME.get(output.datatype)
    if datatype is None:
        return b""
    values = getattr(output.contents, datatype.contents_field)
    return framed(values) if datatype is BYTES else buffer_of(np.array(values, datatype.numpy))
