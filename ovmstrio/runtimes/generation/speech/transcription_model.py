"""Models that write speech down: from their settings to a service whose process has loaded them."""

from __future__ import annotations

from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import trio

from ovmstrio.core.errors import ConfigError, InvalidField, Problem
from ovmstrio.core.generation import Task
from ovmstrio.core.request import ServableMetadata
from ovmstrio.runtimes.generation.engine_process import EngineProcess
from ovmstrio.runtimes.generation.idle_unload import sleep_when_idle
from ovmstrio.runtimes.generation.speech.transcripts import Transcripts
from ovmstrio.runtimes.resident import ResidentService, host
from ovmstrio.work.placement import run_load

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from ovmstrio.config.text_models import TextModelSpec
    from ovmstrio.core.speech import TranscriptionRequest
    from ovmstrio.runtimes.generation.speech.transcripts import RunningTranscript
    from ovmstrio.runtimes.kind import LoadContext

__all__ = ["TranscriptionModel", "load_transcription_model"]

_PROGRAM: Final = "ovmstrio.openvino.engine.transcription_program"
_PLATFORM: Final = "openvino_genai"
_FILES: Final = (
    "openvino_encoder_model.xml",
    "openvino_decoder_model.xml",
    "openvino_tokenizer.xml",
    "openvino_detokenizer.xml",
    "generation_config.json",
)


class TranscriptionModel(ResidentService):
    """One model; a :class:`ovmstrio.core.speech.Transcriber`.

    Args:
        spec: how it is configured.
        process: where it lives.
        transcripts: what asks it.
    """

    def __init__(self, spec: TextModelSpec, process: EngineProcess, transcripts: Transcripts) -> None:
        super().__init__()
        self._spec = spec
        self._process = process
        self._transcripts = transcripts
        self._metadata = ServableMetadata(spec.name, _PLATFORM, (), ())

    @property
    def metadata(self) -> ServableMetadata:
        """What it tells of itself: no tensors."""
        return self._metadata

    @property
    def tasks(self) -> frozenset[Task]:
        """It writes speech down."""
        return frozenset({Task.SPEECH_TO_TEXT})

    @property
    def obstacle(self) -> str:
        """Why it cannot answer now; empty if it can."""
        return self._process.obstacle

    @property
    def pid(self) -> int | None:
        """The number of its process, None while there is none."""
        return self._process.pid

    @property
    def open_requests(self) -> int:
        """How many recordings are being written down, or wait."""
        return self._transcripts.open

    @asynccontextmanager
    async def transcribe(self, asked: TranscriptionRequest) -> AsyncIterator[RunningTranscript]:
        """Begin to write a recording down, as :meth:`Transcriber.transcribe` says."""
        if asked.wants_words and not self._spec.enable_word_timestamps:
            message = "this model was loaded without times of words, which its option enable_word_timestamps gives it"
            raise InvalidField(message, field="timestamp_granularities", got="word")
        async with self._transcripts.ask(self._process, asked) as running:
            yield running


async def load_transcription_model(spec: TextModelSpec, context: LoadContext) -> TranscriptionModel:
    """Load a model; the caller owns the service and closes it.

    Raises:
        ConfigError: there is no such model.
        ModelFailure: it cannot be loaded.

    Cancellation: at any checkpoint; nothing is left.
    """
    absent = await run_load(partial(_absent, spec.path))
    if absent:
        problem = Problem(
            "there is no model of speech that openvino-genai could load",
            path="path",
            expected=f"a folder with {', '.join(_FILES)}",
            found=absent,
        )
        raise ConfigError([spec.placed(problem)])
    return await host(context.tasks, _open(spec), kind=spec.kind, name=spec.name)


def _absent(folder: Path) -> str:
    """Say what is not in a folder; blocking."""
    if not folder.is_dir():
        return f"{folder}, which {'is no folder' if folder.exists() else 'does not exist'}"
    missing = [name for name in _FILES if not (folder / name).is_file()]
    return f"{folder} without {', '.join(missing)}" if missing else ""


@asynccontextmanager
async def _open(spec: TextModelSpec) -> AsyncIterator[TranscriptionModel]:
    """Have a model loaded while the block lasts.

    Raises:
        ModelFailure: as :func:`load_transcription_model`.

    Ownership: the process.
    """
    options: dict[str, Any] = {
        "folder": str(spec.path.absolute()),
        "device": spec.device,
        "properties": dict(spec.plugin_config),
        "tells_words": spec.enable_word_timestamps,
    }
    async with trio.open_nursery() as nursery:
        transcripts = Transcripts(spec.max_queue, nursery)
        process = EngineProcess(options, spec.name, transcripts.hear, transcripts.lose, _PROGRAM)
        await nursery.start(process.run)
        if spec.idle_unload_seconds:
            nursery.start_soon(sleep_when_idle, process, transcripts, spec)
        try:
            yield TranscriptionModel(spec, process, transcripts)
        finally:
            await process.sleep()
            nursery.cancel_scope.cancel()
