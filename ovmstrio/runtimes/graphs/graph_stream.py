"""The requests of one stream: their checks, their timestamps, and their way into the instance."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import trio

from ovmstrio.core.errors import InvalidRequest, ServerError
from ovmstrio.core.request import StreamProblem
from ovmstrio.runtimes.graphs.graph_requests import timestamp_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ovmstrio.core.request import InferRequest
    from ovmstrio.runtimes.graphs.graph_instance import GraphInstance
    from ovmstrio.runtimes.graphs.graph_requests import RequestReader
    from ovmstrio.runtimes.graphs.sinks import Replies
    from ovmstrio.runtimes.graphs.timestamps import AutomaticTimestamps

__all__ = ["REPLIES_BUFFERED", "GraphStream"]

_T = TypeVar("_T")

REPLIES_BUFFERED: Final = 32
"""Replies that may wait for the front end before the nodes that make them do."""

_VERSIONS: Final = frozenset({"1", "0", ""})
_WRONG_NAME: Final = "Subsequent request with incorrect servable name"
_WRONG_VERSION: Final = "Subsequent request with incorrect servable version"


class GraphStream(Generic[_T]):
    """One open stream of a graph; the ``InferStream`` that front ends use, where its replies are responses."""

    def __init__(
        self,
        instance: GraphInstance,
        sink: Replies[_T],
        replies: trio.MemoryReceiveChannel[_T | StreamProblem],
        *,
        reader: RequestReader,
        timestamps: AutomaticTimestamps,
    ) -> None:
        self.replies = replies
        self._instance = instance
        self._sink = sink
        self._reader = reader
        self._timestamps = timestamps

    async def receive(self) -> _T | None:
        """Give the next reply; None behind the last one.

        Raises:
            InvalidRequest: a request of the stream cannot be read.
            ServerError: the graph has failed; leaving the block that opened the stream raises it again.

        Cancellation: while there is none; nothing is lost.
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
        """Take in one more request; what is wrong with it alone becomes a problem among the replies.

        Raises:
            trio.BrokenResourceError: the graph has ended.

        Cancellation: while queues or the replies are full; the request may have been taken in part.
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
        """Say that no request will follow; what is under way goes on to its end."""
        self._instance.close_inputs()
        self._instance.dispatch()

    async def take(self, request: InferRequest, context: str, packets: Iterable[tuple[str, Any]] | None = None) -> None:
        """Take in a request of this graph; ``context`` ends what is told of one that is wrong.

        With ``packets`` these come in, by the names of inputs, in the place of the request's own.

        Cancellation: as :meth:`send`.
        """
        instance = self._instance
        instance.context.request_id = request.id
        try:
            given = timestamp_of(request)
            timestamp = self._timestamps.next() if given is None else given
            for name, value in self._reader.packets(request) if packets is None else packets:
                await instance.push(name, value, timestamp)
        except ServerError as error:
            instance.dispatch()
            await self._refuse(f"{error.message}; {context}")
        except trio.BrokenResourceError:
            # The instance knows why, and the end of the stream tells it.
            return
        instance.dispatch()

    async def _refuse(self, message: str) -> None:
        if not self._sink.reply(StreamProblem(message)):
            await self._sink.wait_room()
