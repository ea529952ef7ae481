from __future__ import annotations

import io
import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from openai import BadRequestError, NotFoundError, OpenAI

from tests.support.recordings import wave_file
from tests.support.served_in_thread import serving_in_thread
from tests.support.tiny_encoders import TinyEncoder, word_pieces, write_embedder, write_reranker
from tests.support.tiny_speech_models import (
    T5_SAMPLES,
    heard_letters,
    write_tiny_piper,
    write_tiny_speecht5,
    write_voice,
)
from tests.support.tiny_whisper import LANGUAGE, SAID, SEGMENT, TRANSLATED, write_tiny_whisper

_TEXTS = ("the cat sat.", "red house", "A dog ran, the cats sat!")


def _vector(text: str) -> Any:
    ids = [int(number) for number in word_pieces().encode([text], 100)["input_ids"][0]]
    mean = TinyEncoder().hidden(ids).mean(0)
    return mean / np.linalg.norm(mean)


def _embed(url: str, texts: tuple[str, ...], failures: list[Any]) -> None:
    with OpenAI(base_url=f"{url}/v3", api_key="unused") as client:
        for text in (*texts, *texts):
            made = client.embeddings.create(model="words", input=text).data[0].embedding
            if not np.allclose(made, _vector(text), atol=1e-5):
                failures.append((text, made))


def _run_threads(function: Callable[..., None], arguments: Sequence[tuple[Any, ...]]) -> None:
    threads = [threading.Thread(target=function, args=each) for each in arguments]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)


def test_clients_get_embeddings_ranks_and_tokens(tmp_path: Path) -> None:
    write_reranker(tmp_path / "rank", write_embedder(tmp_path / "words"))
    entries = [
        {"name": "words", "base_path": "words", "task": "embeddings", "pooling": "MEAN"},
        {"name": "rank", "base_path": "rank", "task": "rerank"},
    ]
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps({"model_config_list": [], "text_model_config_list": [{"config": each} for each in entries]})
    )
    failures: list[Any] = []
    with serving_in_thread(config_path=config) as server:
        _run_threads(_embed, [(f"http://{server.http}", _TEXTS, failures)] * 4)
        with OpenAI(base_url=f"http://{server.http}/v3", api_key="unused") as client:
            several = client.embeddings.create(model="words", input=[*_TEXTS], encoding_format="float")
            with pytest.raises(BadRequestError, match="Input length 32 longer than allowed 20") as refused:
                client.embeddings.create(model="words", input="the " * 30)
        body = {"model": "rank", "query": "red cat", "documents": [*_TEXTS], "top_n": 2}
        ranked = server.ask("POST", "/v2/rerank", json=body).json()
        tokens = server.ask("POST", "/v3/tokenize", json={"model": "words", "text": "red"}).json()

    assert failures == []
    assert np.allclose([each.embedding for each in several.data], [_vector(text) for text in _TEXTS], atol=1e-5)
    assert refused.value.code == "context_length_exceeded"
    scores = [each["relevance_score"] for each in ranked["results"]]
    assert scores == sorted(scores, reverse=True)
    assert len(scores) == 2
    assert tokens == {"tokens": [int(number) for number in word_pieces().encode(["red"], 9)["input_ids"][0]]}


_GRAPH = """
input_stream: "HTTP_REQUEST_PAYLOAD:input"
output_stream: "HTTP_RESPONSE_PAYLOAD:output"
node {
  name: "executor"
  input_side_packet: "%(resources)s:servable"
  calculator: "%(calculator)s"
  input_stream: "HTTP_REQUEST_PAYLOAD:input"
  output_stream: "HTTP_RESPONSE_PAYLOAD:output"
  node_options: {
    [type.googleapis.com / mediapipe.%(calculator)sOptions]: { models_path: "./", target_device: "CPU", %(options)s }
  }
}
"""
_SPEECH_GRAPH = _GRAPH % {
    "resources": "TTS_NODE_RESOURCES",
    "calculator": "T2sCalculator",
    "options": """plugin_config: '{ "NUM_STREAMS": "1" }', voices: [ { name: "anna" path: "../anna.bin" } ]""",
}
_TRANSCRIPTION_GRAPH = _GRAPH % {
    "resources": "STT_NODE_RESOURCES",
    "calculator": "S2tCalculator",
    "options": "enable_word_timestamps: true",
}


def _configure_speech(folder: Path) -> Path:
    (write_tiny_speecht5(folder / "t5") / "graph.pbtxt").write_text(_SPEECH_GRAPH)
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


def _speak(url: str, text: str, heard: list[str]) -> None:
    with OpenAI(base_url=f"{url}/v3", api_key="unused") as client:
        for _ in range(3):
            made = client.audio.speech.create(model="voice", input=text, voice="dora", response_format="flac")
            heard.append(_letters(made.content))


def _streamed(client: OpenAI, **options: Any) -> bytes:
    make: Any = client.audio.speech.with_streaming_response.create
    with make(model="voice", voice="dora", **options) as answer:
        return b"".join(answer.iter_bytes())


def test_client_gets_speech_as_files_streams_and_events(tmp_path: Path) -> None:
    heard: list[str] = []
    with serving_in_thread(config_path=_configure_speech(tmp_path)) as server:
        texts = ("Ever tried. Ever failed.", "No matter.", "Try again, fail again, fail better!")
        _run_threads(_speak, [(f"http://{server.http}", text, heard) for text in texts])
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
            with pytest.raises(NotFoundError, match="available: t5, voice"):
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


def _transcribe(url: str, kind: str, texts: list[str]) -> None:
    with OpenAI(base_url=f"{url}/v3", api_key="unused") as client:
        for _ in range(3):
            file = (f"a.{kind}", wave_file(1.0, 44_100, 2, kind.upper()))
            texts.append(client.audio.transcriptions.create(model="ears", file=file).text)


def test_client_gets_transcriptions_and_translations(tmp_path: Path) -> None:
    folder = write_tiny_whisper(tmp_path / "ears")
    (folder / "graph.pbtxt").write_text(_TRANSCRIPTION_GRAPH)
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_config_list": [{"config": {"name": "ears", "base_path": "ears"}}]}))
    texts: list[str] = []
    with serving_in_thread(config_path=config) as server:
        _run_threads(_transcribe, [(f"http://{server.http}", kind, texts) for kind in ("wav", "flac", "mp3")])
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

    assert texts == [SAID] * 9
    assert subtitles.startswith(f"1\n00:00:00,000 --> 00:00:01,500\n{SEGMENT}\n\n2\n00:00:01,500 --> ")
    assert (verbose.text, verbose.language, verbose.duration) == (SEGMENT * 4, LANGUAGE, 7.0)
    assert [each.start for each in verbose.segments] == [0.0, 1.5, 3.0, 4.5]
    assert "".join(each.word for each in verbose.words) == SEGMENT * 4
    assert "".join(each.delta for each in events[:-1]) == events[-1].text == SAID
    assert len(events) > 2
    assert english.json()["text"] == TRANSLATED * 4
    assert 'ovms_requests_success{api="V3"' in counted
