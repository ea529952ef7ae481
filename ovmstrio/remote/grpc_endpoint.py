"""KServe v2 gRPC client of a remote model: message encoding and the endpoint.

Requests are encoded without a copy of their tensors; response tensors are views of the message.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

import numpy as np
import trio
from google.protobuf.message import DecodeError
from grpclib.const import Status

from ovmstrio.core.errors import InvalidRequest, ModelFailure, NotReady, PayloadTooLarge
from ovmstrio.core.request import InferResponse
from ovmstrio.core.tensor import BY_NAME, BYTES, Dim, RawTensor, Tensor, TensorSpec
from ovmstrio.encoding.messages import message_class
from ovmstrio.encoding.parameters import set_parameters
from ovmstrio.encoding.raw_contents import buffer_of, framed, wrapped
from ovmstrio.encoding.status_errors import error_of_grpc
from ovmstrio.encoding.tensor_slices import delimited, split_raw_contents
from ovmstrio.models.tensor_contents import to_array
from ovmstrio.remote.connect import connect
from ovmstrio.remote.endpoint import NotSent, RemoteDescription, append_address, make_tensor_spec
from ovmstrio.remote.grpc_client import RemoteConnection, encode_literal_header
from ovmstrio.telemetry.spans import current_or_event_span

if TYPE_CHECKING:
    import ssl
    from collections.abc import Sequence

    from ovmstrio.config.remote_entries import RemoteAddress, RemoteSpec
    from ovmstrio.core.request import Buffer, Contents, InferInput, InferRequest, ParameterValue
    from ovmstrio.remote.grpc_client import Exchange

# Messages

Message = list["Buffer"]
"""Encoded message in pieces."""

_Request: Final = message_class("inference.ModelInferRequest")
_Response: Final = message_class("inference.ModelInferResponse")
_RAW_INPUT_TAG: Final = b"\x3a"
_RAW_OUTPUT_TAG: Final = 0x32
_SHARED_MEMORY: Final = frozenset({"shared_memory_region", "shared_memory_offset", "shared_memory_byte_size"})
_BINARY_PARAMETERS: Final = frozenset({"binary_data", "binary_data_size", "binary_data_output"})


def encode_request(request: InferRequest, model: str, version: str) -> Message:
    """Encode a ``ModelInferRequest`` without a copy of tensors; InvalidRequest for values of wrong types."""
    message = _Request(model_name=model, model_version=version, id=request.id)
    set_parameters(message, remote_parameters(request.parameters))
    for given in request.inputs:
        tensor = message.inputs.add(name=given.name, datatype=given.datatype, shape=given.shape)
        set_parameters(tensor, remote_parameters(given.parameters))
    for output in request.outputs:
        message.outputs.add(name=output.name)
    pieces: Message = [message.SerializeToString()]
    for buffer in input_buffers(request):
        pieces += delimited(_RAW_INPUT_TAG, buffer)
    return pieces


def input_buffers(request: InferRequest) -> list[Buffer]:
    """Return the data of each input, packed from element values where needed; raises InvalidRequest."""
    raws: Sequence[Buffer | None] = request.raw_inputs or [None] * len(request.inputs)
    if len(raws) != len(request.inputs):
        raise InvalidRequest(f"expected {len(request.inputs)} raw inputs, got {len(raws)}")
    pairs = zip(request.inputs, raws, strict=True)
    return [_pack(given, given.contents) if raw is None else raw for given, raw in pairs]


def remote_parameters(parameters: dict[str, ParameterValue]) -> dict[str, ParameterValue]:
    """Remove parameters that concern only this server: shared memory and binary encoding."""
    removed = parameters.keys() & (_SHARED_MEMORY | _BINARY_PARAMETERS)
    return {name: value for name, value in parameters.items() if name not in removed} if removed else parameters


def _pack(given: InferInput, contents: Contents | None) -> Buffer:
    datatype = BY_NAME.get(given.datatype)
    if datatype is None:
        raise InvalidRequest(f"input {given.name!r}: expected a datatype of {', '.join(BY_NAME)}, got {given.datatype}")
    if datatype is BYTES:
        return framed([] if contents is None else contents.values)
    dims = tuple(map(Dim.fixed, given.shape))
    spec = TensorSpec(given.name, datatype, dims, batch_axis=None)
    return buffer_of(to_array(contents, given.shape, int(np.prod(given.shape, dtype=object)), spec))


def decode_response(data: bytearray) -> InferResponse:
    """Decode a ``ModelInferResponse``, whose tensors are views of the message; ModelFailure if malformed."""
    try:
        head, raws = split_raw_contents(data, _RAW_OUTPUT_TAG, "inference.ModelInferResponse")
        message = _Response.FromString(head)
    except (DecodeError, IndexError, InvalidRequest):
        raise ModelFailure(f"response of {len(data)} bytes is not an inference.ModelInferResponse") from None
    if raws and len(raws) != len(message.outputs):
        raise ModelFailure(f"response has {len(message.outputs)} outputs and {len(raws)} buffers")
    outputs = [
        make_output(
            each.name, each.datatype, tuple(each.shape), (raws[index] if raws else None) or _pack_contents(each)
        )
        for index, each in enumerate(message.outputs)
    ]
    parameters = {
        name: getattr(value, choice)
        for name, value in message.parameters.items()
        if (choice := value.WhichOneof("parameter_choice")) is not None
    }
    return InferResponse(message.model_name, message.model_version, outputs, message.id, parameters, is_private=True)


def make_output(name: str, datatype: str, shape: tuple[int, ...], data: Buffer) -> Tensor | RawTensor:
    """Return an output over its data, as an array if the datatype allows it."""
    known = BY_NAME.get(datatype)
    if known is None or known is BYTES or min(shape, default=0) < 0:
        return RawTensor(name, datatype, shape, data)
    if int(np.prod(shape, dtype=object)) * known.itemsize != len(data):
        raise ModelFailure(f"output {name!r}: {len(data)} bytes do not match {datatype} {list(shape)}")
    return Tensor(name, known, wrapped(data, shape, known.numpy))


def _pack_contents(output: Any) -> Buffer:
    datatype = BY_NAME.get(output.datatype)
    if datatype is None:
        return b""
    values = getattr(output.contents, datatype.contents_field)
    return framed(values) if datatype is BYTES else buffer_of(np.array(values, datatype.numpy))


# Endpoint

_SERVICE: Final = b"/inference.GRPCInferenceService/"
_MAX_BYTES: Final = 2**31 - 1
_HEAD_BYTES: Final = 64 * 1024
"""Most bytes of a response without its tensors."""
_MAX_MILLISECONDS: Final = 99_999_999
_HTTP_STATUSES: Final = {
    "400": "INTERNAL",
    "401": "UNAUTHENTICATED",
    "403": "PERMISSION_DENIED",
    "404": "UNIMPLEMENTED",
    "429": "UNAVAILABLE",
    "502": "UNAVAILABLE",
    "503": "UNAVAILABLE",
    "504": "UNAVAILABLE",
}


class GrpcEndpoint:
    """gRPC endpoint with one connection, opened on demand in the nursery ``tasks``; plain TCP without ``tls``."""

    def __init__(
        self, spec: RemoteSpec, address: RemoteAddress, tasks: trio.Nursery, tls: ssl.SSLContext | None
    ) -> None:
        self.address = str(address)
        self._spec = spec
        self._remote_address = address
        self._tasks = tasks
        self._tls = tls
        self._connection: RemoteConnection | None = None
        self._connecting = trio.Lock()

    async def infer(self, request: InferRequest, seconds: float) -> InferResponse:
        """Run one inference, as :meth:`Endpoint.infer`."""
        body = encode_request(request, self._spec.remote_name, self._spec.remote_version)
        most = min(request.most_bytes + _HEAD_BYTES, _MAX_BYTES)
        try:
            return decode_response(await self._call(b"ModelInfer", body, seconds, most))
        except ModelFailure as error:
            raise append_address(error, self.address) if self.address not in error.message else error from None

    async def describe(self) -> RemoteDescription:
        """Return the model's metadata."""
        answer = await self._ask("ModelMetadata", "name", "version")
        inputs, outputs = (
            tuple(
                sorted(
                    (make_tensor_spec(each.name, each.datatype, each.shape) for each in side),
                    key=lambda each: each.name,
                )
            )
            for side in (answer.inputs, answer.outputs)
        )
        return RemoteDescription(answer.platform, inputs, outputs)

    async def unready_reason(self) -> str:
        """Return why the model cannot be called; empty if it can."""
        answer = await self._ask("ModelReady", "name", "version")
        return "" if answer.ready else f"{self._spec.remote_name!r} is not ready there"

    def doubt(self) -> None:
        """Close the connection, which may be dead."""
        if self._connection is not None:
            self._connection.break_off("no response for too long")

    async def aclose(self) -> None:
        """Close the connection; does not wait."""
        if self._connection is not None:
            self._connection.break_off("the model was unloaded")

    async def _ask(self, method: str, name: str, version: str) -> Any:
        request = message_class(f"inference.{method}Request")(
            **{name: self._spec.remote_name, version: self._spec.remote_version}
        )
        body = [request.SerializeToString()]
        data = await self._call(method.encode(), body, self._spec.timeout_seconds, _MAX_BYTES)
        try:
            return message_class(f"inference.{method}Response").FromString(bytes(data))
        except DecodeError:
            raise ModelFailure(f"{self.address} is not a KServe v2 server") from None

    async def _call(self, method: bytes, body: Sequence[Buffer], seconds: float, most: float) -> bytearray:
        size = sum(map(len, body))
        message = [b"\0" + size.to_bytes(4, "big"), *body]
        path = encode_literal_header(b":path", _SERVICE + method)
        headers = self._first_headers + path + self._last_headers + _timeout(seconds) + _trace()
        connection = await self._get_connection()
        exchange = await connection.call(headers, message, most)
        if exchange.is_untouched and not exchange.id:
            # An idle connection may have been closed unnoticed, so try a new one.
            connection = await self._get_connection()
            exchange = await connection.call(headers, message, most)
        return self._message(exchange, most)

    async def _get_connection(self) -> RemoteConnection:
        connection = self._connection
        if connection is not None and connection.accepts_calls:
            return connection
        async with self._connecting:
            if self._connection is not None and self._connection.accepts_calls:
                return self._connection
            stream = await connect(
                self._remote_address,
                self._tls,
                server_name=self._spec.tls.server_name,
                seconds=self._spec.connect_seconds,
            )
            connection = RemoteConnection(stream)
            await self._tasks.start(connection.run)
            self._connection = connection
            return connection

    @cached_property
    def _first_headers(self) -> bytes:
        scheme = b"https" if self._remote_address.has_tls else b"http"
        authority = (self._spec.tls.server_name or self._remote_address.authority).encode()
        pairs = ((b":method", b"POST"), (b":scheme", scheme), (b":authority", authority))
        return b"".join(encode_literal_header(name, value) for name, value in pairs)

    @cached_property
    def _last_headers(self) -> bytes:
        pairs = ((b"te", b"trailers"), (b"content-type", b"application/grpc"), (b"user-agent", b"ovmstrio"))
        return b"".join(encode_literal_header(name, value) for name, value in pairs)

    def _message(self, exchange: Exchange, most: float) -> bytearray:
        if exchange.is_too_large:
            raise PayloadTooLarge(
                f"response of {self.address} has {exchange.size} bytes, the limit is {most:.0f} (--max_message_size)"
            )
        if exchange.failure:
            failure = NotSent if exchange.is_untouched else NotReady
            raise failure(f"no response from {self.address}: {exchange.failure}")
        headers = exchange.headers
        code = headers.get("grpc-status", "")
        if code == "0":
            if not exchange.is_whole or exchange.message is None:
                raise ModelFailure(f"{self.address} sent an incomplete message")
            return exchange.message
        if not code.isdecimal():
            status = headers.get(":status", "")
            text = f"{self.address} is not a gRPC server (HTTP status {status or 'unknown'})"
            raise error_of_grpc(_HTTP_STATUSES.get(status, "UNKNOWN"), text)
        known = {status.value: status.name for status in Status}
        text = unquote(headers.get("grpc-message", "")) or "no error message"
        raise append_address(error_of_grpc(known.get(int(code), "UNKNOWN"), text), self.address)


def _trace() -> bytes:
    span = current_or_event_span()
    if span is None:
        return b""
    return b"".join(encode_literal_header(name.encode(), value.encode()) for name, value in span.headers())


def _timeout(seconds: float) -> bytes:
    if seconds == math.inf:
        return b""
    milliseconds = max(1, min(round(seconds * 1000), _MAX_MILLISECONDS))
    return encode_literal_header(b"grpc-timeout", b"%dm" % milliseconds)
