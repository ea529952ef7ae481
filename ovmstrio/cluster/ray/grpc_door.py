"""gRPC where Ray's proxy has the wire: calls come as the bytes of their messages, and go as bytes and a status."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import trio
from grpclib.const import Status
from grpclib.exceptions import GRPCError

from ovmstrio.api.admin.changes import Changes
from ovmstrio.api.kserve.grpc.inference_service import InferenceService
from ovmstrio.api.tensorflow.grpc.prediction_service import ModelService, PredictionService
from ovmstrio.cluster.ray.grpc_paths import CALLS, STREAM
from ovmstrio.cluster.ray.message_call import MessageCall
from ovmstrio.wire.grpc.replies import FailureTranslator
from ovmstrio.wire.statuses import map_error

if TYPE_CHECKING:
    from collections.abc import Mapping

    from grpclib.const import Handler

    from ovmstrio.dataplane.plane import DataPlane

__all__ = ["GrpcAnswer", "GrpcDoor"]


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
