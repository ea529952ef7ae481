"""A service that writes down speech as a test has written it down, and notes what it was asked."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import trio

from ovmstrio.core.generation import Task
from ovmstrio.core.speech import SpokenSpan, TranscriptionRequest, TranscriptPart
from tests.support.scripted_steps import ScriptedService, ScriptedSteps

PARTS = (
    TranscriptPart(" Ever tried.", (SpokenSpan(0.0, 1.5, " Ever tried."),), (SpokenSpan(0.25, 0.75, " Ever"),)),
    TranscriptPart(" Ever --> failed.", (SpokenSpan(1.5, 3723.0625, " Ever --> failed."),)),
)


@dataclass
class ScriptedTranscriber(ScriptedService["TranscriptionRequest"]):
    """Answers every request with the same steps: parts, errors, and events that it waits for."""

    steps: Sequence[TranscriptPart | Exception | trio.Event] = PARTS
    tasks: frozenset[Task] = frozenset({Task.SPEECH_TO_TEXT})

    @asynccontextmanager
    async def transcribe(self, asked: TranscriptionRequest) -> AsyncIterator[Any]:
        self.note(asked)
        async with self.answering(_Scripted(self)) as running:
            yield running


class _Scripted(ScriptedSteps[TranscriptPart]):
    language = "en"
    seconds = 9.25

    def __init__(self, service: ScriptedTranscriber) -> None:
        super().__init__(service.steps, service.waiting)
