"""The sample that speaks, heard by the one that writes down what is said; needs two wheels in the cache."""

from __future__ import annotations

import json
import re
import shutil
from difflib import SequenceMatcher
from pathlib import Path

import pytest
from platformdirs import user_cache_path

from ovmstrio_samples.catalog import BY_NAME
from ovmstrio_samples.preparing import prepare_sample
from ovmstrio_samples.transcription.client import transcribe
from ovmstrio_samples.voice.client import speak
from tests.support.served_in_thread import serving_in_thread

_CACHE = user_cache_path("ovmstrio") / "wheels"
_SAID = "The quick brown fox jumps over the lazy dog. All of the children were playing in the garden behind the house."


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z]+", text.lower())


def _likeness(text: str) -> float:
    """Tell which part of the words was understood; a voice never speaks quite the same twice."""
    return SequenceMatcher(None, _words(_SAID), _words(text)).ratio()


@pytest.mark.slow
def test_what_is_spoken_is_understood(tmp_path: Path) -> None:
    """Whatever the file's form: both models are real ones, and served side by side."""
    if shutil.which("espeak-ng") is None:
        pytest.skip("espeak-ng is not installed")
    for name in ("voice", "transcription"):
        wheel = BY_NAME[name].wheel
        if wheel is None or not (_CACHE / wheel.filename).is_file():
            pytest.skip(f"not in the cache: ovms prepare --sample {name}")
        prepare_sample(BY_NAME[name], tmp_path, 1, _CACHE)
    models = [{"name": name, "base_path": name, "task": BY_NAME[name].task} for name in ("voice", "transcription")]
    config = tmp_path / "config.json"
    lists = {"model_config_list": [], "text_model_config_list": [{"config": each} for each in models]}
    config.write_text(json.dumps(lists))

    understood = {}
    with serving_in_thread(config_path=config) as server:
        for form in ("wav", "mp3"):
            recording = tmp_path / f"spoken.{form}"
            recording.write_bytes(b"".join(speak(server.rest, _SAID, form=form)))
            understood[form] = _likeness("".join(transcribe(server.rest, recording)))
        slow, fast = (len(b"".join(speak(server.rest, "Fail better.", speed=speed))) for speed in (0.5, 2.0))

    assert all(part > 0.8 for part in understood.values()), understood
    assert slow > 1.5 * fast
