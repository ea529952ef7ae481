"""Program of a speech-synthesis process: one sentence at a time, in the order of requests.

::

    first                                ["loaded", facts] or ["failed", reason]
    ["open", number, text, options]      see :mod:`.chunk_worker`
    ["part", number]                     ["part", audio of a sentence] or ["refused", error]
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import unicodedata
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
import openvino as ov
import openvino_genai as genai

from ovmstrio.core.errors import InvalidField, ModelFailure
from ovmstrio.inference.engine.chunk_worker import ChunkWorker, run_process
from ovmstrio.inference.engine.messages import FAILED, LOADED, VOICE_FILES
from ovmstrio.inference.engine.pipeline import library_error_message
from ovmstrio.util.extras import Extra, install_command
from ovmstrio.util.regular_files import read_regular_bytes
from ovmstrio.util.truncation import cut, shown

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ovmstrio.inference.engine.audio_files import AudioWriter, Samples
    from ovmstrio.isolation.blocking_channel import BlockingChannel

# ----------------------------------------------------------------------
# Speakers: SpeechT5 and Kokoro through OpenVINO GenAI
# ----------------------------------------------------------------------

_VOICES: Final = "voices"
_KOKORO_FILE: Final = "openvino_model.xml"
_SHAPE_CACHE: Final = "CPU_RUNTIME_CACHE_CAPACITY"
_SHOWN_VOICES: Final = 12
_SPEECHT5_SHAPE: Final = (1, 512)
_KOKORO_LANGUAGES: Final = ("en-us", "en-gb", "es", "fr-fr", "hi", "it", "pt-br")
_KOKORO_ALIASES: Final = ("a", "b", "e", "f", "h", "i", "p", "en")


class Speaker(Protocol):
    """Synthesizer of sentences."""

    voices: tuple[str, ...]

    def check(self, voice: str, language: str, speed: float) -> None:
        """Check voice, language and speed; an empty text leaves the choice to the speaker.

        Raises:
            InvalidField: a value is not supported.
        """
        ...

    def say(self, sentence: str, voice: str, language: str, speed: float) -> tuple[Samples, int]:
        """Synthesize a sentence; return samples from -1 to 1 and the sample rate in Hz."""
        ...


def without_shape_cache(device: str, properties: Mapping[str, Any]) -> dict[str, Any]:
    """Disable the shape cache: an entry takes tens of megabytes and only helps sentences of the same length."""
    return {_SHAPE_CACHE: 0, **properties} if device == "CPU" else dict(properties)


def voice_not_found(voice: str, voices: tuple[str, ...]) -> InvalidField:
    """Return the error for an unknown voice."""
    more = f" and {len(voices) - _SHOWN_VOICES} more" if len(voices) > _SHOWN_VOICES else ""
    there = (
        f"there are: {', '.join(voices[:_SHOWN_VOICES])}{more}" if voices else "leave it out: the model has one voice"
    )
    message = f"Requested voice '{cut(voice, 80)}' not found in available voices; {there}"
    return InvalidField(message, field="voice")


class PipelineSpeaker:
    """SpeechT5 as exported by Optimum, or Kokoro; ``voices`` are files of 32-bit float speaker embeddings by name."""

    def __init__(self, folder: str, device: str, properties: Mapping[str, Any], voices: Mapping[str, str]) -> None:
        if (Path(folder) / _KOKORO_FILE).is_file():
            properties = without_shape_cache(device, properties)
        self._make: Callable[[], Any] = lambda: genai.Text2SpeechPipeline(folder, device, **properties)
        self._pipeline = self._make()
        shape = tuple(self._pipeline.get_speaker_embedding_shape())
        self._is_kokoro = shape != _SPEECHT5_SHAPE
        files = {path.stem: path for path in sorted((Path(folder) / _VOICES).glob("*.bin"))}
        files |= {name: Path(path) for name, path in voices.items()}
        self._embeddings = {name: _read_embedding(name, path, shape) for name, path in files.items()}
        self.voices = tuple(self._embeddings)

    def check(self, voice: str, language: str, speed: float) -> None:
        """Implement :meth:`Speaker.check`."""
        if voice and voice not in self._embeddings:
            raise voice_not_found(voice, self.voices)
        if not self._is_kokoro:
            if speed != 1:
                raise InvalidField("speed must be 1: this model has a fixed speed", field="speed", got=f"{speed:g}")
            return
        if not voice and not self.voices:
            message = "this model requires a voice, and none is configured: add files of speaker embeddings"
            raise InvalidField(message, field="voice")
        if language and language.lower() not in {*_KOKORO_LANGUAGES, *_KOKORO_ALIASES}:
            message = f"language should be one of {', '.join(_KOKORO_LANGUAGES)}"
            raise InvalidField(message, field="language", got=shown(language, 40))

    def say(self, sentence: str, voice: str, language: str, speed: float) -> tuple[Samples, int]:
        """Implement :meth:`Speaker.say`."""
        options = {"speed": speed, "language": language.lower() or _KOKORO_LANGUAGES[0]} if self._is_kokoro else {}
        if self._is_kokoro and not voice:
            voice = self.voices[0]
        embedding = self._embeddings[voice] if voice else None
        try:
            made = self._pipeline.generate(sentence, embedding, **options)
            return np.array(made.speeches[0].data, np.float32).reshape(-1), made.output_sample_rate
        except Exception as error:  # the library raises builtin exception types
            reason = library_error_message(error)
            # The failed run would stay in the pipeline's state.
            self._pipeline = self._make()
            raise ModelFailure(f"the model failed: {reason}") from error


def _read_embedding(name: str, path: Path, shape: tuple[int, ...]) -> ov.Tensor:
    data = read_regular_bytes(path, max_bytes=None)
    wanted = int(np.prod(shape))
    if len(data) != 4 * wanted:
        message = f"File must contain speaker embedding with {wanted} 32-bit floats. Got: {len(data) / 4:g}"
        raise ValueError(f"voice {name!r}, {path}: {message}")
    return ov.Tensor(np.frombuffer(data, "<f4").reshape(shape).copy())


# ----------------------------------------------------------------------
# Piper voices
# ----------------------------------------------------------------------

_PROGRAM: Final = "espeak-ng"
_PROGRAM_SECONDS: Final = 10.0
_ESPEAK: Final = "espeak"
_LETTERS: Final = "text"
_BEGIN, _PAD, _END = "^", "_", "$"
_CLAUSE: Final = re.compile(r"([^,;:.!?…]+(?:[,;:.!?…]+(?=\S)[^,;:.!?…]*)*)([,;:.!?…]*)\s*")
_OTHER_LANGUAGE: Final = re.compile(r"\([a-z-]+\)")
_RATES: Final = range(8_000, 192_001)
_PRECISION: Final = "INFERENCE_PRECISION_HINT"
# Per run, at the voice's own speed. Emoji and numbers expand to many phonemes, and memory grows with them.
_MAX_PHONEMES: Final = 500
_MIN_PHONEMES: Final = 50
_NOISE, _LENGTH, _NOISE_OF_LENGTH = 0.667, 1.0, 0.8


class InvalidVoice(Exception):
    """A voice cannot be served; the message gives the reason."""


class PiperSpeaker:
    """Piper voice, an ONNX network with a configuration file of the same name and ``.json`` appended.

    Raises:
        InvalidVoice: the configuration is invalid, or espeak-ng is not installed.
        RuntimeError: the network cannot be loaded.
    """

    def __init__(self, network: Path, device: str, properties: Mapping[str, Any]) -> None:
        config = _read_config(network.with_name(f"{network.name}.json"))
        self._numbers: dict[str, list[int]] = config["phoneme_id_map"]
        self._rate = int(config["audio"]["sample_rate"])
        self._scales = {"noise_scale": _NOISE, "length_scale": _LENGTH, "noise_w": _NOISE_OF_LENGTH}
        self._scales |= config.get("inference") or {}
        self._speakers: dict[str, int] = dict(config.get("speaker_id_map") or {})
        self._phonemes = _phonemes_of(config)
        self.languages = _languages_of(config)
        self.voices = tuple(dict.fromkeys((network.stem, str(config.get("dataset") or network.stem), *self._speakers)))
        # Reduced precision (bf16, f16) is audibly worse.
        settings = {_PRECISION: "f32", **without_shape_cache(device, properties)}
        model = ov.Core().compile_model(str(network), device, settings)
        self._has_speakers = len(model.inputs) > len(("input", "input_lengths", "scales"))
        self._request = model.create_infer_request()
        self.say("a.", "", "", 1.0)

    def check(self, voice: str, language: str, speed: float) -> None:
        """Implement :meth:`Speaker.check`."""
        del speed
        if voice and voice not in self.voices:
            raise voice_not_found(voice, self.voices)
        if language and self.languages and language.lower().replace("_", "-") not in self.languages:
            message = f"this voice supports {self.languages[0]} only"
            raise InvalidField(message, field="language", got=shown(language, 40))

    def say(self, sentence: str, voice: str, language: str, speed: float) -> tuple[Samples, int]:
        """Implement :meth:`Speaker.say`."""
        del language
        most = max(_MIN_PHONEMES, int(_MAX_PHONEMES * min(1.0, speed)))
        runs = _runs_of(self._without_unknown(self._phonemize(sentence)), most)
        return np.concatenate([self._say_run(each, voice, speed) for each in runs]), self._rate

    def _say_run(self, phonemes: str, voice: str, speed: float) -> Samples:
        numbers = self._numbers_of(phonemes)
        scales = [self._scales["noise_scale"], self._scales["length_scale"] / speed, self._scales["noise_w"]]
        inputs: list[Any] = [
            np.array([numbers], np.int64),
            np.array([len(numbers)], np.int64),
            np.array(scales, np.float32),
        ]
        if self._has_speakers:
            inputs.append(np.array([self._speakers.get(voice, 0)], np.int64))
        try:
            made = self._request.infer(inputs)
            sound: Samples = np.array(next(iter(made.values())), np.float32).reshape(-1)
        except RuntimeError as error:
            raise ModelFailure(f"the model failed: {library_error_message(error)}") from error
        return np.clip(np.nan_to_num(sound), -1, 1)

    def _phonemize(self, sentence: str) -> str:
        """Return phonemes with the punctuation between clauses, which controls intonation."""
        if self._phonemes is None:
            return sentence
        parts = []
        for clause, marks in _CLAUSE.findall(sentence):
            parts.append(_run_espeak(self._phonemes, clause))
            parts.append(f"{marks[:1].replace('…', '.')} " if marks else " ")
        return "".join(parts).rstrip()

    def _without_unknown(self, phonemes: str) -> str:
        known = self._numbers.keys() - {_BEGIN, _PAD, _END}
        return "".join(each for each in unicodedata.normalize("NFD", phonemes) if each in known)

    def _numbers_of(self, phonemes: str) -> list[int]:
        pad = self._numbers[_PAD]
        found = [*self._numbers[_BEGIN], *pad]
        for phoneme in phonemes:
            found += [*self._numbers[phoneme], *pad]
        return [*found, *self._numbers[_END]]


def _runs_of(phonemes: str, limit: int) -> list[str]:
    runs = []
    while len(phonemes) > limit:
        at = phonemes.rfind(" ", limit // 2, limit) + 1 or limit
        runs.append(phonemes[:at])
        phonemes = phonemes[at:]
    return [*runs, phonemes]


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config: Any = json.loads(read_regular_bytes(path))
        known = config["phoneme_id_map"]
        missing = [mark for mark in (_BEGIN, _PAD, _END) if mark not in known]
        rate = int(config["audio"]["sample_rate"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise InvalidVoice(f"{path}: not a Piper voice configuration: {error!r:.200}") from error
    if missing:
        raise InvalidVoice(f"{path}: phoneme_id_map has no {' and no '.join(missing)}")
    if rate not in _RATES:
        raise InvalidVoice(f"{path}: audio.sample_rate should be from {_RATES[0]} to {_RATES[-1]}: got {rate}")
    described: dict[str, Any] = config
    return described


def _phonemes_of(config: Mapping[str, Any]) -> str | None:
    """Return the espeak-ng language; None for voices that read letters directly."""
    kind = config.get("phoneme_type", _ESPEAK)
    if kind == _LETTERS:
        return None
    if kind != _ESPEAK:
        raise InvalidVoice(f"phoneme_type {kind!r:.40} is not supported: expected {_ESPEAK} or {_LETTERS}")
    if shutil.which(_PROGRAM) is None:
        raise InvalidVoice(
            f"this voice requires the program {_PROGRAM}, which is not installed: apt install {_PROGRAM}"
        )
    language = (config.get("espeak") or {}).get("voice")
    if not isinstance(language, str):
        raise InvalidVoice("espeak.voice is missing: the language for espeak-ng is unknown")
    _run_espeak(language, "a")
    return language


def _run_espeak(language: str, clause: str) -> str:
    command = [_PROGRAM, "-q", "--ipa", "-v", language, "--stdin"]
    try:
        done = subprocess.run(  # noqa: S603 - fixed program; the text comes on standard input
            command, input=clause.encode(), capture_output=True, timeout=_PROGRAM_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ModelFailure(f"{_PROGRAM} failed: {error}") from error
    if done.returncode:
        raise ModelFailure(f"{_PROGRAM} failed: {done.stderr.decode(errors='replace').strip()[-200:]}")
    return " ".join(_OTHER_LANGUAGE.sub("", done.stdout.decode(errors="replace")).split())


def _languages_of(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the supported language names, the most specific one first; empty if the file names none."""
    language = config.get("language") or {}
    names = (language.get("code"), (config.get("espeak") or {}).get("voice"), language.get("family"))
    return tuple(dict.fromkeys(name.lower().replace("_", "-") for name in names if isinstance(name, str)))


# ----------------------------------------------------------------------
# Sentences
# ----------------------------------------------------------------------

MAX_SENTENCE_CHARACTERS: Final = 300
"""Limit of one sentence: about twenty seconds of sound, between which requests can be cancelled and take turns."""
_WIDE_CHARACTER_WEIGHT: Final = 5  # weight of a wide character, which is a syllable, a word or an emoji

_SENTENCE_END: Final = re.compile(
    r"(?<=[.!?\u2026\u3002\uff01\uff1f])[\"'\u201d\u2019\u00bb)\]]*\s+|\n+|(?<=[\u3002\uff01\uff1f])"
)
_PAUSE: Final = re.compile(r"(?<=[,;:\uff0c\u3001\uff1b\uff1a\u2014\u2013])\s*")
_SPACE: Final = re.compile(r"\s+")
_ABBREVIATED: Final = re.compile(r"(?:^|[\s(])(?:[^\W\d_]|Mr|Mrs|Ms|Dr|Prof|St|vs|etc|e\.g|i\.e)\.$")
_ABBREVIATED_CHARACTERS: Final = len(" Prof.")
_SPEAKABLE_CATEGORIES: Final = frozenset("LNS")  # Unicode categories of letters, numbers and symbols


def split_sentences(text: str) -> list[str]:
    """Return the speakable sentences of a text, in order; empty if there are none."""
    cleaned = "".join(" " if unicodedata.category(letter) == "Cc" and letter != "\n" else letter for letter in text)
    found = [part for sentence in _split(cleaned) for part in _split_long(sentence)]
    return [each for each in found if any(unicodedata.category(letter)[0] in _SPEAKABLE_CATEGORIES for letter in each)]


def _split(text: str) -> list[str]:
    found: list[str] = []
    start = 0
    for end in _SENTENCE_END.finditer(text):
        # Search only as far back as one abbreviation; a text of abbreviations would take quadratic time otherwise.
        closed = end.start() + len(end[0].rstrip())
        before = text[max(start, closed - _ABBREVIATED_CHARACTERS) : closed]
        follower = text[end.end() : end.end() + 1]
        is_continued = "\n" not in end[0] and (follower.islower() or _ABBREVIATED.search(before))
        if not is_continued:
            found.append(text[start : end.end()])
            start = end.end()
    return [_SPACE.sub(" ", each).strip() for each in (*found, text[start:])]


def _split_long(sentence: str) -> list[str]:
    parts: list[str] = []
    while (most := _fitting(sentence)) < len(sentence):
        head = sentence[:most]
        pauses = [each.end() for each in _PAUSE.finditer(head) if each.end() >= most // 4]
        at = pauses[-1] if pauses else head.rfind(" ") + 1 or most
        parts.append(sentence[:at].strip())
        sentence = sentence[at:].strip()
    return [*parts, sentence]


def _fitting(sentence: str) -> int:
    room = MAX_SENTENCE_CHARACTERS
    for at, letter in enumerate(sentence):
        room -= _WIDE_CHARACTER_WEIGHT if unicodedata.east_asian_width(letter) in "WF" else 1
        if room < 0:
            return at
    return len(sentence)


# ----------------------------------------------------------------------
# Program
# ----------------------------------------------------------------------

_MAX_BUFFERED_SECONDS: Final = 1800  # limit of a file that is buffered to its end, so that its header has the length


class _Synthesis:
    def __init__(self, sentences: list[str], options: dict[str, Any]) -> None:
        self.sentences = deque(sentences)
        self.voice: str = options["voice"]
        self.language: str = options["language"]
        self.speed: float = options["speed"]
        self.form: str = options["form"]
        self.is_streamed: bool = options["is_streamed"]
        self.writer: AudioWriter | None = None
        self.seconds = 0.0

    def add_seconds(self, seconds: float) -> None:
        self.seconds += seconds
        if not self.is_streamed and self.seconds > _MAX_BUFFERED_SECONDS:
            limit = f"audio too long: limit {_MAX_BUFFERED_SECONDS // 60} minutes without streaming"
            raise InvalidField(f"{limit}; use stream_format: audio, or shorten the input", field="input")


class _Program(ChunkWorker[_Synthesis]):
    def __init__(self, channel: BlockingChannel, speaker: Speaker) -> None:
        super().__init__(channel)
        self._speaker = speaker

    def open(self, *arguments: Any) -> _Synthesis:
        text, options = arguments
        sentences = split_sentences(text)
        if not sentences:
            raise InvalidField("input has nothing speakable", field="input")
        synthesis = _Synthesis(sentences, options)
        self._speaker.check(synthesis.voice, synthesis.language, synthesis.speed)
        return synthesis

    def make_part(self, number: int, opened: _Synthesis) -> dict[str, Any]:
        from ovmstrio.inference.engine.audio_files import create_audio_writer  # noqa: PLC0415 - loaded by then

        del number
        sentence = opened.sentences.popleft()
        samples, rate = self._speaker.say(sentence, opened.voice, opened.language, opened.speed)
        opened.add_seconds(len(samples) / rate)
        if opened.writer is None:
            opened.writer = create_audio_writer(opened.form, rate, is_streamed=opened.is_streamed)
        audio = opened.writer.write(samples)
        is_last = not opened.sentences
        if is_last:
            audio += opened.writer.close()
        return {"audio": audio, "seconds": len(samples) / rate, "is_last": is_last}


def _load(options: dict[str, Any]) -> Speaker:
    folder, device, properties = options["folder"], options["device"], options["properties"]
    networks = sorted(Path(folder).glob(VOICE_FILES))
    if len(networks) > 1:
        names = ", ".join(each.name for each in networks)
        raise InvalidVoice(f"the folder has several Piper voices, {names}: use one folder per voice")
    if networks:
        return PiperSpeaker(networks[0], device, properties)
    return PipelineSpeaker(folder, device, properties, options["voices"])


def serve(channel: BlockingChannel, number: int, options: dict[str, Any]) -> None:
    """Serve the model named in the first message."""
    try:
        speaker = _load(options)
    except ImportError as error:
        message = f"speech models require {error.name or error}, which is not installed: {install_command(Extra.LLM)}"
        channel.send([number, [FAILED, message]])
        return
    except Exception as error:  # noqa: BLE001 - the server reports any reason
        channel.send([number, [FAILED, library_error_message(error)]])
        return
    channel.send([number, [LOADED, {"voices": list(speaker.voices)}]])
    _Program(channel, speaker).run()


if __name__ == "__main__":
    run_process(serve)
