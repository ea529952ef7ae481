"""gRPC where Ray's proxy has the wire: calls come as the bytes of their messages, and go as bytes and a status."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

import trio
from grpclib.const import Status
from grpclib.exceptions import GRPCError

from ovmstrio.cluster.ray.grpc_paths import CALLS, STREAM
from ovmstrio.protocols.admin.changes import Changes
from ovmstrio.protocols.grpc_codec import Codec
from ovmstrio.protocols.kserve.grpc_service import InferenceService
from ovmstrio.protocols.tensorflow.grpc_service import ModelService, PredictionService
from ovmstrio.transport.grpc.headers import FailureTranslator
from ovmstrio.transport.statuses import map_error
from ovmstrio.util.buffers import PiecedMessage

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from grpclib.const import Handler

    from ovmstrio.serving.data_plane import DataPlane

__all__ = ["GrpcAnswer", "GrpcDoor", "MessageCall"]

# ----------------------------------------------------------------------
# One RPC whose messages come as bytes and go as bytes: what handlers of gRPC see where another server has the wire
# ----------------------------------------------------------------------

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


# ----------------------------------------------------------------------
# gRPC where Ray's proxy has the wire: calls come as the bytes of their messages, and go as bytes and a status
# ----------------------------------------------------------------------


class GrpcAnswer(NamedTuple):
    """How a call ended; plain data, for it goes from process to process.

    Attributes:
        data: the message.
        status: 0 if all went well.
        text: what is said of any other status.
        trailers: of any other status.
    """

    data: bytes
    status: int = 0
    text: str = ""
    trailers: tuple[tuple[str, str], ...] = ()

    def SerializeToString(self) -> bytes:  # noqa: N802 - Ray calls it so on what answers a gRPC call
        """Give the bytes of the message."""
        return self.data


class GrpcDoor:
    """Answers the calls of KServe's and TensorFlow Serving's gRPC over a data plane, on the trio side.

    Args:
        plane: what is served.
        max_message_bytes: larger messages are refused, in either direction.
    """

    def __init__(self, plane: DataPlane, max_message_bytes: int) -> None:
        self._max_message_bytes = max_message_bytes
        services = InferenceService(plane, Changes(allows_remote=False)), PredictionService(plane), ModelService(plane)
        handlers: dict[str, Handler] = {}
        for service in services:
            mapping: Mapping[str, Handler] = service.__mapping__()
            handlers |= mapping
        self._handlers = {path: handlers[path] for path in CALLS}
        self._stream = handlers[STREAM]
        self._failures = FailureTranslator(map_error)

    async def answer(self, path: str, data: bytes, seconds: float = math.inf) -> GrpcAnswer:
        """Answer a call of one message; whatever is raised becomes a status.

        Cancellation: that of the call.
        """
        messages: list[bytes] = [data]
        replies: list[bytes] = []

        async def receive() -> bytes | None:
            return messages.pop() if messages else None

        async def send(reply: bytes) -> None:
            replies.append(reply)

        handler = self._handlers[path]
        deadline = trio.current_time() + seconds
        call = MessageCall(path, handler, receive, send, deadline, max_message_bytes=self._max_message_bytes)
        failure = await self._run(call, path)
        if failure is not None:
            return failure
        return GrpcAnswer(replies[0]) if replies else _told(self._failures.no_reply(path))

    async def _run(self, call: MessageCall, path: str) -> GrpcAnswer | None:
        """Have a handler answer; gives the status that is not OK."""
        with trio.move_on_at(call.deadline) as scope:
            try:
                await call.handler.func(call)
            except Exception as error:  # noqa: BLE001 - the border of one call
                return _told(self._failures.translate(error, path))
        return _told(GRPCError(Status.DEADLINE_EXCEEDED, f"{path}: out of time")) if scope.cancelled_caught else None

    async def stream(
        self, requests: trio.MemoryReceiveChannel[bytes], replies: trio.MemorySendChannel[bytes]
    ) -> GrpcAnswer | None:
        """Answer a ``ModelStreamInfer``; gives the status that it ends with, None for OK.

        Ownership: closes ``replies``.
        Cancellation: that of the call.
        """

        async def receive() -> bytes | None:
            try:
                return await requests.receive()
            except trio.EndOfChannel:
                return None

        with replies:
            most = self._max_message_bytes
            call = MessageCall(STREAM, self._stream, receive, replies.send, math.inf, max_message_bytes=most)
            return await self._run(call, STREAM)

    def refuse(self, error: Exception, path: str) -> GrpcAnswer:
        """Answer for what a call has met before it came here; of what nobody foresaw nothing is told."""
        return _told(self._failures.translate(error, path))


def _told(error: GRPCError) -> GrpcAnswer:
    pairs = getattr(error, "pairs", ())
    return GrpcAnswer(b"", error.status.value, error.message or "", tuple(pairs))
