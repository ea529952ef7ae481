"""Speech synthesis service (text to speech): loading, and requests that a process answers sentence by sentence."""

from __future__ import annotations

from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final

from ovmstrio.core.errors import ConfigError, InvalidField, Problem
from ovmstrio.core.generation import Task
from ovmstrio.core.speech import SpeechPart
from ovmstrio.inference.engine.messages import VOICE_FILES
from ovmstrio.serving.hosted_service import host_service
from ovmstrio.text.chunk_scheduler import (
    ChunkedModel,
    ChunkedRequest,
    ChunkScheduler,
    check_model_files,
    open_chunked_model,
)
from ovmstrio.util.load_limit import run_load

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping
    from pathlib import Path

    import trio

    from ovmstrio.config.specs import TextModelSpec
    from ovmstrio.core.speech import SpeechRequest
    from ovmstrio.serving.kind import LoadContext

_PROGRAM: Final = "ovmstrio.inference.engine.speech_program"
_MAX_SENTENCES_AHEAD: Final = 2
"""Sentences that are synthesized ahead of the reader."""

_SPEECHT5: Final = (
    "openvino_encoder_model.xml",
    "openvino_decoder_model.xml",
    "openvino_postnet.xml",
    "openvino_vocoder.xml",
    "openvino_tokenizer.xml",
)
_KOKORO: Final = ("openvino_model.xml",)
_CONFIG: Final = "config.json"
_EXPECTED: Final = (
    f"a folder of SpeechT5 with {_CONFIG}, {', '.join(_SPEECHT5)}, one of Kokoro with {_CONFIG} and {_KOKORO[0]}, or "
    "one with a voice of Piper, NAME.onnx and NAME.onnx.json"
)


class RunningSpeech(ChunkedRequest[SpeechPart]):
    """A running synthesis; see :class:`ovmstrio.core.speech.Speech`."""

    def __init__(self, number: int, turns: trio.Semaphore) -> None:
        super().__init__(number, turns, _MAX_SENTENCES_AHEAD)

    def take(self, payload: dict[str, Any]) -> None:
        """Take the audio of a sentence."""
        self.put(SpeechPart(bytes(payload["audio"]), payload["seconds"]))
        if payload["is_last"]:
            self.end()


class SpeechModel(ChunkedModel[ChunkScheduler[RunningSpeech]]):
    """One model; a :class:`ovmstrio.core.speech.SpeechSynthesizer`."""

    task: ClassVar = Task.TEXT_TO_SPEECH

    @asynccontextmanager
    async def speak(self, asked: SpeechRequest) -> AsyncIterator[RunningSpeech]:
        """Synthesize a text, as :meth:`TextSpeaker.speak`."""
        low, high = self.spec.speed_min, self.spec.speed_max
        if not low <= asked.speed <= high:
            message = f"speed must be between speed_min ({low:g}) and speed_max ({high:g})"
            raise InvalidField(message, field="speed", got=f"{asked.speed:g}")
        options = {
            "voice": asked.voice,
            "language": asked.language,
            "speed": asked.speed,
            "form": asked.form.value,
            "is_streamed": asked.is_streamed,
        }
        async with self.queue.ask(self.process, asked.text, options) as running:
            yield running


async def load_speech_model(spec: TextModelSpec, context: LoadContext) -> SpeechModel:
    """Load a model, which the caller must close.

    Raises:
        ConfigError: there is no such model, or a voice file is missing.
        ModelFailure: it cannot be loaded.
    """
    await check_model_files(spec, _missing, _EXPECTED)
    problems = await run_load(partial(_unusable_voices, spec.path, spec.voices))
    if problems:
        raise ConfigError([spec.placed(each) for each in problems])
    voices = {name: str(path.absolute()) for name, path in spec.voices.items()}
    queue = partial(_queue, spec)
    opened = open_chunked_model(spec, _PROGRAM, {"voices": voices}, queue, SpeechModel, engines=context.engines)
    return await host_service(context.tasks, opened, kind=spec.kind, name=spec.name)


def _queue(spec: TextModelSpec, tasks: trio.Nursery, numbers: Iterator[int]) -> ChunkScheduler[RunningSpeech]:
    return ChunkScheduler(
        RunningSpeech, spec.max_queue, tasks, "texts are being spoken", numbers, max_queue_time=spec.max_queue_time
    )


def _missing(folder: Path) -> str:
    networks = sorted(folder.glob(VOICE_FILES))
    if networks:
        described = networks[0].with_name(f"{networks[0].name}.json")
        return "" if described.is_file() else described.name
    for files in (_SPEECHT5, _KOKORO):
        if (folder / files[0]).is_file():
            return ", ".join(name for name in (_CONFIG, *files) if not (folder / name).is_file())
    return f"{_SPEECHT5[0]}, {_KOKORO[0]} and {VOICE_FILES}"


def _unusable_voices(folder: Path, voices: Mapping[str, Path]) -> list[Problem]:
    if voices and any(folder.glob(VOICE_FILES)):
        message = "Piper models take no voices: their speakers are in the model file"
        return [Problem(message, path="voices", found=", ".join(voices), suggestion="leave it out")]
    message = "Requested voice speaker embeddings file does not exist"
    return [Problem(message, path="voices", found=str(path)) for path in voices.values() if not path.is_file()]
