"""Streams over gRPC: ``ModelStreamInfer`` on grpcio's blocking channel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from ovmstrio.client.streaming import StreamOutput, StreamReply, StreamRequest, to_wire
from ovmstrio.protocol.descriptors import message_class

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import grpc

__all__ = ["Given", "open_stream", "read_reply"]

_METHOD: Final = "/inference.GRPCInferenceService/ModelStreamInfer"
_TIMESTAMP: Final = "OVMS_MP_TIMESTAMP"
_FIELDS: Final[dict[type, str]] = {bool: "bool_param", int: "int64_param", str: "string_param"}


class Given:
    """Requests as they come from the caller, whose ``failure`` the library would otherwise keep to itself."""

    def __init__(self, requests: Iterable[StreamRequest]) -> None:
        self._requests = requests
        self.failure: Exception | None = None

    def __iter__(self) -> Iterator[StreamRequest]:
        try:
            yield from self._requests
        except Exception as error:
            self.failure = error
            raise


def open_stream(channel: grpc.Channel, model: str, requests: Iterable[StreamRequest]) -> Any:
    """Open a stream; requests are taken as they come, in a thread of the library.  Gives grpcio's call."""
    call = channel.stream_stream(
        _METHOD,
        request_serializer=message_class("inference.ModelInferRequest").SerializeToString,
        response_deserializer=message_class("inference.ModelStreamInferResponse").FromString,
    )
    return call(_messages(model, requests))


def _messages(model: str, requests: Iterable[StreamRequest]) -> Iterator[Any]:
    for request in requests:
        message = message_class("inference.ModelInferRequest")(model_name=model, id=request.id)
        for name, value in request.inputs.items():
            datatype, shape, raw = to_wire(value)
            message.inputs.add(name=name, datatype=datatype, shape=shape)
            message.raw_input_contents.append(raw)
        for name, parameter in request.parameters.items():
            setattr(message.parameters[name], _FIELDS[type(parameter)], parameter)
        if request.timestamp is not None:
            message.parameters[_TIMESTAMP].int64_param = request.timestamp
        yield message


def read_reply(message: Any) -> StreamReply:
    """Read one message of the server."""
    if message.error_message:
        return StreamReply(error=message.error_message)
    response = message.infer_response
    outputs = tuple(
        StreamOutput(output.name, output.datatype, tuple(output.shape), raw)
        for output, raw in zip(response.outputs, response.raw_output_contents, strict=True)
    )
    timestamp = response.parameters[_TIMESTAMP].int64_param if _TIMESTAMP in response.parameters else None
    return StreamReply(outputs, timestamp)
