"""Calls of text models: admission by tokens, text, transcripts, speech and images."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final, TypeVar, cast

import trio

from ovmstrio.core.callers import OVER_LIMIT_REASON, current_quota
from ovmstrio.core.errors import CallerLimited, DeadlineExceeded, NotSupported
from ovmstrio.core.generation import Task
from ovmstrio.serving.kind import CallType
from ovmstrio.util.truncation import cut

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable
    from contextlib import AbstractAsyncContextManager
    from typing import Self

    from ovmstrio.core.callers import Quota
    from ovmstrio.core.events import ApiInterface
    from ovmstrio.core.generation import (
        Generation,
        GenerationChunk,
        GenerationRequest,
        GenerativeService,
        TextGenerator,
    )
    from ovmstrio.core.images import ImageGeneration, ImageGenerator, ImageRequest
    from ovmstrio.core.speech import (
        Speech,
        SpeechRequest,
        SpeechSynthesizer,
        Transcriber,
        Transcript,
        TranscriptionRequest,
    )
    from ovmstrio.serving.data_plane import DataPlane
from ovmstrio.serving.calls import ObservedCall

_T = TypeVar("_T")


_UNCHARGED: Final = frozenset({Task.SPEECH_TO_TEXT, Task.TEXT_TO_SPEECH, Task.IMAGE_GENERATION})
"""Tasks that are not charged in tokens and not refused for exhausted tokens."""


async def lease_generative(
    plane: DataPlane,
    name: str,
    task: Task | None,
    api_interface: ApiInterface,
    method: str,
    *,
    request_id: str = "",
    received: int = 0,
    is_stream: bool = False,
) -> ObservedCall:
    """Lease a service for a generative task; see ``DataPlane.call``.

    ``task`` is None if the caller checks the service's tasks itself.

    Raises:
        CallerLimited: the caller's token quota is exhausted.
        NotSupported: the service does not do the task.
        ServerError: as ``DataPlane.call``.
    """
    call = await plane.call(name, api_interface, method, request_id=request_id, received=received, is_stream=is_stream)
    if CallType.GENERATION in call.call_types:
        does = cast("GenerativeService", call.service).tasks
        # A text service without tasks (by configuration) raises its own error.
        if task is None or task in does or (task is Task.TEXT_GENERATION and not does):
            if task is not None and task not in _UNCHARGED:
                _check_tokens(plane, call)
            return call
        offer = f"does {' and '.join(sorted(each.value for each in does)) or 'none of it as it is configured'}"
    else:
        offer = f"is a {call.event.kind} that takes {' and '.join(sorted(each.value for each in call.call_types))}"
    wanted = "any of this" if task is None else task.value
    with call:
        raise NotSupported(f'the service "{cut(name, 80)}" does no {wanted}; it {offer}')


def _check_tokens(plane: DataPlane, call: ObservedCall) -> None:
    """Check the caller's token quota; end the call if it is exhausted."""
    allowance = current_quota()
    if allowance is None:
        return
    try:
        allowance.check_tokens()
    except CallerLimited:
        plane.count_refused_caller(OVER_LIMIT_REASON)
        with call:
            raise


def charge_tokens(tokens: int) -> None:
    """Charge tokens to the current caller's quota, if it has one."""
    allowance = current_quota()
    if allowance is not None:
        allowance.spend_tokens(tokens)


class _ChargedGeneration:
    """A generation whose tokens are charged to the caller as they arrive."""

    def __init__(self, generation: Generation, allowance: Quota) -> None:
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
        """Charge prompt tokens that are not charged yet; user code reports them only at its end."""
        self._allowance.spend_tokens(self._generation.prompt_tokens - self._charged)
        self._charged = self._generation.prompt_tokens

    def listen(self, take: Callable[[Iterable[GenerationChunk]], bool]) -> None:
        self._generation.listen(lambda pieces: take(map(self._charge, pieces)))

    def _charge(self, piece: GenerationChunk) -> GenerationChunk:
        self._allowance.spend_tokens(piece.tokens)
        return piece

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> GenerationChunk:
        return self._charge(await anext(self._pieces))


@asynccontextmanager
async def open_generation(model: TextGenerator, request: GenerationRequest) -> AsyncIterator[Generation]:
    """Generate text until the request's deadline, charging its tokens; leaving the block cancels the request.

    Raises:
        DeadlineExceeded: on leaving, if the deadline has passed.
        ServerError: as ``TextGenerator.generate``.
    """
    async with _until(request.deadline, model.generate(request)) as generation:
        allowance = current_quota()
        if allowance is None:
            yield generation
        else:
            charged = _ChargedGeneration(generation, allowance)
            try:
                yield charged
            finally:
                charged.charge_prompt()


@asynccontextmanager
async def open_transcript(call: ObservedCall, request: TranscriptionRequest) -> AsyncIterator[Transcript]:
    """Transcribe a recording until the request's deadline; leaving the block cancels the request.

    Raises:
        DeadlineExceeded: on leaving, if the deadline has passed.
        ServerError: as ``Transcriber.transcribe``.
    """
    service = cast("Transcriber", call.service)
    async with _until(request.deadline, service.transcribe(request)) as transcript:
        yield transcript


@asynccontextmanager
async def open_speech(call: ObservedCall, request: SpeechRequest) -> AsyncIterator[Speech]:
    """Synthesize speech until the request's deadline; leaving the block cancels the request.

    Raises:
        DeadlineExceeded: on leaving, if the deadline has passed.
        ServerError: as ``SpeechSynthesizer.speak``.
    """
    service = cast("SpeechSynthesizer", call.service)
    async with _until(request.deadline, service.speak(request)) as speech:
        yield speech


@asynccontextmanager
async def open_images(call: ObservedCall, request: ImageRequest) -> AsyncIterator[ImageGeneration]:
    """Generate images until the request's deadline; leaving the block cancels the request.

    Raises:
        DeadlineExceeded: on leaving, if the deadline has passed.
        ServerError: as ``ImageGenerator.generate_images``.
    """
    service = cast("ImageGenerator", call.service)
    async with _until(request.deadline, service.generate_images(request)) as images:
        yield images


@asynccontextmanager
async def _until(deadline: float, opened: AbstractAsyncContextManager[_T]) -> AsyncIterator[_T]:
    with trio.CancelScope(deadline=deadline) as scope:
        async with opened as made:
            yield made
    if scope.cancelled_caught:
        raise DeadlineExceeded("the request's deadline passed before the response was complete")
