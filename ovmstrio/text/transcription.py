"""Models that write speech down: from their settings to a service whose process has loaded them."""

from __future__ import annotations

from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final

from ovmstrio.core.errors import InvalidField
from ovmstrio.core.generation import Task
from ovmstrio.core.speech import SpokenSpan, TranscriptPart
from ovmstrio.serving.hosted_service import host
from ovmstrio.text.chunk_scheduler import TurnModel, TurnQueue, TurnTaker, check_folder, open_model

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Iterator
    from pathlib import Path

    import trio

    from ovmstrio.config.specs import TextModelSpec
    from ovmstrio.core.speech import TranscriptionRequest
    from ovmstrio.serving.kind import LoadContext

__all__ = ["RunningTranscript", "TranscriptionModel", "Transcripts", "load_transcription_model", "opening_of"]

# ----------------------------------------------------------------------
# Recordings that a process writes down, window by window
# ----------------------------------------------------------------------


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


# ----------------------------------------------------------------------
# Models that write speech down: from their settings to a service whose process has loaded them
# ----------------------------------------------------------------------

_PROGRAM: Final = "ovmstrio.inference.engine.transcription_program"
_FILES: Final = (
    "openvino_encoder_model.xml",
    "openvino_decoder_model.xml",
    "openvino_tokenizer.xml",
    "openvino_detokenizer.xml",
    "generation_config.json",
)


class TranscriptionModel(TurnModel[Transcripts]):
    """One model; a :class:`ovmstrio.core.speech.Transcriber`."""

    task: ClassVar = Task.SPEECH_TO_TEXT

    @asynccontextmanager
    async def transcribe(self, asked: TranscriptionRequest) -> AsyncIterator[RunningTranscript]:
        """Begin to write a recording down, as :meth:`Transcriber.transcribe` says."""
        if asked.wants_words and not self.spec.enable_word_timestamps:
            message = "this model was loaded without times of words, which its option enable_word_timestamps gives it"
            raise InvalidField(message, field="timestamp_granularities", got="word")
        async with self.queue.ask(self.process, *opening_of(asked)) as running:
            yield running


async def load_transcription_model(spec: TextModelSpec, context: LoadContext) -> TranscriptionModel:
    """Load a model; the caller owns the service and closes it.

    Raises:
        ConfigError: there is no such model.
        ModelFailure: it cannot be loaded.

    Cancellation: at any checkpoint; nothing is left.
    """
    await check_folder(spec, _missing, f"a folder with {', '.join(_FILES)}")
    opened = open_model(
        spec,
        _PROGRAM,
        {"tells_words": spec.enable_word_timestamps},
        partial(_queue, spec.max_queue),
        TranscriptionModel,
        engines=context.engines,
    )
    return await host(context.tasks, opened, kind=spec.kind, name=spec.name)


def _queue(most_waiting: int, tasks: trio.Nursery, numbers: Iterator[int]) -> Transcripts:
    return Transcripts(RunningTranscript, most_waiting, tasks, "recordings are being written down", numbers)


def _missing(folder: Path) -> str:
    return ", ".join(name for name in _FILES if not (folder / name).is_file())
