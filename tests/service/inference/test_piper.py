from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from ovmstrio.core.errors import ModelFailure
from ovmstrio.inference.engine.speech_program import InvalidVoice, PiperSpeaker, without_shape_cache
from tests.support.tiny_speech_models import PIPER_SAMPLES, heard_letters, write_tiny_piper

ESPEAK = {"phoneme_type": "espeak", "espeak": {"voice": "en-us"}}


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install an espeak-ng that writes the first letter of each word on a line, with marks of languages."""
    program = tmp_path / "bin" / "espeak-ng"
    program.parent.mkdir()
    program.write_text(
        "#!/bin/sh\n[ \"$5\" = --stdin ] || exit 1\nsed -E 's/ *([A-Za-z])[A-Za-z]*/\\1\\n/g; s/^/(en)/; s/$/(fr)/'\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    return program


def _speaker(tmp_path: Path, **settings: Any) -> PiperSpeaker:
    return PiperSpeaker(write_tiny_piper(tmp_path / "voice", **settings) / "tiny.onnx", "CPU", {})


@pytest.mark.parametrize(("speed", "runs"), [(1.0, 3), (2.0, 3), (0.5, 5), (0.05, 24)])
def test_long_texts_are_spoken_in_several_runs(tmp_path: Path, speed: float, runs: int) -> None:
    speaker = _speaker(tmp_path)
    samples, _ = speaker.say("x" * 1200, "", "", speed)
    words, _ = speaker.say("abc " * 200, "", "", 1.0)
    # A mark on either side of each letter, and those at the ends of runs.
    assert len(samples) == (2 * 1200 + 3 * runs) * round(PIPER_SAMPLES / speed)
    assert heard_letters(words) == "abc " * 200


def test_marks_of_the_voice_are_not_taken_from_texts(tmp_path: Path) -> None:
    samples, _ = _speaker(tmp_path).say("a$b^c_d", "", "", 1.0)
    assert len(samples) == (2 * len("abcd") + 3) * PIPER_SAMPLES


def test_voice_that_needs_espeak_is_refused_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InvalidVoice, match="espeak-ng, which is not installed: apt install espeak-ng"):
        _speaker(tmp_path, **ESPEAK)


def test_openvino_caches_no_lengths_of_sentences_unless_configured() -> None:
    assert without_shape_cache("CPU", {"NUM_STREAMS": 1}) == {"CPU_RUNTIME_CACHE_CAPACITY": 0, "NUM_STREAMS": 1}
    assert without_shape_cache("CPU", {"CPU_RUNTIME_CACHE_CAPACITY": 9}) == {"CPU_RUNTIME_CACHE_CAPACITY": 9}
    assert without_shape_cache("GPU", {}) == {}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"audio": {}}, "not a Piper voice configuration"),
        ({"audio": {"sample_rate": 0}}, r"audio\.sample_rate should be from 8000 to 192000: got 0"),
        ({"phoneme_id_map": {"_": [0], "^": [1]}}, r"phoneme_id_map has no \$"),
        ({"phoneme_type": "espeak", "espeak": None}, r"espeak\.voice"),
    ],
)
def test_incomplete_description_of_a_voice_is_refused(
    program: Path, tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    del program
    with pytest.raises(InvalidVoice, match=message):
        _speaker(tmp_path, **settings)


def test_clauses_are_spoken_with_their_punctuation(program: Path, tmp_path: Path) -> None:
    # The program drops punctuation, by which a voice rises and falls.
    del program
    speaker = _speaker(tmp_path, **ESPEAK)
    assert heard_letters(speaker.say("Ever tried, ever failed: so what?", "", "", 1.0)[0]) == "E t, e f: s w?"
    assert heard_letters(speaker.say("No matter", "", "", 1.0)[0]) == "N m"


def test_invalid_utf8_of_the_program_is_left_out(program: Path, tmp_path: Path) -> None:
    program.write_text("#!/bin/sh\ncat >/dev/null; printf 'a\\377b\\n'\n")
    assert heard_letters(_speaker(tmp_path, **ESPEAK).say("No", "", "", 1.0)[0]) == "ab"


def test_failure_of_the_program_has_its_message(program: Path, tmp_path: Path) -> None:
    program.write_text("#!/bin/sh\necho no such voice >&2; exit 2\n")
    with pytest.raises(ModelFailure, match="espeak-ng failed: no such voice"):
        _speaker(tmp_path, **ESPEAK)


@pytest.mark.skipif(shutil.which("espeak-ng") is None, reason="espeak-ng is not installed")
def test_installed_espeak_makes_phonemes_and_reads_numbers_as_words(tmp_path: Path) -> None:
    assert heard_letters(_speaker(tmp_path, **ESPEAK).say("No, 1 man.", "", "", 1.0)[0]) == "no, wn mn."
