"""Streams over gRPC: ``ModelStreamInfer`` on grpcio's blocking channel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from ovmstrio.client.interrupts import interrupts_cancel
from ovmstrio.client.streaming import TIMESTAMP, StreamOutput, StreamReply, StreamRequest, to_wire
from ovmstrio.core.errors import InvalidRequest
from ovmstrio.protocol.descriptors import message_class

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import grpc

    from ovmstrio.client.api import Parameter
    from ovmstrio.core.tensor import RawTensor

__all__ = ["Messages", "next_message", "open_stream", "read_outputs", "read_reply", "request_message"]

_METHOD: Final = "/inference.GRPCInferenceService/ModelStreamInfer"
_FIELDS: Final[dict[type, str]] = {bool: "bool_param", int: "int64_param", str: "string_param"}


class Messages:
    """Requests of the caller as messages; the library keeps to itself why they ended, ``failure`` tells it."""

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
    channel: grpc.Channel, messages: Messages, timeout: float | None, metadata: Sequence[tuple[str, str]] = ()
) -> Any:
    """Open a stream, which may take so many seconds, and give grpcio's call.

    Messages are taken as they come, in a thread of the library.
    """
    call = channel.stream_stream(
        _METHOD,
        request_serializer=message_class("inference.ModelInferRequest").SerializeToString,
        response_deserializer=message_class("inference.ModelStreamInferResponse").FromString,
    )
    return call(iter(messages), timeout=timeout, metadata=metadata)


def _message(model: str, request: StreamRequest) -> Any:
    tensors = [to_wire(name, value) for name, value in request.inputs.items()]
    try:
        message = request_message(tensors, request.parameters, model_name=model, id=request.id)
        if request.timestamp is not None:
            message.parameters[TIMESTAMP].int64_param = request.timestamp
    except (ValueError, TypeError, LookupError) as error:
        raise InvalidRequest(f"a request cannot be written as a message: {error}") from None
    return message


def request_message(tensors: Sequence[RawTensor], parameters: Mapping[str, Parameter], **fields: str) -> Any:
    """Write a request of these tensors, parameters and further fields."""
    message = message_class("inference.ModelInferRequest")(**fields)
    for tensor in tensors:
        message.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        message.raw_input_contents.append(tensor.data)
    for name, parameter in parameters.items():
        setattr(message.parameters[name], _FIELDS[type(parameter)], parameter)
    return message


def next_message(call: Any) -> Any:
    """Wait for the next message of the server; None at the end of the stream."""
    with interrupts_cancel(call.cancel):
        return next(call, None)


def read_reply(message: Any) -> StreamReply:
    """Read one message of the server."""
    if message.error_message:
        return StreamReply(error=message.error_message)
    response = message.infer_response
    timestamp = response.parameters[TIMESTAMP].int64_param if TIMESTAMP in response.parameters else None
    return StreamReply(read_outputs(response), timestamp)


def read_outputs(response: Any) -> tuple[StreamOutput, ...]:
    """Read the outputs of a response."""
    return tuple(
        StreamOutput(output.name, output.datatype, tuple(output.shape), raw)
        for output, raw in zip(response.outputs, response.raw_output_contents, strict=True)
    )
