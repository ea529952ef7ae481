"""Voices of Piper whose phonemes another program makes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

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


def test_a_voice_that_needs_the_program_is_not_loaded_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And says how to have it."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UnusableVoice, match="espeak-ng makes, which is not installed: apt install espeak-ng"):
        _speaker(tmp_path / "voice", **ESPEAK)


def test_lengths_of_sentences_are_not_remembered_unless_the_settings_say_so() -> None:
    """Each would keep tens of megabytes; devices that know no such setting get none."""
    assert bounded_memory("CPU", {"NUM_STREAMS": 1}) == {"CPU_RUNTIME_CACHE_CAPACITY": 0, "NUM_STREAMS": 1}
    assert bounded_memory("CPU", {"CPU_RUNTIME_CACHE_CAPACITY": 9}) == {"CPU_RUNTIME_CACHE_CAPACITY": 9}
    assert bounded_memory("GPU", {}) == {}


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
