"""Voices of Piper whose phonemes another program makes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from ovmstrio.core.errors import ModelFailure
from ovmstrio.openvino.engine.piper import PiperSpeaker, UnusableVoice
from ovmstrio.openvino.engine.speakers import bounded_memory
from tests.support.tiny_speakers import PIPER_SAMPLES, heard_letters, write_tiny_piper

ESPEAK = {"phoneme_type": "espeak", "espeak": {"voice": "en-us"}}


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Be a program in espeak-ng's place, which says the first letter of each word, in lines."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "espeak-ng"
    program.write_text(
        "#!/bin/sh\n[ \"$5\" = --stdin ] || exit 1\nsed -E 's/ *([A-Za-z])[A-Za-z]*/\\1\\n/g; s/^/(en)/; s/$/(fr)/'\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return program


def _speaker(folder: Path, **settings: Any) -> PiperSpeaker:
    return PiperSpeaker(write_tiny_piper(folder, **settings) / "tiny.onnx", "CPU", {})


def test_clauses_are_spoken_with_the_marks_between_them(program: Path, tmp_path: Path) -> None:
    """The program knows no marks, by which a voice rises and falls; what it says of languages is not spoken."""
    del program
    speaker = _speaker(tmp_path / "voice", **ESPEAK)

    assert heard_letters(speaker.say("Ever tried, ever failed: so what?", "", "", 1.0)[0]) == "E t, e f: s w?"
    assert heard_letters(speaker.say("No matter", "", "", 1.0)[0]) == "N m"


@pytest.mark.parametrize(("speed", "runs"), [(1.0, 3), (2.0, 3), (0.5, 5), (0.05, 24)])
def test_what_has_many_phonemes_is_spoken_in_several_runs(tmp_path: Path, speed: float, runs: int) -> None:
    """For the memory of one grows with them, and with how slowly they are spoken."""
    speaker = _speaker(tmp_path / "voice")
    samples, _ = speaker.say("x" * 1200, "", "", speed)
    words, _ = speaker.say("abc " * 200, "", "", 1.0)

    # A mark on either side of each letter, and those at the ends of runs.
    assert len(samples) == (2 * 1200 + 3 * runs) * round(PIPER_SAMPLES / speed)
    assert heard_letters(words) == "abc " * 200


def test_marks_of_the_voice_are_not_taken_from_texts(tmp_path: Path) -> None:
    """Where they have other meanings, and would end the sentence."""
    samples, _ = _speaker(tmp_path / "voice").say("a$b^c_d", "", "", 1.0)

    assert len(samples) == (2 * len("abcd") + 3) * PIPER_SAMPLES


def test_a_program_that_writes_what_is_no_text_is_heard_as_far_as_it_is_one(program: Path, tmp_path: Path) -> None:
    """Nobody else's text fails for it."""
    program.write_text("#!/bin/sh\ncat >/dev/null; printf 'a\\377b\\n'\n")

    assert heard_letters(_speaker(tmp_path / "voice", **ESPEAK).say("No", "", "", 1.0)[0]) == "ab"


def test_a_voice_that_needs_the_program_is_not_loaded_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And says how to have it."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UnusableVoice, match="espeak-ng makes, which is not installed: apt install espeak-ng"):
        _speaker(tmp_path / "voice", **ESPEAK)


def test_a_program_that_fails_is_told_with_what_it_said(program: Path, tmp_path: Path) -> None:
    """As when it does not know the language."""
    program.write_text("#!/bin/sh\necho no such voice >&2; exit 2\n")
    with pytest.raises(ModelFailure, match="espeak-ng made no phonemes: no such voice"):
        _speaker(tmp_path / "voice", **ESPEAK)


def test_lengths_of_sentences_are_not_remembered_unless_the_settings_say_so() -> None:
    """Each would keep tens of megabytes; devices that know no such setting get none."""
    assert bounded_memory("CPU", {"NUM_STREAMS": 1}) == {"CPU_RUNTIME_CACHE_CAPACITY": 0, "NUM_STREAMS": 1}
    assert bounded_memory("CPU", {"CPU_RUNTIME_CACHE_CAPACITY": 9}) == {"CPU_RUNTIME_CACHE_CAPACITY": 9}
    assert bounded_memory("GPU", {}) == {}


@pytest.mark.skipif(shutil.which("espeak-ng") is None, reason="espeak-ng is not installed")
def test_the_real_program_makes_phonemes(tmp_path: Path) -> None:
    """Those that the voice has numbers for; numbers are spoken as words."""
    speaker = _speaker(tmp_path / "voice", **ESPEAK)
    assert heard_letters(speaker.say("No, 1 man.", "", "", 1.0)[0]) == "no, wn mn."


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"audio": {}}, "does not describe a voice of Piper"),
        ({"audio": {"sample_rate": 0}}, r"audio\.sample_rate should be from 8000 to 192000: got 0"),
        ({"phoneme_id_map": {"_": [0], "^": [1]}}, r"phoneme_id_map has no \$"),
        ({"phoneme_type": "espeak", "espeak": None}, r"espeak\.voice"),
    ],
)
def test_a_description_that_lacks_something_is_refused(
    program: Path, tmp_path: Path, settings: dict[str, Any], said: str
) -> None:
    """With what it lacks."""
    del program
    with pytest.raises(UnusableVoice, match=said):
        _speaker(tmp_path / "voice", **settings)
