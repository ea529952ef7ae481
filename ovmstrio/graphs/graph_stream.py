"""One open stream of a graph: requests in, replies out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import trio

from ovmstrio.core.errors import InvalidRequest, ServerError
from ovmstrio.core.request import InferRequest, StreamProblem
from ovmstrio.graphs.instance import (
    GraphInstance,
    ReplyChannelSink,
)
from ovmstrio.graphs.packets import AutomaticTimestamps
from ovmstrio.graphs.requests import GraphRequestParser, timestamp_of

if TYPE_CHECKING:
    from collections.abc import Iterable

_T = TypeVar("_T")


_VERSIONS: Final = frozenset({"1", "0", ""})
_WRONG_NAME: Final = "Subsequent request with incorrect servable name"
_WRONG_VERSION: Final = "Subsequent request with incorrect servable version"


class GraphStream(Generic[_T]):
    """An open stream of a graph; an ``InferStream`` if its replies are responses."""

    def __init__(
        self,
        instance: GraphInstance,
        sink: ReplyChannelSink[_T],
        replies: trio.MemoryReceiveChannel[_T | StreamProblem],
        *,
        reader: GraphRequestParser,
        timestamps: AutomaticTimestamps,
    ) -> None:
        self.replies = replies
        self._instance = instance
        self._sink = sink
        self._reader = reader
        self._timestamps = timestamps

    async def receive(self) -> _T | None:
        """Return the next reply; None at the end.

        Raises:
            InvalidRequest: a request of the stream is invalid.
            ServerError: the graph failed; leaving the stream's block raises it again.
        """
        try:
            reply = await self.replies.receive()
        except trio.EndOfChannel:
            if self._instance.failure is not None:
                raise self._instance.failure from None
            return None
        if isinstance(reply, StreamProblem):
            raise InvalidRequest(reply.message)
        return reply

    async def send(self, request: InferRequest) -> None:
        """Process another request; an error of the request becomes a ``StreamProblem`` reply.

        Waits while queues or replies are full. A cancelled request may have been accepted in part.

        Raises:
            trio.BrokenResourceError: the graph has ended.
        """
        if request.model_name != self._instance.context.graph:
            await self._refuse(f"{_WRONG_NAME}; validate subsequent requests")
        elif request.model_version not in _VERSIONS:
            await self._refuse(f"{_WRONG_VERSION}; validate subsequent requests")
        else:
            await self.take(request, "partial deserialization of subsequent requests")
            if self._instance.is_finished:
                raise trio.BrokenResourceError("the graph has ended")

    def end(self) -> None:
        """Mark the end of requests; running nodes finish."""
        self._instance.close_inputs()
        self._instance.dispatch()

    async def take(self, request: InferRequest, context: str, packets: Iterable[tuple[str, Any]] | None = None) -> None:
        """Push a request's inputs, or ``packets`` by input name; errors become replies that end with ``context``."""
        instance = self._instance
        instance.context.request_id = request.id
        try:
            requested = timestamp_of(request)
            timestamp = self._timestamps.next() if requested is None else requested
            for name, value in self._reader.packets(request) if packets is None else packets:
                await instance.push(name, value, timestamp)
        except ServerError as error:
            instance.dispatch()
            await self._refuse(f"{error.message}; {context}")
        except trio.BrokenResourceError:
            # `receive` raises the instance's failure at the end of the stream.
            return
        instance.dispatch()

    async def _refuse(self, message: str) -> None:
        if not self._sink.reply(StreamProblem(message)):
            await self._sink.wait_room()
