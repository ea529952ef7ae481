"""Transcription service (speech to text): loading, and requests that a process answers window by window."""

from __future__ import annotations

from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final

from ovmstrio.core.errors import InvalidField
from ovmstrio.core.generation import Task
from ovmstrio.core.speech import TimedText, TranscriptPart
from ovmstrio.serving.hosted_service import host_service
from ovmstrio.text.chunk_scheduler import (
    ChunkedModel,
    ChunkedRequest,
    ChunkScheduler,
    check_model_files,
    open_chunked_model,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Iterator
    from pathlib import Path

    import trio

    from ovmstrio.config.specs import TextModelSpec
    from ovmstrio.core.speech import TranscriptionRequest
    from ovmstrio.serving.kind import LoadContext


class RunningTranscript(ChunkedRequest[TranscriptPart]):
    """A running transcription; see :class:`ovmstrio.core.speech.Transcript`."""

    def __init__(self, number: int, turns: trio.Semaphore) -> None:
        super().__init__(number, turns)
        self.language = ""
        self.seconds = 0.0
        self._sent_characters = 0

    def hear(self, text: str) -> None:
        """Take text that the process sends before the end of its window."""
        self._sent_characters += len(text)
        self.put(TranscriptPart(text))

    def take(self, payload: dict[str, Any]) -> None:
        """Take the result of a window."""
        self.language = payload["language"] or self.language
        self.seconds = payload["seconds"]
        start = payload["start"]
        spans = (tuple(_spans(payload[kind], start)) for kind in ("segments", "words"))
        self.put(TranscriptPart(payload["text"][self._sent_characters :], *spans))
        self._sent_characters = 0
        if payload["is_last"]:
            self.end()


def _spans(rows: Iterable[tuple[float, float, str]], start: float) -> Iterable[TimedText]:
    return (TimedText(round(start + begin, 3), round(start + end, 3), text) for begin, end, text in rows)


class TranscriptionScheduler(ChunkScheduler[RunningTranscript]):
    """All transcriptions of one model."""

    def hear(self, frame: Any) -> None:
        """Route early text to its request.

        Raises:
            ValueError, TypeError: the message is malformed.
        """
        number, text = frame
        running = self.running.get(number)
        if running is not None:
            running.hear(text)


def open_arguments(asked: TranscriptionRequest) -> tuple[bytes, dict[str, Any]]:
    """Return the arguments of a request's ``open`` call."""
    return asked.audio, {
        "translates": asked.translates,
        "language": asked.language,
        "prompt": asked.prompt,
        "temperature": asked.temperature,
        "has_segments": asked.wants_segments,
        "has_words": asked.wants_words,
    }


_PROGRAM: Final = "ovmstrio.inference.engine.transcription_program"
_FILES: Final = (
    "openvino_encoder_model.xml",
    "openvino_decoder_model.xml",
    "openvino_tokenizer.xml",
    "openvino_detokenizer.xml",
    "generation_config.json",
)


class TranscriptionModel(ChunkedModel[TranscriptionScheduler]):
    """One model; a :class:`ovmstrio.core.speech.Transcriber`."""

    task: ClassVar = Task.SPEECH_TO_TEXT

    @asynccontextmanager
    async def transcribe(self, asked: TranscriptionRequest) -> AsyncIterator[RunningTranscript]:
        """Transcribe a recording, as :meth:`Transcriber.transcribe`."""
        if asked.wants_words and not self.spec.enable_word_timestamps:
            message = "word timestamps are disabled for this model; set its option enable_word_timestamps"
            raise InvalidField(message, field="timestamp_granularities", got="word")
        async with self.queue.ask(self.process, *open_arguments(asked)) as running:
            yield running


async def load_transcription_model(spec: TextModelSpec, context: LoadContext) -> TranscriptionModel:
    """Load a model, which the caller must close.

    Raises:
        ConfigError: there is no such model.
        ModelFailure: it cannot be loaded.
    """
    await check_model_files(spec, _missing, f"a folder with {', '.join(_FILES)}")
    opened = open_chunked_model(
        spec,
        _PROGRAM,
        {"has_word_timestamps": spec.enable_word_timestamps},
        partial(_queue, spec),
        TranscriptionModel,
        engines=context.engines,
    )
    return await host_service(context.tasks, opened, kind=spec.kind, name=spec.name)


def _queue(spec: TextModelSpec, tasks: trio.Nursery, numbers: Iterator[int]) -> TranscriptionScheduler:
    return TranscriptionScheduler(
        RunningTranscript,
        spec.max_queue,
        tasks,
        "recordings are being written down",
        numbers,
        max_queue_time=spec.max_queue_time,
    )


def _missing(folder: Path) -> str:
    return ", ".join(name for name in _FILES if not (folder / name).is_file())
