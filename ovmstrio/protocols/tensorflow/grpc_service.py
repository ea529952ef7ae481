"""``tensorflow.serving.PredictionService`` and ``ModelService`` over the data plane.

``Predict`` uses core values, which the codec reads and writes; the other methods use betterproto2 messages.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from google.protobuf.message import DecodeError
from grpclib.const import Cardinality, Handler

from ovmstrio.core.errors import ErrorList, InvalidRequest, NotSupported
from ovmstrio.core.request import Contents, InferInput, InferRequest, RequestedOutput
from ovmstrio.core.tensor import BYTES, RawTensor
from ovmstrio.encoding.generated.google import protobuf
from ovmstrio.encoding.generated.tensorflow import error
from ovmstrio.encoding.generated.tensorflow import serving as pb
from ovmstrio.encoding.messages import POOL, message_class
from ovmstrio.encoding.protobuf_wire import delimited, encode_varint, first_string_field
from ovmstrio.encoding.raw_contents import gather_buffers, raw_contents, split_elements
from ovmstrio.protocols.kserve.grpc_messages import read_elements
from ovmstrio.protocols.tensorflow.types import BY_DATATYPE, BY_NUMBER, describe_signature
from ovmstrio.serving.admission import release_unless_named
from ovmstrio.serving.interfaces import TENSORFLOW_GRPC
from ovmstrio.transport.grpc.call import OrderedHandler, current_call

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ovmstrio.core.request import Buffer, InferResponse
    from ovmstrio.core.tensor import Tensor
    from ovmstrio.encoding.raw_contents import WrittenMessage
    from ovmstrio.protocols.tensorflow.types import TensorFlowType
    from ovmstrio.serving.data_plane import DataPlane
    from ovmstrio.serving.records import VersionStatus
    from ovmstrio.transport.grpc.call import Call

# Messages

_NAME: Final = "tensorflow.serving.PredictRequest"
_Request: Final = message_class(_NAME)
_DATA_TYPES: Final = POOL.FindEnumTypeByName("tensorflow.DataType").values_by_number

_MAX_ENTRIES: Final = 1_024
"""Limit of inputs, filters and dimensions: each takes a few bytes on the wire and hundreds as an object."""

_VALUE_FIELD_TYPES: Final = frozenset({"DT_STRING", "DT_HALF", "DT_UINT16"})
"""Types that OVMS accepts only in value fields; it reports how many values are missing."""

_MAX_BITS: Final = 2**16 - 1


class PredictRequest(InferRequest):
    """Request in TensorFlow's form; its outputs are those in ``output_filter``."""

    __slots__ = ()


def decode_predict(data: bytes) -> PredictRequest:
    """Parse a ``PredictRequest`` or raise ``InvalidRequest``."""
    try:
        message = _Request.FromString(data)
    except DecodeError:
        raise InvalidRequest(
            f"malformed {_NAME}: its {len(data)} bytes are not a protobuf message of that type"
        ) from None
    spec = message.model_spec
    request = PredictRequest(spec.name, str(spec.version.value), received=len(data))
    errors = ErrorList()
    for name, tensor in _bounded(message.inputs, "inputs").items():
        with errors:
            given, raw = _decode_tensor(name, tensor)
            request.inputs.append(given)
            request.raw_inputs.append(raw)
    errors.raise_if_any()
    request.outputs = [RequestedOutput(name) for name in _bounded(message.output_filter, "names in output_filter")]
    return request


def _decode_tensor(name: str, message: Any) -> tuple[InferInput, Buffer | None]:
    """Parse a tensor; consumes the message."""
    shape = tuple(dim.size for dim in _bounded(message.tensor_shape.dim, "dimensions"))
    number = message.dtype
    row = BY_NUMBER.get(number)
    if row is None:
        return InferInput(name, _type_name(number), shape), b""
    datatype = row.datatype
    content = b"" if datatype is BYTES else message.tensor_content
    if content or not (getattr(message, row.values_field) or row.name in _VALUE_FIELD_TYPES):
        return InferInput(name, datatype.name, shape), content
    contents = Contents(datatype.contents_field, _decode_values(name, message, row), repeat_last=datatype is not BYTES)
    return InferInput(name, datatype.name, shape, contents), None


def _decode_values(name: str, message: Any, row: TensorFlowType) -> Sequence[Any] | np.ndarray[Any, Any]:
    if row.datatype is BYTES:
        return list(message.string_val)
    values = read_elements(message, row.values_field, row.values_dtype, packed=row.packed)
    return _half_values(name, values, row.datatype.numpy) if row.values_field == "half_val" else values


def _half_values(name: str, values: Sequence[Any] | np.ndarray[Any, Any], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Convert the bits in ``half_val`` to elements."""
    bits = np.asarray(values, "<i4")
    if bits.size and (bits.min() < 0 or bits.max() > _MAX_BITS):
        raise InvalidRequest(
            "Invalid values in tensor proto container - half_val holds the 16 bits of each number, "
            f"expected 0 to {_MAX_BITS}, got {bits.min()} to {bits.max()}; input name: {name}"
        )
    return bits.astype("<u2").view(dtype)


def _type_name(number: int) -> str:
    known = _DATA_TYPES.get(number)
    return f"DataType {number}" if known is None else str(known.name)


def _bounded(repeated: Any, what: str) -> Any:
    if len(repeated) > _MAX_ENTRIES:
        raise InvalidRequest(f"{_NAME}: expected at most {_MAX_ENTRIES} {what}, got {len(repeated)}")
    return repeated


_Response: Final = message_class("tensorflow.serving.PredictResponse")
_Tensor: Final = message_class("tensorflow.TensorProto")

_OUTPUTS_TAG: Final = b"\x0a"
_KEY_TAG: Final = b"\x0a"
_VALUE_TAG: Final = b"\x12"
_CONTENT_TAG: Final = b"\x22"
_STRING_TAG: Final = b"\x42"


def encode_predict(response: InferResponse) -> WrittenMessage:
    """Encode a ``PredictResponse``; raise ``NotSupported`` if TensorFlow lacks a datatype."""
    parts: list[Buffer] = []
    for tensor in response.outputs:
        key = b"".join(delimited(_KEY_TAG, tensor.name.encode()))
        value = _tensor_parts(tensor)
        size = sum(map(len, value))
        head = key + _VALUE_TAG + encode_varint(size)
        parts += (_OUTPUTS_TAG, encode_varint(len(head) + size), head, *value)
    parts.append(_encode_spec(response.model_name, response.model_version))
    return gather_buffers(parts, response)


def _tensor_parts(tensor: Tensor | RawTensor) -> list[Buffer]:
    """Return the pieces of a ``TensorProto``; all have byte elements, so ``len`` is the size in bytes."""
    name = tensor.datatype if isinstance(tensor, RawTensor) else tensor.datatype.name
    row = BY_DATATYPE.get(name)
    if row is None:
        raise NotSupported(f"output {tensor.name!r}: TensorFlow has no element type {name}; use KServe")
    head = _encode_head(row.number, tensor.shape)
    if row.name == "DT_STRING":
        return [head, *(part for element in _strings(tensor) for part in delimited(_STRING_TAG, element))]
    if row.name == "DT_UINT64":
        return [head, _encode_uint64(tensor, row)]
    return [head, *delimited(_CONTENT_TAG, raw_contents(tensor))]


def _encode_uint64(tensor: Tensor | RawTensor, row: TensorFlowType) -> bytes:
    """Encode numbers in ``uint64_val``, where clients look for ``sequence_id``."""
    values = np.frombuffer(raw_contents(tensor), row.datatype.numpy)
    serialised: bytes = _Tensor(uint64_val=values.tolist()).SerializeToString()
    return serialised


def _strings(tensor: Tensor | RawTensor) -> Sequence[bytes]:
    if not isinstance(tensor, RawTensor):
        flat: Any = tensor.array.flat
        return list(flat)
    elements = split_elements(raw_contents(tensor))
    if elements is None:
        raise NotSupported(f"output {tensor.name!r}: bytes are not length-prefixed strings; use KServe")
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


# Services

_PREDICT: Final = "/tensorflow.serving.PredictionService/Predict"
_SIGNATURE_DEF: Final = "signature_def"


class PredictionService(pb.PredictionServiceBase):
    """Prediction service."""

    def __init__(self, plane: DataPlane) -> None:
        self._plane = plane

    def __mapping__(self) -> dict[str, Handler]:
        """Return the handlers by path."""
        predict = OrderedHandler(self._predict, Cardinality.UNARY_UNARY, bytes, bytes)
        return {**super().__mapping__(), _PREDICT: predict}

    async def _predict(self, call: Call) -> None:
        data: bytes = await call.recv_message()
        if self._plane.has_limits():
            # The first field is the model spec, whose first field is the name.
            name = first_string_field(first_string_field(data))
            answer = partial(self._answer, call, data, name)
            await self._plane.call_admitted(TENSORFLOW_GRPC, name, answer, arrival=call.arrival)
        else:
            await self._answer(call, data)

    async def _answer(self, call: Call, data: bytes, name: bytes = b"") -> None:
        request = decode_predict(data)
        release_unless_named(request.model_name, name)
        request.deadline, request.arrival = call.deadline, call.arrival
        await call.send_message(await self._plane.infer(request, TENSORFLOW_GRPC, _render))

    async def get_model_metadata(self, message: pb.GetModelMetadataRequest) -> pb.GetModelMetadataResponse:
        """Return the signature of a version, or of the default version."""
        spec = message.model_spec
        if spec is None:
            raise InvalidRequest("model_spec missing in request")
        if message.metadata_field != [_SIGNATURE_DEF]:
            raise InvalidRequest(
                f'Invalid signature name - metadata_field: expected only "{_SIGNATURE_DEF}", '
                f"got {message.metadata_field}"
            )
        model = self._plane.model_metadata(spec.name, str(spec.version or 0), TENSORFLOW_GRPC)
        signature = protobuf.Any.pack(describe_signature(model))
        return pb.GetModelMetadataResponse(
            pb.ModelSpec(name=model.name, version=int(model.serving)), {_SIGNATURE_DEF: signature}
        )


class ModelService(pb.ModelServiceBase):
    """Model status service."""

    def __init__(self, plane: DataPlane) -> None:
        self._plane = plane

    async def get_model_status(self, message: pb.GetModelStatusRequest) -> pb.GetModelStatusResponse:
        """Return the state of one version, or of all versions."""
        spec = message.model_spec or pb.ModelSpec()
        statuses = self._plane.model_status(spec.name, spec.version or 0, TENSORFLOW_GRPC)
        return pb.GetModelStatusResponse([_describe(status) for status in statuses])

    async def handle_reload_config_request(self, _: pb.ReloadConfigRequest) -> pb.ReloadConfigResponse:
        """Raise ``NotSupported``: the configuration comes from the configuration file only."""
        raise NotSupported(
            "the configuration comes from the configuration file only; change the file, "
            "then POST /v1/config/reload over REST unless the server watches it"
        )


def _render(response: InferResponse) -> tuple[WrittenMessage, int]:
    if response.parameters:
        current_call().add_trailers(*response.headers)
    data = encode_predict(response)
    return data, len(data)


def _describe(status: VersionStatus) -> pb.ModelVersionStatus:
    return pb.ModelVersionStatus(
        version=status.version,
        state=pb.ModelVersionStatusState(status.state),
        status=pb.StatusProto(error.Code[status.error_code], status.error_code),
    )
