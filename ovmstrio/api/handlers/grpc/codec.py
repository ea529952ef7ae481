"""The codec of a server with services of users beside its own."""

from __future__ import annotations

from typing import Any

from google.protobuf.message import DecodeError, Message
from grpclib.const import Status
from grpclib.exceptions import GRPCError

from ovmstrio.api.grpc_codec import Codec

__all__ = ["UserCodec"]


class UserCodec(Codec):
    """Reads requests as the generated classes of users, and sends replies that are bytes as they are.

    Replies are serialised before, where the handler made them: see :mod:`ovmstrio.api.handlers.grpc.replies`.
    """

    def decode(self, data: bytes, message_type: Any) -> Any:
        """Parse a message.

        Raises:
            GRPCError: INVALID_ARGUMENT, when the bytes are not a message of that type.
        """
        if not issubclass(message_type, Message):
            return super().decode(data, message_type)
        try:
            return message_type.FromString(data)
        except DecodeError:
            name = message_type.DESCRIPTOR.full_name
            text = f"malformed {name}: its {len(data)} bytes are not a protobuf message of that type"
            raise GRPCError(Status.INVALID_ARGUMENT, text) from None
