"""KServe v2 gRPC client of a remote model: messages, connection and endpoint.

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
from ovmstrio.encoding.messages import message_class, set_parameters
from ovmstrio.encoding.protobuf_wire import delimited, split_raw_contents
from ovmstrio.encoding.raw_contents import buffer_of, framed, wrapped
from ovmstrio.encoding.status_errors import error_of_grpc
from ovmstrio.models.tensor_contents import bytes_elements, to_array
from ovmstrio.remote.endpoint import NotSent, RemoteDescription, append_address, connect, make_tensor_spec
from ovmstrio.telemetry.spans import current_or_event_span
from ovmstrio.transport.direct_stream import close_forcefully, send_buffers, to_direct_stream
from ovmstrio.transport.grpc.frames import ConnectionFault, ErrorCode
from ovmstrio.transport.grpc.headers import encode_header
from ovmstrio.transport.grpc.http2 import (
    ClientCore,
    DataReceived,
    GoAwayReceived,
    HeadersReceived,
    StreamReset,
    WindowOpened,
)
from ovmstrio.transport.grpc.limits import CLIENT_LIMITS
from ovmstrio.transport.grpc.messages import PREFIX_BYTES, message_prefix
from ovmstrio.transport.grpc.senders import BlockedSenders, Wakeup
from ovmstrio.transport.send_budget import SendBudget
from ovmstrio.util.buffers import PiecedMessage

if TYPE_CHECKING:
    import ssl
    from collections.abc import Sequence

    from ovmstrio.config.remote_entries import RemoteAddress, RemoteSpec
    from ovmstrio.core.request import Buffer, Contents, InferInput, InferRequest, ParameterValue
    from ovmstrio.transport.grpc.http2 import Event, StreamState

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
    dims = tuple(map(Dim.fixed, given.shape))
    spec = TensorSpec(given.name, datatype, dims, batch_axis=None)
    if datatype is BYTES:
        return framed(bytes_elements(given, None, spec))
    return buffer_of(to_array(contents, given.shape, int(np.prod(given.shape, dtype=object)), spec))


def decode_response(data: Buffer) -> InferResponse:
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


# Connection

_READ_BYTES: Final = 256 * 1024
_GOAWAY_SECONDS: Final = 1.0
_MAX_JOINED_BYTES: Final = 64 * 1024
_NO_MORE_CALLS: Final = "the server takes no more calls on this connection"


class Exchange:
    """One call and its outcome.

    Attributes:
        headers: response headers and trailers.
        message: the response message, if exactly one complete message was received.
        failure: reason of an end before the trailers; empty otherwise.
        is_untouched: whether the server did not process the call.
        excess_bytes: size of a response message that exceeds ``limit``; 0 otherwise.
    """

    __slots__ = (
        "excess_bytes",
        "failure",
        "has_ended",
        "headers",
        "is_untouched",
        "message",
        "most",
        "sending",
        "stream",
        "wakeup",
    )

    def __init__(self, stream: StreamState, limit: float) -> None:
        self.stream = stream
        self.most = limit
        self.headers: dict[str, str] = {}
        self.message: memoryview | None = None
        self.failure = ""
        self.is_untouched = self.has_ended = False
        self.excess_bytes = 0
        self.wakeup = Wakeup()
        self.sending: trio.CancelScope | None = None

    def end(self, failure: str = "", *, is_untouched: bool = False) -> None:
        """Record the outcome and wake the caller; only the first end counts."""
        if self.has_ended:
            return
        self.has_ended, self.failure, self.is_untouched = True, failure, is_untouched
        if self.sending is not None:
            self.sending.cancel()
        self.wakeup.wake()

    def read(self) -> bool:
        """Handle new data; return whether the rest of the response must be refused."""
        buffer = self.stream.buffer
        size = buffer.wanted - PREFIX_BYTES
        if size > self.most:
            self.excess_bytes = size
            self.end()
        elif 0 < buffer.wanted < buffer.size:
            self.end("the server sent more than one message")
        elif self.stream.is_remote_closed:
            if 0 < buffer.wanted <= buffer.size and (taken := buffer.take_writable()):
                is_compressed, self.message = taken
                self.end(
                    "the server compressed the message, which the request does not accept" if is_compressed else ""
                )
            self.end()
            return False
        return self.has_ended


class RemoteConnection:
    """HTTP/2 connection for unary calls: a reader task, a writer task, and callers that wait for exchanges.

    :meth:`run` closes the stream at its end.
    """

    def __init__(self, stream: trio.abc.Stream) -> None:
        self._stream = to_direct_stream(stream)
        self._core = ClientCore(CLIENT_LIMITS, trio.current_time)
        self._exchanges: dict[int, Exchange] = {}
        self._share = SendBudget().share()
        self._write_wakeup = Wakeup()
        self._senders = BlockedSenders(
            self._core, self._share, CLIENT_LIMITS.write_high_water_bytes, self._write_wakeup.wake
        )
        self._waiting = trio.lowlevel.ParkingLot()
        self._scope = trio.CancelScope()
        self._close_reason = ""
        self._is_leaving = False

    @property
    def refusal_reason(self) -> str:
        """Why the connection accepts no new calls; empty if it does."""
        return self._close_reason or (_NO_MORE_CALLS if self._is_leaving or self._core.is_exhausted else "")

    def break_off(self, reason: str) -> None:
        """Close the connection and fail all its calls with the reason."""
        self._close_reason = self._close_reason or reason
        self._scope.cancel()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Read and write until the connection ends; then all calls have ended."""
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._write)
                    task_status.started()
                    await self._read()
        finally:
            self._close_reason = self._close_reason or "the connection was closed"
            for exchange in self._exchanges.values():
                exchange.end(self._close_reason)
            self._waiting.unpark_all()
            with trio.CancelScope(shield=True):
                await close_forcefully(self._stream)

    async def call(self, headers: bytes, body: Sequence[Buffer], limit: float) -> Exchange | None:
        """Make a call and return its exchange after it has ended; None if the connection accepts no calls.

        ``headers`` is a header block, ``body`` the message in pieces, which must stay unchanged until this returns.
        Cancellation cancels the call on the server.
        """
        while not self.refusal_reason and not self._core.has_room:
            await self._waiting.park()
        if self.refusal_reason:
            return None
        stream = self._core.begin(headers)
        exchange = self._exchanges[stream.stream_id] = Exchange(stream, limit)
        try:
            await self._send(exchange, PiecedMessage(body))
            while not exchange.has_ended:
                await exchange.wakeup.wait()
        finally:
            del self._exchanges[stream.stream_id]
            self._core.release(stream)
            self._write_wakeup.wake()
            self._waiting.unpark_all()
        return exchange

    async def _send(self, exchange: Exchange, message: PiecedMessage) -> None:
        core, stream, prefix = self._core, exchange.stream, message_prefix(len(message))
        is_small, limit = len(message) <= _MAX_JOINED_BYTES, CLIENT_LIMITS.write_high_water_bytes
        if not is_small or not core.send_answer(stream, b"", prefix, message.joined(), limit):
            with trio.CancelScope() as exchange.sending:
                await self._senders.send(stream, prefix, message)
        if not exchange.has_ended:
            core.end_request(stream)
        self._write_wakeup.wake()

    async def _read(self) -> None:
        core = self._core
        try:
            while data := await self._stream.receive_some(_READ_BYTES):
                self._handle(core.receive(data))
                while core.more:
                    await trio.lowlevel.checkpoint()
                    self._handle(core.go_on())
            self.break_off("the server closed the connection")
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            self.break_off(f"the connection broke: {error.__cause__ or error}")
        except ConnectionFault as fault:
            core.fail(fault)
            self._close_reason = self._close_reason or f"the server violates HTTP/2: {fault}"
            # The writer sends GOAWAY and ends the connection.
            self._write_wakeup.wake()
            self._scope.deadline = trio.current_time() + _GOAWAY_SECONDS
            await trio.sleep_forever()

    def _handle(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, HeadersReceived | DataReceived | StreamReset):
                exchange = self._exchanges.get(event.stream.stream_id)
                if exchange is not None:
                    self._on_response(exchange, event)
            elif isinstance(event, GoAwayReceived):
                self._on_goaway(event.last_stream_id)
            elif isinstance(event, WindowOpened):
                if event.stream is None:
                    self._senders.wake_next()
                else:
                    self._senders.wake(event.stream.stream_id)
        if self._core.has_room:
            self._waiting.unpark_all()
        self._write_wakeup.wake()

    def _on_response(self, exchange: Exchange, event: HeadersReceived | DataReceived | StreamReset) -> None:
        if isinstance(event, HeadersReceived):
            pairs = ((name.decode("latin-1"), value.decode("latin-1")) for name, value in event.headers)
            exchange.headers.update(pairs)
        elif isinstance(event, DataReceived):
            stream = exchange.stream
            if stream.uncredited:
                self._core.consume(stream, stream.uncredited)
            if exchange.read() and not stream.reset:
                self._core.reset(stream, ErrorCode.CANCEL)
        else:
            is_untouched = event.code == ErrorCode.REFUSED_STREAM
            exchange.end(f"the server reset the call (code {event.code})", is_untouched=is_untouched)

    def _on_goaway(self, last_stream_id: int) -> None:
        self._is_leaving = True
        self._waiting.unpark_all()
        for number, exchange in self._exchanges.items():
            if number > last_stream_id:
                exchange.end(_NO_MORE_CALLS, is_untouched=True)

    async def _write(self) -> None:
        try:
            while True:
                while size := self._core.unsent_bytes:
                    buffers = self._core.take_outbound()
                    self._share.add(size - self._senders.counted)
                    self._senders.counted = 0
                    if self._senders:
                        self._senders.wake_next()
                    await send_buffers(self._stream, buffers)
                    self._share.release(size)
                if self._scope.deadline != math.inf:
                    self._scope.cancel()
                await self._write_wakeup.wait()
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            self.break_off(f"the connection broke: {error.__cause__ or error}")


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
        most = min(request.max_output_bytes + _HEAD_BYTES, _MAX_BYTES)
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

    async def _call(self, method: bytes, body: Sequence[Buffer], seconds: float, limit: float) -> Buffer:
        path = encode_header(b":path", _SERVICE + method)
        headers = self._first_headers + path + self._last_headers + _timeout(seconds) + _trace()
        for _ in range(2):
            # An idle connection may have been closed unnoticed, so a second one may be needed.
            connection = await self._get_connection()
            exchange = await connection.call(headers, body, limit)
            if exchange is not None:
                return self._message(exchange, limit)
        raise NotSent(f"no response from {self.address}: {connection.refusal_reason}")

    async def _get_connection(self) -> RemoteConnection:
        connection = self._connection
        if connection is not None and not connection.refusal_reason:
            return connection
        async with self._connecting:
            if self._connection is not None and not self._connection.refusal_reason:
                return self._connection
            stream = await connect(
                self._remote_address,
                self._tls,
                server_name=self._spec.tls.server_name,
                timeout_seconds=self._spec.connect_seconds,
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
        return b"".join(encode_header(name, value) for name, value in pairs)

    @cached_property
    def _last_headers(self) -> bytes:
        pairs = ((b"te", b"trailers"), (b"content-type", b"application/grpc"), (b"user-agent", b"ovmstrio"))
        return b"".join(encode_header(name, value) for name, value in pairs)

    def _message(self, exchange: Exchange, limit: float) -> Buffer:
        if exchange.excess_bytes:
            raise PayloadTooLarge(
                f"response of {self.address} has {exchange.excess_bytes} bytes, the limit is {limit:.0f}"
                " (--max-message-size)"
            )
        if exchange.failure:
            failure = NotSent if exchange.is_untouched else NotReady
            raise failure(f"no response from {self.address}: {exchange.failure}")
        headers = exchange.headers
        code = headers.get("grpc-status", "")
        if code == "0":
            if exchange.message is None:
                raise ModelFailure(f"{self.address} sent an incomplete message")
            return exchange.message
        if not code.isdecimal():
            status = headers.get(":status", "")
            text = f"{self.address} is not a gRPC server (HTTP status {status or 'unknown'})"
            raise error_of_grpc(_HTTP_STATUSES.get(status, "UNKNOWN"), text)
        known = {status.value: status.name for status in Status}
        text = unquote(headers.get("grpc-message", "")) or "no error message"
        raise append_address(error_of_grpc(known.get(int(code), "UNKNOWN"), text, headers), self.address)


def _trace() -> bytes:
    span = current_or_event_span()
    if span is None:
        return b""
    return b"".join(encode_header(name.encode(), value.encode()) for name, value in span.headers())


def _timeout(seconds: float) -> bytes:
    if seconds == math.inf:
        return b""
    milliseconds = max(1, min(round(seconds * 1000), _MAX_MILLISECONDS))
    return encode_header(b"grpc-timeout", b"%dm" % milliseconds)
