"""A service that speaks what a test has written down, and notes what it was asked."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import trio

from ovmstrio.core.generation import Task
from ovmstrio.core.speech import SpeechPart, SpeechRequest
from tests.support.scripted_steps import ScriptedService, ScriptedSteps

SPOKEN = (SpeechPart(b"head and first", 1.5), SpeechPart(b"", 0.25), SpeechPart(b"second\x00", 2.5))


@dataclass
class ScriptedSpeaker(ScriptedService["SpeechRequest"]):
    """Answers every request with the same steps: parts, errors, and events that it waits for."""

    steps: Sequence[SpeechPart | Exception | trio.Event] = SPOKEN
    tasks: frozenset[Task] = frozenset({Task.TEXT_TO_SPEECH})

    @asynccontextmanager
    async def speak(self, asked: SpeechRequest) -> AsyncIterator[Any]:
        self.note(asked)
        async with self.answering(ScriptedSteps[SpeechPart](self.steps, self.waiting)) as running:
            yield running
