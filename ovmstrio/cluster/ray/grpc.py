"""gRPC calls forwarded by Ray's proxy as encoded messages and statuses."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

import trio
from grpclib.const import Status
from grpclib.exceptions import GRPCError

from ovmstrio.cluster.ray.grpc_services import CALLS, STREAM
from ovmstrio.protocols.admin.changes import AdminChanges
from ovmstrio.protocols.grpc_codec import Codec
from ovmstrio.protocols.kserve.grpc_service import InferenceService
from ovmstrio.protocols.tensorflow.grpc_service import ModelService, PredictionService
from ovmstrio.transport.grpc.call import FailureTranslator
from ovmstrio.transport.statuses import to_grpc_error
from ovmstrio.util.buffers import PiecedMessage

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from grpclib.const import Handler

    from ovmstrio.serving.data_plane import DataPlane

# Calls

_CODEC: Final = Codec()


class MessageCall:
    """Call object for handlers, without a transport.

    Attributes:
        arrival: None: the order of requests is unknown.
        half_closed: whether the last message was received.
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
        """Receive the next message, or None at the end; raises GRPCError if the message is too large or malformed."""
        data = await self._receive()
        if data is None:
            self.half_closed = True
            return None
        self._check("request", len(data), "max_receive_message_bytes")
        return self.decode(data) if is_decoded else data

    def decode(self, data: bytes) -> Any:
        """Decode a message; raises GRPCError if the message is malformed."""
        return _CODEC.decode(data, self.handler.request_type)

    async def send_message(self, message: Any) -> None:
        """Send a response message; raises GRPCError if the message is too large."""
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


# Server


class GrpcResult(NamedTuple):
    """Result of a call; plain data.

    Attributes:
        data: response message.
        status: gRPC status; 0 for OK.
    """

    data: bytes
    status: int = 0
    text: str = ""
    trailers: tuple[tuple[str, str], ...] = ()

    def SerializeToString(self) -> bytes:  # noqa: N802 - Ray calls it so on what answers a gRPC call
        """Return the encoded message."""
        return self.data


class ClusterGrpcHandler:
    """Handler of KServe and TensorFlow Serving gRPC calls, on the trio side."""

    def __init__(self, plane: DataPlane, max_message_bytes: int) -> None:
        self._max_message_bytes = max_message_bytes
        services = (
            InferenceService(plane, AdminChanges(allows_remote=False)),
            PredictionService(plane),
            ModelService(plane),
        )
        handlers: dict[str, Handler] = {}
        for service in services:
            mapping: Mapping[str, Handler] = service.__mapping__()
            handlers |= mapping
        self._handlers = {path: handlers[path] for path in CALLS}
        self._stream = handlers[STREAM]
        self._failures = FailureTranslator(to_grpc_error)

    async def answer(self, path: str, data: bytes, seconds: float = math.inf) -> GrpcResult:
        """Answer a unary call; errors become statuses."""
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
        return GrpcResult(replies[0]) if replies else _error_answer(self._failures.missing_reply(path))

    async def _run(self, call: MessageCall, path: str) -> GrpcResult | None:
        """Run a handler; return the status unless it is OK."""
        with trio.move_on_at(call.deadline) as scope:
            try:
                await call.handler.func(call)
            except Exception as error:  # noqa: BLE001 - top level of one call
                return _error_answer(self._failures.translate(error, path))
        return (
            _error_answer(GRPCError(Status.DEADLINE_EXCEEDED, f"{path}: out of time"))
            if scope.cancelled_caught
            else None
        )

    async def stream(
        self, requests: trio.MemoryReceiveChannel[bytes], replies: trio.MemorySendChannel[bytes]
    ) -> GrpcResult | None:
        """Answer a ``ModelStreamInfer`` call; return the status unless it is OK.  Closes ``replies``."""

        async def receive() -> bytes | None:
            try:
                return await requests.receive()
            except trio.EndOfChannel:
                return None

        with replies:
            most = self._max_message_bytes
            call = MessageCall(STREAM, self._stream, receive, replies.send, math.inf, max_message_bytes=most)
            return await self._run(call, STREAM)

    def refuse(self, error: Exception, path: str) -> GrpcResult:
        """Return the status of an error before the handler; unexpected errors have no details."""
        return _error_answer(self._failures.translate(error, path))


def _error_answer(error: GRPCError) -> GrpcResult:
    pairs = getattr(error, "pairs", ())
    return GrpcResult(b"", error.status.value, error.message or "", tuple(pairs))
