"""The program that speaks: how much it keeps, and what fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai
import pytest

from ovmstrio.core.errors import ModelFailure
from ovmstrio.openvino.engine import speakers, speech_program
from ovmstrio.openvino.engine.speakers import PipelineSpeaker
from tests.support.scripted_channel import ScriptedChannel

_HOW = {"voice": "", "language": "", "speed": 1.0, "form": "wav"}


class _SlowSpeaker:
    """Speaks twenty minutes for each sentence."""

    voices = ()

    def check(self, *_: Any) -> None:
        """Take anything."""

    def say(self, *_: Any) -> tuple[Any, int]:
        return np.zeros(1200, np.float32), 1


def test_a_whole_file_has_an_end_and_a_streamed_one_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For it is kept until then; who asked for it is told what to do."""
    monkeypatch.setattr(speakers, "PipelineSpeaker", lambda *_: _SlowSpeaker())
    channel: Any = ScriptedChannel(
        ["open", 1, "One. Two.", {**_HOW, "is_streamed": False}],
        ["open", 2, "One. Two.", {**_HOW, "is_streamed": True}],
        *(["part", number] for number in (1, 2, 1, 2)),
    )
    speech_program.serve(channel, 1, {"folder": str(tmp_path), "device": "CPU", "properties": {}, "voices": {}})

    assert [channel.sent[number][0] for number in (4, 5, 6, 7)] == ["part", "part", "refused", "part"]
    name, message, _ = channel.sent[6][1]
    assert (name, channel.sent[7][1]["is_last"]) == ("InvalidField", True)
    assert "30 minutes long: have it streamed (stream_format: audio)" in message


class _Pipeline:
    """Fails as C++ does for what is not in a map."""

    made = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        _Pipeline.made += 1

    def get_speaker_embedding_shape(self) -> ov.Shape:
        return ov.Shape([1, 512])

    def generate(self, *_: Any, **__: Any) -> None:
        raise IndexError("map::at")


def test_whatever_the_library_raises_fails_one_text_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """The process goes on, with a pipeline that has not failed."""
    monkeypatch.setattr(genai, "Text2SpeechPipeline", _Pipeline)
    speaker = PipelineSpeaker(str(tmp_path), "CPU", {}, {})
    with pytest.raises(ModelFailure, match="the model failed: map::at"):
        speaker.say("Fail.", "", "", 1.0)
    assert _Pipeline.made == 2
