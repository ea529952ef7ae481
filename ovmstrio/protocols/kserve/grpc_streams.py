"""Streams to servables that take single requests: every message is a call, answered in message order.

::

    messages ── receive ──> one task each: admit, decode, DataPlane.infer ──> responses, in order ──> client
                   └ waits while too many calls, or too many expected response bytes, are in flight

A request's error is sent as a message; the stream continues.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Final

import trio
from grpclib.exceptions import GRPCError

from ovmstrio.core.errors import ServerError
from ovmstrio.core.request import Arrivals, InferResponse
from ovmstrio.protocols.kserve.grpc_responses import StreamInferResponse, encode_stream_response
from ovmstrio.serving.early_admission import answer_admitted, first_text, keep_place
from ovmstrio.serving.interfaces import KSERVE_GRPC

if TYPE_CHECKING:
    from ovmstrio.core.request import Arrival, InferRequest
    from ovmstrio.encoding.raw_contents import WrittenMessage
    from ovmstrio.serving.data_plane import DataPlane
    from ovmstrio.transport.grpc.stream import Call

__all__ = ["answer_requests"]

_MAX_IN_FLIGHT: Final = 16
_MAX_QUEUED_BYTES: Final = 4 * 2**20  # Limit of the expected size of all responses that wait for their turn

_ENABLE_FINAL_RESPONSE: Final = "triton_enable_empty_final_response"
_FINAL_RESPONSE: Final = "triton_final_response"


async def answer_requests(call: Call, plane: DataPlane, first: bytes) -> None:
    """Answer a stream whose first, undecoded message was received; raises ``GRPCError`` after earlier answers."""
    stream = _RequestStream(call, plane)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stream.receive, first, nursery)
        await stream.send()
        nursery.cancel_scope.cancel()
    if stream.failure is not None:
        raise stream.failure


class _PendingAnswer:
    """Response to a request, or its error."""

    __slots__ = ("data", "done", "failure")

    def __init__(self) -> None:
        self.data: WrittenMessage = b""
        self.done = trio.Event()
        self.failure: Exception | None = None


class _RequestStream:
    """Stream with its in-flight requests, in order; ``failure`` is the error that ended the stream."""

    def __init__(self, call: Call, plane: DataPlane) -> None:
        self._call = call
        self._plane = plane
        self._arrivals = Arrivals()
        self._answers: deque[_PendingAnswer] = deque()
        self._largest: int | None = None
        self._is_over = False
        self._changed = trio.Event()
        self.failure: Exception | None = None

    async def receive(self, message: bytes | None, nursery: trio.Nursery) -> None:
        """Start a task per message until the client half-closes."""
        number = 0
        failure: Exception | None = None
        while message is not None and failure is None:
            while not self._has_room:
                await self._changed.wait()
            answer = _PendingAnswer()
            self._answers.append(answer)
            nursery.start_soon(self._answer, message, answer, self._arrivals.note(number))
            number += 1
            self._notify()
            try:
                message = await self._call.recv_message(is_decoded=False)
            except GRPCError as error:
                failure = error
        if failure is not None:
            last = _PendingAnswer()
            last.failure = failure
            last.done.set()
            self._answers.append(last)
        self._is_over = True
        self._notify()

    @property
    def _has_room(self) -> bool:
        """Return whether another request may start; the first runs alone because its response size is unknown."""
        count = len(self._answers)
        if not count:
            return True
        return count < _MAX_IN_FLIGHT and self._largest is not None and (count + 1) * self._largest <= _MAX_QUEUED_BYTES

    def _notify(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    async def _answer(self, message: bytes, answer: _PendingAnswer, arrival: Arrival) -> None:
        try:
            answer.data = await self._answered(message, arrival)
        except Exception as error:  # noqa: BLE001 - any error ends the stream in this request's turn
            answer.failure = error
        finally:
            arrival.settle()
        self._largest = max(self._largest or 0, len(answer.data))
        answer.done.set()

    async def _answered(self, message: bytes, arrival: Arrival) -> WrittenMessage:
        request: InferRequest | None = None

        async def infer(name: bytes = b"") -> WrittenMessage:
            nonlocal request
            request = self._decode(message)
            keep_place(request.model_name, name)
            request.deadline, request.arrival = self._call.deadline, arrival
            return await self._plane.infer(request, KSERVE_GRPC, partial(_render, request))

        try:
            if not self._plane.has_limits():
                return await infer()
            name = first_text(message)
            return await answer_admitted(self._plane, KSERVE_GRPC, name, partial(infer, name), arrival=arrival)
        except ServerError as error:
            # An admission error precedes decoding, but its message needs the request's id.
            return _problem(request or self._decode(message), error)

    def _decode(self, message: bytes) -> InferRequest:
        request: InferRequest = self._call.decode(message)
        return request

    async def send(self) -> None:
        """Send the responses in request order until the stream ends."""
        while self._answers or not self._is_over:
            if not self._answers:
                await self._changed.wait()
                continue
            answer = self._answers[0]
            await answer.done.wait()
            if answer.failure is None:
                try:
                    await self._call.send_message(answer.data)
                except Exception as error:  # noqa: BLE001 - raised once all tasks have ended
                    answer.failure = error
            if answer.failure is not None:
                self.failure = answer.failure
                return
            self._answers.popleft()
            self._notify()


def _render(request: InferRequest, response: InferResponse) -> tuple[WrittenMessage, int]:
    _mark_final(request, response)
    data = encode_stream_response(StreamInferResponse("", response))
    return data, len(data)


def _problem(request: InferRequest, error: ServerError) -> WrittenMessage:
    named = InferResponse(request.model_name, request.model_version, [], request.id)
    _mark_final(request, named)
    return encode_stream_response(StreamInferResponse(error.message, named))


def _mark_final(request: InferRequest, response: InferResponse) -> None:
    """Set ``triton_final_response`` if the request enables it."""
    if request.parameters.get(_ENABLE_FINAL_RESPONSE) is True:
        response.parameters[_FINAL_RESPONSE] = True
