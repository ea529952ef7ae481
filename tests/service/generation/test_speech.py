"""Speech of a graph of OVMS and of a Piper voice, by OpenAI's client."""

from __future__ import annotations

import io
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import soundfile
from openai import BadRequestError, NotFoundError, OpenAI

from tests.support.served_in_thread import serving_in_thread
from tests.support.tiny_speakers import T5_SAMPLES, heard_letters, write_tiny_piper, write_tiny_speecht5, write_voice

_GRAPH = """
input_stream: "HTTP_REQUEST_PAYLOAD:input"
output_stream: "HTTP_RESPONSE_PAYLOAD:output"
node {
  name: "T2sExecutor"
  input_side_packet: "TTS_NODE_RESOURCES:t2s_servable"
  calculator: "T2sCalculator"
  input_stream: "HTTP_REQUEST_PAYLOAD:input"
  output_stream: "HTTP_RESPONSE_PAYLOAD:output"
  node_options: {
    [type.googleapis.com / mediapipe.T2sCalculatorOptions]: {
      models_path: "./"
      plugin_config: '{ "NUM_STREAMS": "1" }'
      target_device: "CPU"
      voices: [ { name: "anna" path: "../anna.bin" } ]
    }
  }
}
"""


def _configure(folder: Path) -> Path:
    (write_tiny_speecht5(folder / "t5") / "graph.pbtxt").write_text(_GRAPH)
    write_voice(folder / "anna.bin", 0.5)
    write_tiny_piper(folder / "voice")
    config = {
        "model_config_list": [{"config": {"name": "t5", "base_path": "t5"}}],
        "text_model_config_list": [{"config": {"name": "voice", "base_path": "voice", "task": "text2speech"}}],
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder / "config.json"


def _letters(data: bytes) -> str:
    return heard_letters(soundfile.read(io.BytesIO(data), dtype="float32")[0])


def _ask(url: str, text: str, heard: list[str]) -> None:
    with OpenAI(base_url=f"{url}/v3", api_key="unused") as client:
        for _ in range(3):
            made = client.audio.speech.create(model="voice", input=text, voice="dora", response_format="flac")
            heard.append(_letters(made.content))


def _streamed(client: OpenAI, **asked: Any) -> bytes:
    make: Any = client.audio.speech.with_streaming_response.create
    with make(model="voice", voice="dora", **asked) as answer:
        return b"".join(answer.iter_bytes())


def test_openais_client_gets_speech(tmp_path: Path) -> None:
    """Several clients at once get files, streams and events; each refusal has its class and message."""
    heard: list[str] = []
    with serving_in_thread(config_path=_configure(tmp_path)) as server:
        texts = ("Ever tried. Ever failed.", "No matter.", "Try again, fail again, fail better!")
        clients = [threading.Thread(target=_ask, args=(f"http://{server.http}", text, heard)) for text in texts]
        for each in clients:
            each.start()
        for each in clients:
            each.join(120)
        with OpenAI(base_url=f"http://{server.http}/v3", api_key="unused") as client:
            make: Any = client.audio.speech.create
            graph = make(model="t5", input="Fail better.", voice="anna")
            graph.write_to_file(tmp_path / "made.wav")
            wave = _streamed(client, input=texts[0], response_format="wav", stream_format="audio")
            samples = _streamed(client, input="x" * 60, response_format="pcm")
            events = _streamed(client, input="One. Two.", stream_format="sse").decode()
            with pytest.raises(BadRequestError, match="Requested voice 'alloy' not found in available voices"):
                make(model="t5", input="Hello", voice="alloy")
            with pytest.raises(BadRequestError, match="speed must be between speed_min"):
                make(model="voice", input="Hello", voice="dora", speed=8)
            with pytest.raises(BadRequestError, match="does no speech2text; it does text2speech"):
                client.audio.transcriptions.create(model="voice", file=("a.wav", graph.content))
            with pytest.raises(NotFoundError, match="there are: t5, voice"):
                make(model="tts-1", input="Hello", voice="dora")
            assert [each.id for each in client.models.list()] == ["t5", "voice"]
        raw = server.ask("POST", "/v1/audio/speech", json={"model": "voice", "input": "Fail."})
        counted = server.ask("GET", "/metrics").text

    assert sorted(heard) == sorted(["Ever tried.Ever failed.", *texts[1:]] * 3)
    made, rate = soundfile.read(tmp_path / "made.wav", dtype="float32")
    assert (len(made), set(made.tolist()), rate) == (len("Fail better.") * T5_SAMPLES, {0.5}, 16_000)
    assert _letters(wave) == "Ever tried.Ever failed."
    # 60 letters and marks around and between them, of 64 samples at 16 kHz each, at 24 kHz and two bytes.
    assert len(samples) == (2 * 60 + 3) * 64 * 3 // 2 * 2
    assert [line.count("speech.audio.delta") for line in events.split("\n\n")] == [1, 1, 0, 0]
    assert (raw.headers["content-type"], _letters(raw.content)) == ("audio/wav", "Fail.")
    assert 'ovms_requests_success{api="V3"' in counted
