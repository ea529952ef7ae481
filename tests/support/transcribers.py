"""A service that writes down speech as a test has written it down, and notes what it was asked."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import trio

from ovmstrio.core.generation import Task
from ovmstrio.core.request import ServableMetadata
from ovmstrio.core.speech import SpokenSpan, TranscriptPart
from tests.support.scripted_steps import ScriptedSteps

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from ovmstrio.core.speech import TranscriptionRequest

__all__ = ["PARTS", "ScriptedTranscriber"]

PARTS = (
    TranscriptPart(" Ever tried.", (SpokenSpan(0.0, 1.5, " Ever tried."),), (SpokenSpan(0.25, 0.75, " Ever"),)),
    TranscriptPart(" Ever --> failed.", (SpokenSpan(1.5, 3723.0625, " Ever --> failed."),)),
)


@dataclass
class ScriptedTranscriber:
    """Answers every request with the same steps: parts, errors, and events that it waits for.

    Attributes:
        requests: everything that it was asked.
        left: set when a request was left before its end.
        waiting: set when a request waits for an event.
    """

    name: str
    steps: Sequence[TranscriptPart | Exception | trio.Event] = PARTS
    refusal: Exception | None = None
    tasks: frozenset[Task] = frozenset({Task.SPEECH_TO_TEXT})
    requests: list[TranscriptionRequest] = field(default_factory=list)
    left: trio.Event = field(default_factory=trio.Event)
    waiting: trio.Event = field(default_factory=trio.Event)

    @property
    def metadata(self) -> ServableMetadata:
        """Say that it has no tensors."""
        return ServableMetadata(self.name, "Scripted", (), ())

    @asynccontextmanager
    async def transcribe(self, asked: TranscriptionRequest) -> AsyncIterator[Any]:
        """Answer one request."""
        self.requests.append(asked)
        if self.refusal is not None:
            raise self.refusal
        running = _Scripted(self)
        try:
            yield running
        finally:
            if not running.is_over:
                self.left.set()

    async def aclose(self) -> None:
        """Do nothing."""
        await trio.lowlevel.checkpoint()


class _Scripted(ScriptedSteps[TranscriptPart]):
    language = "en"
    seconds = 9.25

    def __init__(self, service: ScriptedTranscriber) -> None:
        super().__init__(service.steps, service.waiting)
