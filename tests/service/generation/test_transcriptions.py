"""Transcriptions and translations by a graph of OVMS, by OpenAI's client."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError, OpenAI

from tests.support.recordings import wave_file
from tests.support.served_in_thread import serving_in_thread
from tests.support.tiny_whisper import LANGUAGE, SAID, SEGMENT, TRANSLATED, write_tiny_whisper

_GRAPH = """
input_stream: "HTTP_REQUEST_PAYLOAD:input"
output_stream: "HTTP_RESPONSE_PAYLOAD:output"
node {
  name: "S2tExecutor"
  input_side_packet: "STT_NODE_RESOURCES:s2t_servable"
  calculator: "S2tCalculator"
  input_stream: "HTTP_REQUEST_PAYLOAD:input"
  output_stream: "HTTP_RESPONSE_PAYLOAD:output"
  node_options: {
    [type.googleapis.com / mediapipe.S2tCalculatorOptions]: {
      models_path: "./", target_device: "CPU", enable_word_timestamps: true
    }
  }
}
"""


def _ask(url: str, kind: str, said: list[str]) -> None:
    with OpenAI(base_url=f"{url}/v3", api_key="unused") as client:
        for _ in range(3):
            file = (f"a.{kind}", wave_file(1.0, 44_100, 2, kind.upper()))
            said.append(client.audio.transcriptions.create(model="ears", file=file).text)


def test_openais_client_gets_transcriptions(tmp_path: Path) -> None:
    """Several clients at once send several formats; answers are texts, subtitles, words with times, events, English."""
    folder = write_tiny_whisper(tmp_path / "ears")
    (folder / "graph.pbtxt").write_text(_GRAPH)
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_config_list": [{"config": {"name": "ears", "base_path": "ears"}}]}))
    said: list[str] = []
    with serving_in_thread(config_path=config) as server:
        clients = [
            threading.Thread(target=_ask, args=(f"http://{server.http}", kind, said)) for kind in ("wav", "flac", "mp3")
        ]
        for each in clients:
            each.start()
        for each in clients:
            each.join(120)
        with OpenAI(base_url=f"http://{server.http}/v3", api_key="unused") as client:
            make: Any = client.audio.transcriptions.create
            long = ("long.ogg", wave_file(7.0, kind="OGG"))
            subtitles = make(model="ears", file=long, response_format="srt")
            verbose = make(
                model="ears", file=long, response_format="verbose_json", timestamp_granularities=["word", "segment"]
            )
            with make(model="ears", file=("a.wav", wave_file(2.0)), stream=True) as stream:
                events = list(stream)
            with pytest.raises(BadRequestError, match="not a valid audio file"):
                make(model="ears", file=("a.wav", b"no sound"))
            with pytest.raises(BadRequestError, match="does no text_generation"):
                client.chat.completions.create(model="ears", messages=[{"role": "user", "content": "Hello"}])
            assert [each.id for each in client.models.list()] == ["ears"]
        english = server.ask("POST", "/v1/audio/translations", data={"model": "ears"}, files={"file": long})
        counted = server.ask("GET", "/metrics").text

    assert said == [SAID] * 9
    assert subtitles.startswith(f"1\n00:00:00,000 --> 00:00:01,500\n{SEGMENT}\n\n2\n00:00:01,500 --> ")
    assert (verbose.text, verbose.language, verbose.duration) == (SEGMENT * 4, LANGUAGE, 7.0)
    assert [each.start for each in verbose.segments] == [0.0, 1.5, 3.0, 4.5]
    assert "".join(each.word for each in verbose.words) == SEGMENT * 4
    assert "".join(each.delta for each in events[:-1]) == events[-1].text == SAID
    assert len(events) > 2
    assert english.json()["text"] == TRANSLATED * 4
    assert 'ovms_requests_success{api="V3"' in counted
