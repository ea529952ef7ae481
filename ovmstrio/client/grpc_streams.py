"""Streams over gRPC: ``ModelStreamInfer`` on grpcio's blocking channel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from ovmstrio.client.interrupts import interrupts_cancel
from ovmstrio.client.streaming import TIMESTAMP, StreamOutput, StreamReply, StreamRequest, to_wire
from ovmstrio.core.errors import InvalidRequest
from ovmstrio.protocol.descriptors import message_class

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    import grpc

    from ovmstrio.client.api import Parameter

__all__ = ["Messages", "next_message", "open_stream", "read_reply", "set_parameters"]

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


def open_stream(channel: grpc.Channel, messages: Messages) -> Any:
    """Open a stream; messages are taken as they come, in a thread of the library.  Gives grpcio's call."""
    call = channel.stream_stream(
        _METHOD,
        request_serializer=message_class("inference.ModelInferRequest").SerializeToString,
        response_deserializer=message_class("inference.ModelStreamInferResponse").FromString,
    )
    return call(iter(messages))


def _message(model: str, request: StreamRequest) -> Any:
    tensors = {name: to_wire(value) for name, value in request.inputs.items()}
    try:
        message = message_class("inference.ModelInferRequest")(model_name=model, id=request.id)
        for name, (datatype, shape, raw) in tensors.items():
            message.inputs.add(name=name, datatype=datatype, shape=shape)
            message.raw_input_contents.append(raw)
        set_parameters(message, request.parameters)
        if request.timestamp is not None:
            message.parameters[TIMESTAMP].int64_param = request.timestamp
    except (ValueError, TypeError, LookupError) as error:
        raise InvalidRequest(f"a request cannot be written as a message: {error}") from None
    return message


def set_parameters(message: Any, parameters: Mapping[str, Parameter]) -> None:
    """Write request parameters into a message."""
    for name, parameter in parameters.items():
        setattr(message.parameters[name], _FIELDS[type(parameter)], parameter)


def next_message(call: Any) -> Any:
    """Wait for the next message of the server; None at the end of the stream."""
    with interrupts_cancel(call.cancel):
        return next(call, None)


def read_reply(message: Any) -> StreamReply:
    """Read one message of the server."""
    if message.error_message:
        return StreamReply(error=message.error_message)
    response = message.infer_response
    outputs = tuple(
        StreamOutput(output.name, output.datatype, tuple(output.shape), raw)
        for output, raw in zip(response.outputs, response.raw_output_contents, strict=True)
    )
    timestamp = response.parameters[TIMESTAMP].int64_param if TIMESTAMP in response.parameters else None
    return StreamReply(outputs, timestamp)
