"""Recordings that a process writes down, window by window."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ovmstrio.core.speech import SpokenSpan, TranscriptPart
from ovmstrio.runtimes.generation.speech.turn_taking import TurnQueue, TurnTaker

if TYPE_CHECKING:
    from collections.abc import Iterable

    import trio

    from ovmstrio.core.speech import TranscriptionRequest

__all__ = ["RunningTranscript", "Transcripts", "opening_of"]


class RunningTranscript(TurnTaker[TranscriptPart]):
    """A recording that is being written down; see :class:`ovmstrio.core.speech.Transcript`.

    Args:
        number: the process's number for it.
        turns: of which it has one, until it is over.
    """

    def __init__(self, number: int, turns: trio.Semaphore) -> None:
        super().__init__(number, turns)
        self.language = ""
        self.seconds = 0.0
        self._told = 0

    def hear(self, text: str) -> None:
        """Take text that comes before the end of its window."""
        self._told += len(text)
        self.put(TranscriptPart(text))

    def take(self, told: dict[str, Any]) -> None:
        """Take all that was understood of a window."""
        self.language = told["language"] or self.language
        self.seconds = told["seconds"]
        start = told["start"]
        spans = (tuple(_spans(told[kind], start)) for kind in ("segments", "words"))
        self.put(TranscriptPart(told["text"][self._told :], *spans))
        self._told = 0
        if told["is_last"]:
            self.end()


def _spans(rows: Iterable[tuple[float, float, str]], start: float) -> Iterable[SpokenSpan]:
    return (SpokenSpan(round(start + begin, 3), round(start + end, 3), text) for begin, end, text in rows)


class Transcripts(TurnQueue[RunningTranscript]):
    """All recordings of one model."""

    def hear(self, frame: Any) -> None:
        """Hand out text that a process has told of.

        Raises:
            ValueError, TypeError: it is none.
        """
        number, text = frame
        running = self.running.get(number)
        if running is not None:
            running.hear(text)


def opening_of(asked: TranscriptionRequest) -> tuple[bytes, dict[str, Any]]:
    """Give what a process is told of a recording."""
    return asked.audio, {
        "translates": asked.translates,
        "language": asked.language,
        "prompt": asked.prompt,
        "temperature": asked.temperature,
        "has_segments": asked.wants_segments,
        "has_words": asked.wants_words,
    }
