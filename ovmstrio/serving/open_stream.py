"""An open stream as front ends see it: a servable's own, with every request and reply counted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from ovmstrio.core.errors import PayloadTooLarge
from ovmstrio.core.events import Step
from ovmstrio.core.request import StreamProblem

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self

    from ovmstrio.core.events import CallEvent
    from ovmstrio.core.request import InferRequest, StreamReply
    from ovmstrio.core.service import InferStream
    from ovmstrio.serving.requested_outputs import StreamedOutputs

__all__ = ["OpenStream"]


class OpenStream:
    """An open stream whose requests and replies are counted; front ends receive and send in two tasks.

    A request counts as accepted once it is known that it has not become a problem among the replies: when the receiver
    has seen all replies that were there after it was sent.
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
        move: Callable[[CallEvent, Step], None],
        *,
        most_bytes: float,
        outputs: StreamedOutputs,
        prepare: Callable[[InferRequest], None],
    ) -> None:
        self._stream = stream
        self._prepare = prepare
        self._outputs = outputs
        self._replies = stream.replies
        self._event = event
        self._move = move
        self._most_bytes = most_bytes
        self._sent = 1
        self._problems = 0
        self._accepted = 0

    async def send(self, request: InferRequest) -> None:
        """Take in one more request, whose buffers belong to the stream from now on.

        Raises:
            trio.BrokenResourceError: the stream has ended by itself.
            ServerError: its inputs lie in shared memory and cannot be had, or it asks for other outputs.

        Cancellation: while the stream has no room; the request may have been taken in part.
        """
        self._outputs.check(request)
        self._prepare(request)
        await self._stream.send(request)
        self._sent += 1
        self._event.received += request.received
        if self._replies.statistics().tasks_waiting_receive:
            self.settle()

    def note_sent(self, size: int) -> None:
        """Note that a reply of so many bytes has gone to the client."""
        self._event.sent += size

    def note_end(self, code: str) -> None:
        """Note how the call will have ended where the error that ends it is none of the stream's."""
        self._event.code = code

    def end(self) -> None:
        """Say that no request will follow; what is under way goes on to its end."""
        self._stream.end()

    async def receive(self) -> StreamReply:
        """Wait for the next reply that has something of what was asked for; cheap when it is there already.

        Raises:
            trio.EndOfChannel: there will be none; leaving the block that opened the stream then tells why.
            PayloadTooLarge: it is too large to be sent, which ends the stream.

        Cancellation: while it waits; no reply is lost.  Not a checkpoint when a reply is there.
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

    def __aiter__(self) -> Self:
        """Receive replies until there are no more."""
        return self

    async def __anext__(self) -> StreamReply:
        """Receive the next reply, as :meth:`receive`."""
        try:
            return await self.receive()
        except trio.EndOfChannel:
            raise StopAsyncIteration from None

    def settle(self) -> None:
        """Count as accepted what was sent and has caused no problem, all replies so far having been received."""
        while self._accepted < self._sent - self._problems:
            self._accepted += 1
            self._move(self._event, Step.ACCEPTED)

    def _count(self, reply: StreamReply) -> None:
        if isinstance(reply, StreamProblem):
            self._problems += 1
            self._move(self._event, Step.REJECTED)
        elif (size := reply.nbytes) > self._most_bytes:
            raise PayloadTooLarge.of_outputs(size, self._most_bytes)
        else:
            self._move(self._event, Step.ANSWERED)
