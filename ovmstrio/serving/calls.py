"""A call that is neither an inference nor a stream of them, under its lease and with its event."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final, TypeVar, cast

import trio

from ovmstrio.core.callers import OVER_LIMIT, allowance_of_caller
from ovmstrio.core.errors import CallerLimited, DeadlineExceeded, NotSupported
from ovmstrio.core.events import CANCELLED
from ovmstrio.core.generation import Task
from ovmstrio.serving.kind import Takes

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from contextlib import AbstractAsyncContextManager
    from types import TracebackType
    from typing import Self

    from ovmstrio.core.callers import Allowance
    from ovmstrio.core.events import CallEvent, Door
    from ovmstrio.core.generation import Generation, GenerationRequest, GenerativeService, Piece, TextGenerator
    from ovmstrio.core.service import Service
    from ovmstrio.core.speech import Speech, SpeechRequest, TextSpeaker, Transcriber, Transcript, TranscriptionRequest
    from ovmstrio.serving.data_plane import DataPlane
    from ovmstrio.serving.instances import Lease
    from ovmstrio.serving.response_budget import Room

__all__ = [
    "ObservedCall",
    "call_generative",
    "charge_caller",
    "code_of",
    "open_generation",
    "open_speech",
    "open_transcript",
]

# ----------------------------------------------------------------------
# A call that is neither an inference nor a stream of them, under its lease and with its event
# ----------------------------------------------------------------------

End = Callable[["CallEvent", BaseException | None], None]


class ObservedCall:
    """One call, which ends with its ``with`` block, or later if the block hands it over.

    Attributes:
        service: what is called.
        takes: the calls that it takes.
        event: what observers see of it; whoever answers the call may set its sizes, and its code where the failure
            becomes an answer.
    """

    __slots__ = ("_end", "_is_handed_over", "_lease", "_room", "event", "service", "takes")

    def __init__(self, lease: Lease, event: CallEvent, end: End, room: Room | None = None) -> None:
        self.service: Service = lease.servable
        self.takes = lease.takes
        self.event = event
        self._lease = lease
        self._end = end
        self._room = room
        self._is_handed_over = False

    def hand_over(self) -> Callable[[], None]:
        """Let the call go on behind its block, such as for the rest of an answer; what is given must be called once."""
        self._is_handed_over = True
        self._leave_room(0)
        return self._finish

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None or not self._is_handed_over:
            self._finish(error)

    def _leave_room(self, sent: int) -> None:
        room, self._room = self._room, None
        if room is not None:
            room.leave(sent)

    def _finish(self, error: BaseException | None = None) -> None:
        self._leave_room(self.event.sent)
        try:
            self._end(self.event, error)
        finally:
            self._lease.release()


def code_of(error: BaseException) -> str:
    """Give the name by which metrics know an error; cancellation has one, be it of several tasks."""
    cancelled = isinstance(error, trio.Cancelled) or (
        isinstance(error, BaseExceptionGroup) and error.split(trio.Cancelled)[1] is None
    )
    return CANCELLED if cancelled else type(error).__name__


# ----------------------------------------------------------------------
# Calls of services that make text, vectors, scores or speech, or write that down: lease and event as for all calls
# ----------------------------------------------------------------------

_T = TypeVar("_T")

_UNCHARGED: Final = frozenset({Task.SPEECH_TO_TEXT, Task.TEXT_TO_SPEECH})
"""What is not counted in tokens, and so not refused for them."""


async def call_generative(
    plane: DataPlane,
    name: str,
    task: Task | None,
    door: Door,
    method: str,
    *,
    request_id: str = "",
    received: int = 0,
    is_stream: bool = False,
) -> ObservedCall:
    """Lease a service that does a task; the call ends with the ``with`` block of what is given.

    Args:
        plane: has it.
        name: of the service.
        task: what it must do; None where the caller looks for itself.
        door: which the call has come by.
        method: as the door's API calls it.
        request_id: that the caller gave.
        received: bytes of the call's body.
        is_stream: whether it is answered bit by bit.

    Raises:
        CallerLimited: the caller has used up its tokens.
        NotSupported: the service does something else.
        ServerError: as ``DataPlane.call``.

    Ownership and Cancellation: as ``DataPlane.call``.
    """
    call = await plane.call(name, door, method, request_id=request_id, received=received, is_stream=is_stream)
    if Takes.GENERATION in call.takes:
        does = cast("GenerativeService", call.service).tasks
        # What makes no text as it is configured says itself why not.
        if task is None or task in does or (task is Task.TEXT_GENERATION and not does):
            if task is not None and task not in _UNCHARGED:
                _check_tokens(plane, call)
            return call
        said = f"does {' and '.join(sorted(each.value for each in does)) or 'none of it as it is configured'}"
    else:
        said = f"is a {call.event.kind} that takes {' and '.join(sorted(each.value for each in call.takes))}"
    wanted = "any of this" if task is None else task.value
    with call:
        raise NotSupported(f'the service "{name[:80]}" does no {wanted}; it {said}')


def _check_tokens(plane: DataPlane, call: ObservedCall) -> None:
    """Let a call pass whose caller has tokens left; another one ends.

    Raises:
        CallerLimited: it has none.
    """
    allowance = allowance_of_caller()
    if allowance is None:
        return
    try:
        allowance.check_tokens()
    except CallerLimited:
        plane.note_refused_caller(OVER_LIMIT)
        with call:
            raise


def charge_caller(tokens: int) -> None:
    """Count tokens that were read for the current caller, where those of callers are counted."""
    allowance = allowance_of_caller()
    if allowance is not None:
        allowance.spend_tokens(tokens)


class _ChargedGeneration:
    """A generation whose tokens are counted for its caller as they come; see :class:`Generation`."""

    def __init__(self, generation: Generation, allowance: Allowance) -> None:
        self._generation = generation
        self._pieces = aiter(generation)
        self._allowance = allowance
        self._charged = 0
        self.charge_prompt()

    @property
    def prompt_tokens(self) -> int:
        return self._generation.prompt_tokens

    @property
    def cached_tokens(self) -> int:
        return self._generation.cached_tokens

    def charge_prompt(self) -> None:
        """Count what was read since; code of users tells that at its end."""
        self._allowance.spend_tokens(self._generation.prompt_tokens - self._charged)
        self._charged = self._generation.prompt_tokens

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Piece:
        piece = await anext(self._pieces)
        self._allowance.spend_tokens(piece.tokens)
        return piece


@asynccontextmanager
async def open_generation(model: TextGenerator, asked: GenerationRequest) -> AsyncIterator[Generation]:
    """Have a service that makes text answer a request until its deadline; the caller is charged for its tokens.

    Raises:
        DeadlineExceeded: on leaving, when the deadline has passed, waiting or generating.
        ServerError: as ``TextGenerator.generate``.

    Ownership: the request, until the block is left; leaving it before the end cancels it.
    Cancellation: anywhere.
    """
    async with _until(asked.deadline, model.generate(asked)) as generation:
        allowance = allowance_of_caller()
        if allowance is None:
            yield generation
        else:
            charged = _ChargedGeneration(generation, allowance)
            try:
                yield charged
            finally:
                charged.charge_prompt()


@asynccontextmanager
async def open_transcript(call: ObservedCall, asked: TranscriptionRequest) -> AsyncIterator[Transcript]:
    """Have the service of a call, which writes down speech, do so with a recording until the request's deadline.

    Raises:
        DeadlineExceeded: on leaving, when the deadline has passed, waiting or listening.
        ServerError: as ``Transcriber.transcribe``.

    Ownership: the request, until the block is left; leaving it before the end ends it.
    Cancellation: anywhere.
    """
    service = cast("Transcriber", call.service)
    async with _until(asked.deadline, service.transcribe(asked)) as transcript:
        yield transcript


@asynccontextmanager
async def open_speech(call: ObservedCall, asked: SpeechRequest) -> AsyncIterator[Speech]:
    """Have the service of a call, which speaks, do so with a text until the request's deadline.

    Raises:
        DeadlineExceeded: on leaving, when the deadline has passed, waiting or speaking.
        ServerError: as ``TextSpeaker.speak``.

    Ownership: the request, until the block is left; leaving it before the end ends it.
    Cancellation: anywhere.
    """
    service = cast("TextSpeaker", call.service)
    async with _until(asked.deadline, service.speak(asked)) as speech:
        yield speech


@asynccontextmanager
async def _until(deadline: float, opened: AbstractAsyncContextManager[_T]) -> AsyncIterator[_T]:
    """Open something until a deadline.

    Raises:
        DeadlineExceeded: on leaving, when it has passed.
    """
    with trio.CancelScope(deadline=deadline) as scope:
        async with opened as made:
            yield made
    if scope.cancelled_caught:
        raise DeadlineExceeded("the answer was not ready in the time that the request allows")
