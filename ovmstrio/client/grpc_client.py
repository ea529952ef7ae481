"""KServe v2 over gRPC, on grpcio's blocking channel."""

from __future__ import annotations

from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Final

import grpc

from ovmstrio.client.api import Client, Health, ModelInfo, ModelState, TensorInfo
from ovmstrio.client.grpc_streams import Messages, next_message, open_stream, read_outputs, read_reply, request_message
from ovmstrio.core.errors import DeadlineExceeded, NotReady, NotSupported, ServerError
from ovmstrio.protocol.descriptors import message_class
from ovmstrio.protocol.status_errors import Unreachable, error_of_grpc, reading
from ovmstrio.protocol.wire_tensors import from_raw
from ovmstrio.util.regular_files import read_regular_bytes

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Mapping, Sequence

    from ovmstrio.client.api import Parameter, Posted, SequenceState
    from ovmstrio.client.streaming import StreamReply, StreamRequest
    from ovmstrio.client.tls import ClientTls
    from ovmstrio.core.tensor import Array, RawTensor

__all__ = ["GrpcClient"]

_STATE_SECONDS: Final = 1.0
"""How long the library may take to tell the state of a connection, which it does at once."""
_SERVICE: Final = "/inference.GRPCInferenceService/"
_UNLIMITED: Final = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


class GrpcClient(Client):
    """One connection to ``host:port`` or ``unix:/path``; see ``Client`` for its calls."""

    def __init__(self, address: str, *, timeout: float, tls: ClientTls | None = None, api_key: str = "") -> None:
        self._address = address
        self._timeout = timeout
        self._metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()
        if tls is None:
            self._channel = grpc.insecure_channel(address, options=_UNLIMITED)
        else:
            # The library accepts files that it cannot use, and then fails to connect without a reason.
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
        messages = Messages(model, requests)
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
        """Say that gRPC has no call for it."""
        del body, content_type
        raise NotSupported(f"{service!r} is called over HTTP, and not over KServe's gRPC: use REST")

    def metadata(self, model: str, version: str = "") -> ModelInfo:
        """Tell inputs, outputs and versions of a model."""
        answer = self._call("ModelMetadata", name=model, version=version)
        inputs, outputs = (
            tuple(TensorInfo(each.name, each.datatype, tuple(each.shape)) for each in side)
            for side in (answer.inputs, answer.outputs)
        )
        return ModelInfo(answer.name, tuple(answer.versions), answer.platform, inputs, outputs)

    def models(self) -> list[ModelState]:
        """List every version that the server knows of."""
        answer = self._call("RepositoryIndex")
        return [ModelState(each.name, each.version, each.state, each.reason) for each in answer.models]

    def sequences(self, model: str, version: str = "") -> list[SequenceState]:
        """Say that gRPC has no call for it."""
        where = f"version {version} of {model!r}" if version else repr(model)
        raise NotSupported(f"gRPC does not tell the sequences of {where}: ask over REST")

    def metrics(self, families: Sequence[str] = ()) -> str:
        """Say that gRPC has no call for it."""
        del families
        raise NotSupported("gRPC does not tell metrics: ask over REST")

    def profile(self, seconds: float, rate: float, models: Sequence[str] | None = None) -> dict[str, Any]:
        """Say that gRPC has no call for it."""
        del seconds, rate, models
        raise NotSupported("gRPC tells no profile: ask over REST")

    def server_live(self) -> bool:
        """Tell whether the server answers at all."""
        return bool(self._call("ServerLive").live)

    def server_ready(self) -> Health:
        """Tell whether the server is ready; gRPC carries no reason."""
        return Health(bool(self._call("ServerReady").ready))

    def model_ready(self, model: str, version: str = "") -> Health:
        """Tell whether a model can be called."""
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
        # The library gives its own failures to connect the statuses that a server uses for "not ready" and "too late".
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
