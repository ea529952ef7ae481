"""Inference streams as front ends see them, with every request and reply counted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from ovmstrio.core.errors import PayloadTooLarge
from ovmstrio.core.events import StreamProgress
from ovmstrio.core.request import FINAL_RESPONSE, StreamProblem

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self

    from ovmstrio.core.events import CallEvent
    from ovmstrio.core.request import InferRequest, StreamReply
    from ovmstrio.core.service import InferStream
    from ovmstrio.serving.requested_outputs import StreamOutputs


class OpenStream:
    """An open stream whose requests and replies are counted; front ends receive and send in two tasks.

    A request counts as accepted once all replies present after its sending were received and none was a problem.
    """

    __slots__ = (
        "_accepted",
        "_event",
        "_most_bytes",
        "_move",
        "_outputs",
        "_prepare",
        "_problems",
        "_replies",
        "_sent",
        "_stream",
    )

    def __init__(
        self,
        stream: InferStream,
        event: CallEvent,
        move: Callable[[CallEvent, StreamProgress], None],
        *,
        max_bytes: float,
        outputs: StreamOutputs,
        prepare: Callable[[InferRequest], None],
    ) -> None:
        self._stream = stream
        self._prepare = prepare
        self._outputs = outputs
        self._replies = stream.replies
        self._event = event
        self._move = move
        self._most_bytes = max_bytes
        self._sent = 1
        self._problems = 0
        self._accepted = 0

    async def send(self, request: InferRequest) -> None:
        """Send a request, whose buffers belong to the stream from now on.

        Raises:
            trio.BrokenResourceError: the stream has ended.
            ServerError: a shared-memory input is invalid, or the request selects other outputs.
        """
        self._outputs.check(request)
        self._prepare(request)
        await self._stream.send(request)
        self._sent += 1
        self._event.received += request.received
        if self._replies.statistics().tasks_waiting_receive:
            self.settle()

    def count_sent(self, size: int) -> None:
        """Add the size of a reply sent to the client."""
        self._event.sent += size

    def set_code(self, code: str) -> None:
        """Set the call's status code, for an error outside the stream."""
        self._event.code = code

    def end(self) -> None:
        """Mark the end of requests; those in progress are completed."""
        self._stream.end()

    async def receive(self) -> StreamReply:
        """Return the next reply that has a selected output; not a checkpoint if one is present.

        Raises:
            trio.EndOfChannel: there are no more replies; leaving the stream's block then raises the reason.
            PayloadTooLarge: the reply is too large, which ends the stream.
        """
        while True:
            try:
                reply = self._replies.receive_nowait()
            except trio.WouldBlock:
                self.settle()
                reply = await self._replies.receive()
            if isinstance(reply, StreamProblem) or self._outputs.keep(reply):
                self._count(reply)
                return reply

    @property
    def has_reply(self) -> bool:
        """True if :meth:`receive` would not wait."""
        return self._replies.statistics().current_buffer_used > 0

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> StreamReply:
        try:
            return await self.receive()
        except trio.EndOfChannel:
            raise StopAsyncIteration from None

    def settle(self) -> None:
        """Count sent requests without a problem as accepted, all present replies having been received."""
        while self._accepted < self._sent - self._problems:
            self._accepted += 1
            self._move(self._event, StreamProgress.ACCEPTED)

    def _count(self, reply: StreamReply) -> None:
        if isinstance(reply, StreamProblem):
            self._problems += 1
            self._move(self._event, StreamProgress.REJECTED)
        elif (size := reply.nbytes) > self._most_bytes:
            raise PayloadTooLarge.of_outputs(size, self._most_bytes)
        elif reply.outputs or FINAL_RESPONSE not in reply.parameters:
            self._move(self._event, StreamProgress.ANSWERED)
