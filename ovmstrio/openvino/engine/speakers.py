"""What speaks: the library's pipelines for SpeechT5 and Kokoro; see also :mod:`ovmstrio.openvino.engine.piper`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
import openvino as ov
import openvino_genai as genai

from ovmstrio.core.errors import InvalidField, ModelFailure
from ovmstrio.openvino.engine.library_errors import reason_of
from ovmstrio.util.regular_files import read_regular_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ovmstrio.openvino.engine.sound_files import Samples

__all__ = ["PipelineSpeaker", "Speaker", "bounded_memory", "voice_missing"]

_VOICES: Final = "voices"
_KOKORO_FILE: Final = "openvino_model.xml"
_REMEMBERED: Final = "CPU_RUNTIME_CACHE_CAPACITY"
_SHOWN_VOICES: Final = 12
_SPEECHT5_SHAPE: Final = (1, 512)
_KOKORO_LANGUAGES: Final = ("en-us", "en-gb", "es", "fr-fr", "hi", "it", "pt-br")
_KOKORO_ALIASES: Final = ("a", "b", "e", "f", "h", "i", "p", "en")


class Speaker(Protocol):
    """Speaks sentences.

    Attributes:
        voices: whose names may be asked for.
    """

    voices: tuple[str, ...]

    def check(self, voice: str, language: str, speed: float) -> None:
        """See that it can speak so; empty texts are its own choice.

        Raises:
            InvalidField: it cannot.
        """
        ...

    def say(self, sentence: str, voice: str, language: str, speed: float) -> tuple[Samples, int]:
        """Speak a sentence; give samples from -1 to 1 and how many of them are a second.

        Raises:
            InvalidField: it cannot speak that.
            ModelFailure: it failed.
        """
        ...


def bounded_memory(device: str, properties: Mapping[str, Any]) -> dict[str, Any]:
    """Add to properties what keeps networks from remembering all lengths that they have seen.

    What is prepared for a sentence has tens of megabytes and helps the next one of the same length, of which there is
    none for long.
    """
    return {_REMEMBERED: 0, **properties} if device == "CPU" else dict(properties)


def voice_missing(voice: str, voices: tuple[str, ...]) -> InvalidField:
    """Refuse a voice that nobody has."""
    more = f" and {len(voices) - _SHOWN_VOICES} more" if len(voices) > _SHOWN_VOICES else ""
    there = (
        f"there are: {', '.join(voices[:_SHOWN_VOICES])}{more}" if voices else "leave it out: the model has one voice"
    )
    message = f"Requested voice '{voice[:80]}' not found in available voices; {there}"
    return InvalidField(message, field="voice")


class PipelineSpeaker:
    """A folder that the library reads.

    Args:
        folder: as Optimum exports SpeechT5, or one of Kokoro.
        device: where it runs.
        properties: of the device.
        voices: files of speaker embeddings, 32-bit floats one after the other, by name; in addition to those in the
            folder's ``voices``.

    Attributes:
        voices: whose names may be asked for.

    Raises:
        RuntimeError, ValueError, OSError: it cannot be loaded.
    """

    def __init__(self, folder: str, device: str, properties: Mapping[str, Any], voices: Mapping[str, str]) -> None:
        if (Path(folder) / _KOKORO_FILE).is_file():
            properties = bounded_memory(device, properties)
        self._make: Callable[[], Any] = lambda: genai.Text2SpeechPipeline(folder, device, **properties)
        self._pipeline = self._make()
        shape = tuple(self._pipeline.get_speaker_embedding_shape())
        self._is_kokoro = shape != _SPEECHT5_SHAPE
        files = {path.stem: path for path in sorted((Path(folder) / _VOICES).glob("*.bin"))}
        files |= {name: Path(path) for name, path in voices.items()}
        self._embeddings = {name: _read_embedding(name, path, shape) for name, path in files.items()}
        self.voices = tuple(self._embeddings)

    def check(self, voice: str, language: str, speed: float) -> None:
        """See that it can speak so, as :meth:`Speaker.check` says."""
        if voice and voice not in self._embeddings:
            raise voice_missing(voice, self.voices)
        if not self._is_kokoro:
            if speed != 1:
                raise InvalidField(
                    "speed must be 1: this model speaks at its own speed", field="speed", got=f"{speed:g}"
                )
            return
        if not voice and not self.voices:
            message = "this model speaks by voices alone, and none is configured: add files of speaker embeddings to it"
            raise InvalidField(message, field="voice")
        if language and language.lower() not in {*_KOKORO_LANGUAGES, *_KOKORO_ALIASES}:
            message = f"language should be one of {', '.join(_KOKORO_LANGUAGES)}"
            raise InvalidField(message, field="language", got=repr(language[:40]))

    def say(self, sentence: str, voice: str, language: str, speed: float) -> tuple[Samples, int]:
        """Speak a sentence, as :meth:`Speaker.say` says."""
        options = {"speed": speed, "language": language.lower() or _KOKORO_LANGUAGES[0]} if self._is_kokoro else {}
        if self._is_kokoro and not voice:
            voice = self.voices[0]
        embedding = self._embeddings[voice] if voice else None
        try:
            made = self._pipeline.generate(sentence, embedding, **options)
            return np.array(made.speeches[0].data, np.float32).reshape(-1), made.output_sample_rate
        except Exception as error:  # the library's come as those of Python that resemble them
            reason = reason_of(error)
            # What it was doing would stay in its state.
            self._pipeline = self._make()
            raise ModelFailure(f"the model failed: {reason}") from error


def _read_embedding(name: str, path: Path, shape: tuple[int, ...]) -> ov.Tensor:
    data = read_regular_bytes(path, max_bytes=None)
    wanted = int(np.prod(shape))
    if len(data) != 4 * wanted:
        message = f"File must contain speaker embedding with {wanted} 32-bit floats. Got: {len(data) / 4:g}"
        raise ValueError(f"voice {name!r}, {path}: {message}")
    return ov.Tensor(np.frombuffer(data, "<f4").reshape(shape).copy())
