"""Models that write speech down: from their settings to a service whose process has loaded them."""

from __future__ import annotations

from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Final

from ovmstrio.core.errors import InvalidField
from ovmstrio.core.generation import Task
from ovmstrio.runtimes.generation.speech.transcripts import RunningTranscript, Transcripts, opening_of
from ovmstrio.runtimes.generation.speech.turn_model import TurnModel, check_folder, open_model
from ovmstrio.runtimes.resident import host

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    import trio

    from ovmstrio.config.text_models import TextModelSpec
    from ovmstrio.core.speech import TranscriptionRequest
    from ovmstrio.runtimes.kind import LoadContext

__all__ = ["TranscriptionModel", "load_transcription_model"]

_PROGRAM: Final = "ovmstrio.openvino.engine.transcription_program"
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
