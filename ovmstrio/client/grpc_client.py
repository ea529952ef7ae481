"""KServe v2 gRPC client on grpcio's blocking channel."""

from __future__ import annotations

from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Final

import grpc

from ovmstrio.client.api import (
    TIMESTAMP,
    Client,
    Health,
    ModelInfo,
    ModelState,
    ServerInfo,
    StreamOutput,
    StreamReply,
    StreamRequest,
    TensorInfo,
    cancel_on_interrupt,
    to_raw_tensor,
)
from ovmstrio.core.errors import DeadlineExceeded, InvalidRequest, NotReady, NotSupported, ServerError
from ovmstrio.encoding.messages import message_class
from ovmstrio.encoding.raw_contents import from_raw
from ovmstrio.encoding.status_errors import Unreachable, error_of_grpc, reading
from ovmstrio.util.regular_files import read_regular_bytes

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence

    from ovmstrio.client.api import Parameter, Posted, SequenceState
    from ovmstrio.client.tls import ClientTls
    from ovmstrio.core.tensor import Array, RawTensor

# -- Streams -----------------------------------------------------------------------------------------------------------

_METHOD: Final = "/inference.GRPCInferenceService/ModelStreamInfer"
_FIELDS: Final[dict[type, str]] = {bool: "bool_param", int: "int64_param", str: "string_param"}


class RequestIterator:
    """Iterator of encoded requests; keeps the exception that ended the iteration, which grpcio does not report."""

    def __init__(self, model: str, requests: Iterable[StreamRequest]) -> None:
        self._model = model
        self._requests = requests
        self.failure: Exception | None = None

    def __iter__(self) -> Iterator[Any]:
        try:
            for request in self._requests:
                yield _message(self._model, request)
        except Exception as error:
            self.failure = error
            raise


def open_stream(
    channel: grpc.Channel, messages: RequestIterator, timeout: float | None, metadata: Sequence[tuple[str, str]] = ()
) -> Any:
    """Open a stream and return grpcio's call; messages are read in a thread of the library."""
    call = channel.stream_stream(
        _METHOD,
        request_serializer=message_class("inference.ModelInferRequest").SerializeToString,
        response_deserializer=message_class("inference.ModelStreamInferResponse").FromString,
    )
    return call(iter(messages), timeout=timeout, metadata=metadata)


def _message(model: str, request: StreamRequest) -> Any:
    tensors = [to_raw_tensor(name, value) for name, value in request.inputs.items()]
    try:
        message = request_message(tensors, request.parameters, model_name=model, id=request.id)
        if request.timestamp is not None:
            message.parameters[TIMESTAMP].int64_param = request.timestamp
    except (ValueError, TypeError, LookupError) as error:
        raise InvalidRequest(f"a request cannot be written as a message: {error}") from None
    return message


def request_message(tensors: Sequence[RawTensor], parameters: Mapping[str, Parameter], **fields: str) -> Any:
    """Create a ModelInferRequest."""
    message = message_class("inference.ModelInferRequest")(**fields)
    for tensor in tensors:
        message.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        message.raw_input_contents.append(tensor.data)
    for name, parameter in parameters.items():
        setattr(message.parameters[name], _FIELDS[type(parameter)], parameter)
    return message


def next_message(call: Any) -> Any:
    """Wait for the next message of the server; None at the end of the stream."""
    with cancel_on_interrupt(call.cancel):
        return next(call, None)


def read_reply(message: Any) -> StreamReply:
    """Convert a stream response."""
    if message.error_message:
        return StreamReply(error=message.error_message)
    response = message.infer_response
    timestamp = response.parameters[TIMESTAMP].int64_param if TIMESTAMP in response.parameters else None
    return StreamReply(read_outputs(response), timestamp)


def read_outputs(response: Any) -> tuple[StreamOutput, ...]:
    """Convert the outputs of a response."""
    return tuple(
        StreamOutput(output.name, output.datatype, tuple(output.shape), raw)
        for output, raw in zip(response.outputs, response.raw_output_contents, strict=True)
    )


# -- Client ------------------------------------------------------------------------------------------------------------

_STATE_SECONDS: Final = 1.0
"""Timeout for reading the channel state, which normally takes no time."""
_SERVICE: Final = "/inference.GRPCInferenceService/"
_UNLIMITED: Final = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


class GrpcClient(Client):
    """Client for ``host:port`` or ``unix:/path``; see ``Client``."""

    def __init__(self, address: str, *, timeout: float, tls: ClientTls | None = None, api_key: str = "") -> None:
        self._address = address
        self._timeout = timeout
        self._metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()
        if tls is None:
            self._channel = grpc.insecure_channel(address, options=_UNLIMITED)
        else:
            # grpcio accepts unusable files and later fails to connect without a reason.
            tls.context()
            files = (None if path is None else read_regular_bytes(path) for path in (tls.ca, tls.key, tls.cert))
            self._channel = grpc.secure_channel(address, grpc.ssl_channel_credentials(*files), options=_UNLIMITED)

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()

    def _infer(
        self, model: str, version: str, tensors: Sequence[RawTensor], parameters: Mapping[str, Parameter]
    ) -> dict[str, Array]:
        answer = self._send("ModelInfer", request_message(tensors, parameters, model_name=model, model_version=version))
        with reading(self._address):
            return {
                output.name: from_raw(output.data, output.datatype, output.shape) for output in read_outputs(answer)
            }

    def stream(
        self, model: str, requests: Iterable[StreamRequest], *, timeout: float | None = None
    ) -> Generator[StreamReply]:
        """Stream to a graph; closing the iterator cancels the stream at once."""
        messages = RequestIterator(model, requests)
        call = open_stream(self._channel, messages, timeout, self._metadata)
        try:
            while (message := next_message(call)) is not None:
                with reading(self._address):
                    reply = read_reply(message)
                yield reply
        except grpc.RpcError as failure:
            raise messages.failure or self._error(failure) from None
        finally:
            call.cancel()

    def post(self, service: str, body: bytes, content_type: str) -> Posted:
        """Raise ``NotSupported``."""
        del body, content_type
        raise NotSupported(f"{service!r} is called over HTTP, and not over KServe's gRPC: use REST")

    def server_metadata(self) -> ServerInfo:
        """Return the server's name, version and extensions."""
        answer = self._call("ServerMetadata")
        return ServerInfo(answer.name, answer.version, tuple(answer.extensions))

    def metadata(self, model: str, version: str = "") -> ModelInfo:
        """Return inputs, outputs and versions of a model."""
        answer = self._call("ModelMetadata", name=model, version=version)
        inputs, outputs = (
            tuple(TensorInfo(each.name, each.datatype, tuple(each.shape)) for each in side)
            for side in (answer.inputs, answer.outputs)
        )
        return ModelInfo(answer.name, tuple(answer.versions), answer.platform, inputs, outputs)

    def models(self) -> list[ModelState]:
        """Return all model versions of the server."""
        answer = self._call("RepositoryIndex")
        return [ModelState(each.name, each.version, each.state, each.reason) for each in answer.models]

    def sequences(self, model: str, version: str = "") -> list[SequenceState]:
        """Raise ``NotSupported``."""
        where = f"version {version} of {model!r}" if version else repr(model)
        raise NotSupported(f"sequences of {where} are not available over gRPC: use REST")

    def metrics(self, families: Sequence[str] = ()) -> str:
        """Raise ``NotSupported``."""
        del families
        raise NotSupported("metrics are not available over gRPC: use REST")

    def profile(self, seconds: float, rate: float, models: Sequence[str] | None = None) -> dict[str, Any]:
        """Raise ``NotSupported``."""
        del seconds, rate, models
        raise NotSupported("profiles are not available over gRPC: use REST")

    def server_live(self) -> bool:
        """Return whether the server is live."""
        return bool(self._call("ServerLive").live)

    def server_ready(self) -> Health:
        """Return the readiness of the server, without a reason."""
        return Health(bool(self._call("ServerReady").ready))

    def model_ready(self, model: str, version: str = "") -> Health:
        """Return the readiness of a model, without a reason."""
        return Health(bool(self._call("ModelReady", name=model, version=version).ready))

    def _call(self, method: str, **fields: str) -> Any:
        return self._send(method, message_class(f"inference.{method}Request")(**fields))

    def _send(self, method: str, request: Any) -> Any:
        call = self._channel.unary_unary(
            _SERVICE + method,
            request_serializer=type(request).SerializeToString,
            response_deserializer=message_class(f"inference.{method}Response").FromString,
        )
        try:
            return call(request, timeout=self._timeout, metadata=self._metadata)
        except grpc.RpcError as failure:
            raise self._error(failure) from None

    def _error(self, failure: Any) -> ServerError:
        error = error_of_grpc(failure.code().name, failure.details())
        # grpcio reports connection failures with the server's statuses for "not ready" and "deadline exceeded".
        if isinstance(error, NotReady | DeadlineExceeded) and not self._connected():
            return Unreachable(f"no server answers gRPC at {self._address}: {error.message}")
        if isinstance(error, DeadlineExceeded):
            return DeadlineExceeded(f"{self._address} did not answer in time: {error.message}")
        return error

    def _connected(self) -> bool:
        states: SimpleQueue[grpc.ChannelConnectivity] = SimpleQueue()
        self._channel.subscribe(states.put)
        try:
            return states.get(timeout=_STATE_SECONDS) is grpc.ChannelConnectivity.READY
        except Empty:
            return False
        finally:
            self._channel.unsubscribe(states.put)
