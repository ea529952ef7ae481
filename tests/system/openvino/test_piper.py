"""Phonemes from the espeak-ng program."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from ovmstrio.core.errors import ModelFailure
from ovmstrio.openvino.engine.piper import PiperSpeaker
from tests.support.tiny_speakers import heard_letters, write_tiny_piper

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


def test_a_program_that_writes_what_is_no_text_is_heard_as_far_as_it_is_one(program: Path, tmp_path: Path) -> None:
    """Nobody else's text fails for it."""
    program.write_text("#!/bin/sh\ncat >/dev/null; printf 'a\\377b\\n'\n")

    assert heard_letters(_speaker(tmp_path / "voice", **ESPEAK).say("No", "", "", 1.0)[0]) == "ab"


def test_a_program_that_fails_is_told_with_what_it_said(program: Path, tmp_path: Path) -> None:
    """As when it does not know the language."""
    program.write_text("#!/bin/sh\necho no such voice >&2; exit 2\n")
    with pytest.raises(ModelFailure, match="espeak-ng made no phonemes: no such voice"):
        _speaker(tmp_path / "voice", **ESPEAK)


@pytest.mark.skipif(shutil.which("espeak-ng") is None, reason="espeak-ng is not installed")
def test_the_real_program_makes_phonemes(tmp_path: Path) -> None:
    """Those that the voice has numbers for; numbers are spoken as words."""
    speaker = _speaker(tmp_path / "voice", **ESPEAK)
    assert heard_letters(speaker.say("No, 1 man.", "", "", 1.0)[0]) == "no, wn mn."
