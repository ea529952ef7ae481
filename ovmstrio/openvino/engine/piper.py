"""Voices of Piper: one network that speaks phonemes, and a file that says which numbers these have.

::

    sentence ─> clauses ─> espeak-ng (a program, where the voice asks for it) ─> phonemes ─> numbers ─> network ─> sound
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import unicodedata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import openvino as ov

from ovmstrio.core.errors import InvalidField, ModelFailure
from ovmstrio.openvino.engine.library_errors import reason_of
from ovmstrio.openvino.engine.speakers import bounded_memory, voice_missing
from ovmstrio.util.regular_files import read_regular_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ovmstrio.openvino.engine.sound_files import Samples

__all__ = ["PiperSpeaker", "UnusableVoice"]

_PROGRAM: Final = "espeak-ng"
_PROGRAM_SECONDS: Final = 10.0
_ESPEAK: Final = "espeak"
_LETTERS: Final = "text"
_BEGIN, _PAD, _END = "^", "_", "$"
_CLAUSE: Final = re.compile(r"([^,;:.!?…]+(?:[,;:.!?…]+(?=\S)[^,;:.!?…]*)*)([,;:.!?…]*)\s*")
_OTHER_LANGUAGE: Final = re.compile(r"\([a-z-]+\)")
_RATES: Final = range(8_000, 192_001)
_PRECISION: Final = "INFERENCE_PRECISION_HINT"
_MOST_PHONEMES: Final = 500
"""Of one run of the network, at the voice's own speed: a few characters may be many of them, as pictures and numbers
are, and memory grows with them."""
_LEAST_PHONEMES: Final = 50
_NOISE, _LENGTH, _NOISE_OF_LENGTH = 0.667, 1.0, 0.8


class UnusableVoice(Exception):
    """A voice that cannot be served, with the reason."""


class PiperSpeaker:
    """One voice, or several speakers in one network.

    Args:
        network: the ONNX file; beside it stands one with ``.json`` behind its name.
        device: where it runs.
        properties: of the device.

    Attributes:
        voices: whose names may be asked for: the file's, the data set's, and those of the speakers.

    Raises:
        UnusableVoice: it is no such voice, or what makes phonemes is not there.
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
        # Numbers of processors that have shorter ones are not good enough for sound.
        settings = {_PRECISION: "f32", **bounded_memory(device, properties)}
        model = ov.Core().compile_model(str(network), device, settings)
        self._has_speakers = len(model.inputs) > len(("input", "input_lengths", "scales"))
        self._request = model.create_infer_request()
        self.say("a.", "", "", 1.0)

    def check(self, voice: str, language: str, speed: float) -> None:
        """See that it can speak so, as :meth:`Speaker.check` says."""
        del speed
        if voice and voice not in self.voices:
            raise voice_missing(voice, self.voices)
        if language and self.languages and language.lower().replace("_", "-") not in self.languages:
            message = f"this voice speaks {self.languages[0]}"
            raise InvalidField(message, field="language", got=repr(language[:40]))

    def say(self, sentence: str, voice: str, language: str, speed: float) -> tuple[Samples, int]:
        """Speak a sentence, as :meth:`Speaker.say` says."""
        del language
        most = max(_LEAST_PHONEMES, int(_MOST_PHONEMES * min(1.0, speed)))
        runs = _runs_of(self._known(self._spoken(sentence)), most)
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
            raise ModelFailure(f"the model failed: {reason_of(error)}") from error
        return np.clip(np.nan_to_num(sound), -1, 1)

    def _spoken(self, sentence: str) -> str:
        """Give phonemes, with the marks between clauses, by which the voice rises and falls."""
        if self._phonemes is None:
            return sentence
        said = []
        for clause, marks in _CLAUSE.findall(sentence):
            said.append(_run_espeak(self._phonemes, clause))
            said.append(f"{marks[:1].replace('…', '.')} " if marks else " ")
        return "".join(said).rstrip()

    def _known(self, phonemes: str) -> str:
        """Leave out what the voice has no numbers for, and its own marks, which texts have for other things."""
        spoken = self._numbers.keys() - {_BEGIN, _PAD, _END}
        return "".join(each for each in unicodedata.normalize("NFD", phonemes) if each in spoken)

    def _numbers_of(self, phonemes: str) -> list[int]:
        pad = self._numbers[_PAD]
        found = [*self._numbers[_BEGIN], *pad]
        for phoneme in phonemes:
            found += [*self._numbers[phoneme], *pad]
        return [*found, *self._numbers[_END]]


def _runs_of(phonemes: str, most: int) -> list[str]:
    """Cut what is too long for one run of the network, between words where that is possible."""
    runs = []
    while len(phonemes) > most:
        at = phonemes.rfind(" ", most // 2, most) + 1 or most
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
        raise UnusableVoice(f"{path} does not describe a voice of Piper: {error!r:.200}") from error
    if missing:
        raise UnusableVoice(f"{path}: phoneme_id_map has no {' and no '.join(missing)}")
    if rate not in _RATES:
        raise UnusableVoice(f"{path}: audio.sample_rate should be from {_RATES[0]} to {_RATES[-1]}: got {rate}")
    described: dict[str, Any] = config
    return described


def _phonemes_of(config: Mapping[str, Any]) -> str | None:
    """Give the language by which espeak-ng makes phonemes; None where letters are spoken as they are."""
    kind = config.get("phoneme_type", _ESPEAK)
    if kind == _LETTERS:
        return None
    if kind != _ESPEAK:
        raise UnusableVoice(f"voices whose phoneme_type is {kind!r:.40} are not served; {_ESPEAK} and {_LETTERS} are")
    if shutil.which(_PROGRAM) is None:
        reason = f"this voice speaks phonemes that the program {_PROGRAM} makes, which is not installed"
        raise UnusableVoice(f"{reason}: apt install {_PROGRAM}")
    language = (config.get("espeak") or {}).get("voice")
    if not isinstance(language, str):
        raise UnusableVoice("the voice does not say for which language espeak-ng makes its phonemes: espeak.voice")
    _run_espeak(language, "a")
    return language


def _run_espeak(language: str, clause: str) -> str:
    command = [_PROGRAM, "-q", "--ipa", "-v", language, "--stdin"]
    try:
        done = subprocess.run(  # noqa: S603 - the program of the voice's choice, whose text comes on standard input
            command, input=clause.encode(), capture_output=True, timeout=_PROGRAM_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ModelFailure(f"{_PROGRAM} made no phonemes: {error}") from error
    if done.returncode:
        raise ModelFailure(f"{_PROGRAM} made no phonemes: {done.stderr.decode(errors='replace').strip()[-200:]}")
    return " ".join(_OTHER_LANGUAGE.sub("", done.stdout.decode(errors="replace")).split())


def _languages_of(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Give the names of what it speaks, the fullest one first; none if it does not say."""
    told = config.get("language") or {}
    names = (told.get("code"), (config.get("espeak") or {}).get("voice"), told.get("family"))
    return tuple(dict.fromkeys(name.lower().replace("_", "-") for name in names if isinstance(name, str)))
