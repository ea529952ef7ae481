"""Streams to what takes single requests: each message is a call of its own, answered in the order of the messages.

::

    messages ── receive ──> a task each: admit, decode, DataPlane.infer ──> answers, in order ──> client
                   └ waits while as many are under way as may be, or their answers would be too large together

An error of one request is a message of the stream, which goes on.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, Final

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

_UNDER_WAY: Final = 16
_ANSWERED_BYTES: Final = 4 * 2**20
"""What the answers may have together that wait for their turn, as far as that can be foreseen."""

_WANTS_END: Final = "triton_enable_empty_final_response"
_IS_END: Final = "triton_final_response"


async def answer_requests(call: Call, plane: DataPlane, first: bytes) -> None:
    """Answer a stream whose first message has been received, and not been decoded.

    Raises:
        GRPCError: a message is malformed or too large; those before it have been answered.
        Exception: a request ended in an error that is no client's business.

    Ownership: the tasks of the requests, which have ended when this returns.
    Cancellation: at any checkpoint; requests under way are cancelled.
    """
    stream = _RequestStream(call, plane)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stream.receive, first, nursery)
        await stream.send()
        nursery.cancel_scope.cancel()
    if stream.failure is not None:
        raise stream.failure


class _Answer:
    """The answer to one request, or what came of it instead."""

    __slots__ = ("data", "done", "failure")

    def __init__(self) -> None:
        self.data: WrittenMessage = b""
        self.done = trio.Event()
        self.failure: Exception | None = None


class _RequestStream:
    """One stream: what is under way, in the order of the requests.

    Attributes:
        failure: what ends the stream.
    """

    def __init__(self, call: Call, plane: DataPlane) -> None:
        self._call = call
        self._plane = plane
        self._arrivals = Arrivals()
        self._answers: deque[_Answer] = deque()
        self._largest: int | None = None
        self._is_over = False
        self._changed = trio.Event()
        self.failure: Exception | None = None

    async def receive(self, message: bytes | None, nursery: trio.Nursery) -> None:
        """Start a task for each message, until there are no more."""
        number = 0
        failure: Exception | None = None
        while message is not None and failure is None:
            while not self._has_room:
                await self._changed.wait()
            answer = _Answer()
            self._answers.append(answer)
            nursery.start_soon(self._answer, message, answer, self._arrivals.note(number))
            number += 1
            self._announce()
            try:
                message = await self._call.recv_message(is_decoded=False)
            except GRPCError as error:
                failure = error
        if failure is not None:
            last = _Answer()
            last.failure = failure
            last.done.set()
            self._answers.append(last)
        self._is_over = True
        self._announce()

    @property
    def _has_room(self) -> bool:
        """Whether one more request may begin; one after the other until it is known how large answers are."""
        count = len(self._answers)
        if not count:
            return True
        return count < _UNDER_WAY and self._largest is not None and (count + 1) * self._largest <= _ANSWERED_BYTES

    def _announce(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    async def _answer(self, message: bytes, answer: _Answer, arrival: Arrival) -> None:
        try:
            answer.data = await self._answered(message, arrival)
        except Exception as error:  # noqa: BLE001 - whatever it is ends the stream in this request's turn
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
            # A refusal names its request as well, which nobody has read then.
            return _problem(request or self._decode(message), error)

    def _decode(self, message: bytes) -> InferRequest:
        request: InferRequest = self._call.decode(message)
        return request

    async def send(self) -> None:
        """Send the answers in the order of their requests, until there are no more."""
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
            self._announce()


def _render(request: InferRequest, response: InferResponse) -> tuple[WrittenMessage, int]:
    _mark_end(request, response)
    data = encode_stream_response(StreamInferResponse("", response))
    return data, len(data)


def _problem(request: InferRequest, error: ServerError) -> WrittenMessage:
    named = InferResponse(request.model_name, request.model_version, [], request.id)
    _mark_end(request, named)
    return encode_stream_response(StreamInferResponse(error.message, named))


def _mark_end(request: InferRequest, response: InferResponse) -> None:
    """Say that a response is the last one to its request, if the request asks for that."""
    wanted: Any = request.parameters.get(_WANTS_END)
    if wanted is True:
        response.parameters[_IS_END] = True
