"""Codec of the gRPC front end, between message bytes and objects.

Inference messages decode straight to core values.  The server's other messages are betterproto2 classes, user messages
are google.protobuf classes.  Bytes pass unchanged.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from betterproto2 import Message
from google.protobuf.message import DecodeError
from google.protobuf.message import Message as GoogleMessage
from grpclib.const import Status
from grpclib.encoding.base import CodecBase
from grpclib.exceptions import GRPCError

from ovmstrio.core.errors import InvalidRequest
from ovmstrio.core.request import InferRequest
from ovmstrio.encoding.generated.message_pool import default_message_pool
from ovmstrio.encoding.messages import message_class
from ovmstrio.protocols.kserve.grpc_messages import decode_request
from ovmstrio.protocols.tensorflow.grpc_service import PredictRequest, decode_predict

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def _unchanged(data: bytes | memoryview) -> bytes | memoryview:
    return data


_DECODERS: Final[Mapping[type, Callable[[Any], Any]]] = {
    InferRequest: decode_request,
    PredictRequest: decode_predict,
    bytes: bytes,
    memoryview: _unchanged,
}


class Codec(CodecBase):
    """Protobuf codec for the server's messages and for user messages."""

    __content_subtype__ = "proto"

    def encode(self, message: Any, message_type: Any) -> bytes:
        """Serialise a message of the declared type; bytes pass unchanged."""
        if not isinstance(message, message_type):
            raise TypeError(f"expected a message of {message_type.__name__}, got {type(message).__name__}")
        return bytes(message)

    def decode(self, data: bytes, message_type: Any) -> Any:
        """Parse a message; raise ``GRPCError`` INVALID_ARGUMENT if it is malformed."""
        try:
            decoder = _DECODERS.get(message_type)
            if decoder is not None:
                return decoder(data)
            if issubclass(message_type, GoogleMessage):
                return _parse(data, message_type)
            return _decoder_of(message_type)(data)
        except InvalidRequest as error:
            raise GRPCError(Status.INVALID_ARGUMENT, error.message) from None


@lru_cache(maxsize=256)
def _decoder_of(message_type: type[Message]) -> Callable[[bytes], Message]:
    """Return the decoder of a betterproto2 class, after Google's parser: betterproto2 accepts malformed messages."""
    strict = message_class(default_message_pool.type_to_url[message_type].rpartition("/")[2])

    def decode(data: bytes) -> Message:
        message = _parse(data, strict)
        message.DiscardUnknownFields()
        return message_type.parse(message.SerializeToString())

    return decode


def _parse(data: bytes, strict: Any) -> Any:
    try:
        return strict.FromString(data)
    except DecodeError:
        name = strict.DESCRIPTOR.full_name
        text = f"malformed {name}: its {len(data)} bytes are not a protobuf message of that type"
        raise InvalidRequest(text) from None
