"""The program that writes speech down: what it is asked, in whatever order."""

from __future__ import annotations

from typing import Any

import pytest

from ovmstrio.openvino.engine import hearing
from ovmstrio.openvino.engine.hearing import HeardWindow
from ovmstrio.openvino.engine.transcription_program import serve
from tests.support.recordings import wave_file
from tests.support.scripted_channel import ScriptedChannel


class _Hearing:
    """Says the same of any window."""

    languages = ("en",)
    window = 48_000

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def check(self, wanted: Any) -> None:
        """Take anything."""

    def hear(self, sound: Any, *_: Any, **__: Any) -> HeardWindow:
        return HeardWindow("said", len(sound), "en")


def test_a_window_of_a_recording_that_is_closed_already_ends_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a client leaves in the moment in which the next window is asked for."""
    monkeypatch.setattr(hearing, "Hearing", _Hearing)
    wanted = {"translates": False, "language": "", "prompt": "", "temperature": 0, "has_segments": False}
    opening = [wave_file(1.0), wanted | {"has_words": False}]
    channel: Any = ScriptedChannel(
        ["open", 1, *opening], ["open", 2, *opening], ["close", 1], ["part", 1], ["part", 2], ["close", 2]
    )

    serve(channel, 1, {"folder": "", "device": "CPU", "properties": {}, "tells_words": False})

    assert [channel.sent[number][0] for number in (1, 2, 3, 5, 6)] == [
        "loaded",
        "accepted",
        "accepted",
        "refused",
        "part",
    ]
    assert channel.sent[5][1][:2] == ["ModelFailure", "the request is closed"]
