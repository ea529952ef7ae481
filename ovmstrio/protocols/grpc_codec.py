"""The codec of the gRPC front end: what the transport calls between the bytes of a message and an object.

Inferences go straight to and from the domain's values.  The server's other messages are betterproto2's, those of users
are Google's.  What is bytes already stays as it is.
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
from ovmstrio.protocols.kserve.grpc_requests import decode_request
from ovmstrio.protocols.tensorflow.grpc_service import PredictRequest, decode_predict

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["Codec"]


def _as_it_came(data: bytes | memoryview) -> bytes | memoryview:
    return data


_DECODERS: Final[Mapping[type, Callable[[Any], Any]]] = {
    InferRequest: decode_request,
    PredictRequest: decode_predict,
    bytes: bytes,
    memoryview: _as_it_came,
}


class Codec(CodecBase):
    """Protobuf for all messages that the server knows, and for those of users."""

    __content_subtype__ = "proto"

    def encode(self, message: Any, message_type: Any) -> bytes:
        """Serialise a message; one that has been serialised is sent as it is.

        Raises:
            TypeError: it is not of the type that the method declares.
        """
        if not isinstance(message, message_type):
            raise TypeError(f"expected a message of {message_type.__name__}, got {type(message).__name__}")
        return bytes(message)

    def decode(self, data: bytes, message_type: Any) -> Any:
        """Parse a message.

        Raises:
            GRPCError: INVALID_ARGUMENT, when the bytes are not a message of that type.
        """
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
    """Make the decoder of one of betterproto2's classes.

    betterproto2 takes cut-off fields and wrong wire types for values, so it is given nothing but what Google's parser
    has accepted, written anew.
    """
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
