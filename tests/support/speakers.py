"""A service that speaks what a test has written down, and notes what it was asked."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import trio

from ovmstrio.core.generation import Task
from ovmstrio.core.request import ServableMetadata
from ovmstrio.core.speech import SpeechPart
from tests.support.scripted_steps import ScriptedSteps

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from ovmstrio.core.speech import SpeechRequest

__all__ = ["SPOKEN", "ScriptedSpeaker"]

SPOKEN = (SpeechPart(b"head and first", 1.5), SpeechPart(b"", 0.25), SpeechPart(b"second\x00", 2.5))


@dataclass
class ScriptedSpeaker:
    """Answers every request with the same steps: parts, errors, and events that it waits for.

    Attributes:
        requests: everything that it was asked.
        left: set when a request was left before its end.
        waiting: set when a request waits for an event.
    """

    name: str
    steps: Sequence[SpeechPart | Exception | trio.Event] = SPOKEN
    refusal: Exception | None = None
    tasks: frozenset[Task] = frozenset({Task.TEXT_TO_SPEECH})
    requests: list[SpeechRequest] = field(default_factory=list)
    left: trio.Event = field(default_factory=trio.Event)
    waiting: trio.Event = field(default_factory=trio.Event)

    @property
    def metadata(self) -> ServableMetadata:
        """Say that it has no tensors."""
        return ServableMetadata(self.name, "Scripted", (), ())

    @asynccontextmanager
    async def speak(self, asked: SpeechRequest) -> AsyncIterator[Any]:
        """Answer one request."""
        self.requests.append(asked)
        if self.refusal is not None:
            raise self.refusal
        running = ScriptedSteps[SpeechPart](self.steps, self.waiting)
        try:
            yield running
        finally:
            if not running.is_over:
                self.left.set()

    async def aclose(self) -> None:
        """Do nothing."""
        await trio.lowlevel.checkpoint()
