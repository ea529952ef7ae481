"""One RPC whose messages come as bytes and go as bytes: what handlers of gRPC see where another server has the wire."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Self

from grpclib.const import Status
from grpclib.exceptions import GRPCError

from ovmstrio.api.grpc_codec import Codec
from ovmstrio.core.pieced_message import PiecedMessage

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from grpclib.const import Handler

__all__ = ["MessageCall"]

_CODEC: Final = Codec()


class MessageCall:
    """What a handler gets in place of the wire's call.

    Args:
        path: what is called.
        handler: answers it.
        receive: gives the next message; None behind the last one.
        send: takes a message of the answer.
        deadline: on trio's clock.
        max_message_bytes: larger messages are refused, in either direction.

    Attributes:
        arrival: None, as nothing is known of an order.
        half_closed: whether the last message has been received.
    """

    def __init__(
        self,
        path: str,
        handler: Handler,
        receive: Callable[[], Awaitable[bytes | None]],
        send: Callable[[bytes], Awaitable[None]],
        deadline: float,
        *,
        max_message_bytes: int,
    ) -> None:
        self.path = path
        self.handler = handler
        self.deadline = deadline
        self.arrival = None
        self.half_closed = False
        self._receive = receive
        self._send = send
        self._max_message_bytes = max_message_bytes

    async def recv_message(self, *, is_decoded: bool = True) -> Any:
        """Receive the next message; None behind the last one.

        Raises:
            GRPCError: it is too large, or cannot be decoded.

        Cancellation: while there is none.
        """
        data = await self._receive()
        if data is None:
            self.half_closed = True
            return None
        self._check("request", len(data), "max_receive_message_bytes")
        return self.decode(data) if is_decoded else data

    def decode(self, data: bytes) -> Any:
        """Read a message.

        Raises:
            GRPCError: it cannot be decoded.
        """
        return _CODEC.decode(data, self.handler.request_type)

    async def send_message(self, message: Any) -> None:
        """Send a message of the answer.

        Raises:
            GRPCError: it is too large.

        Cancellation: while nobody takes it.
        """
        is_encoded = self.handler.reply_type is bytes and isinstance(message, bytes | memoryview)
        if not (is_encoded or isinstance(message, PiecedMessage)):
            message = _CODEC.encode(message, self.handler.reply_type)
        self._check("response", len(message), "max_send_message_bytes")
        await self._send(message.joined() if isinstance(message, PiecedMessage) else bytes(message))

    def _check(self, which: str, size: int, setting: str) -> None:
        if size > (limit := self._max_message_bytes):
            text = f"{which} message of {size} bytes is larger than the limit of {limit} bytes ({setting})"
            raise GRPCError(Status.RESOURCE_EXHAUSTED, text)

    def __aiter__(self) -> Self:
        """Iterate over the messages."""
        return self

    async def __anext__(self) -> Any:
        """Receive the next message."""
        message = await self.recv_message()
        if message is None:
            raise StopAsyncIteration
        return message
