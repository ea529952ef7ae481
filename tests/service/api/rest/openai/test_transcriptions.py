"""``/audio/transcriptions`` and ``/audio/translations``: forms of bodies and answers, and what is refused."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trio
from httpx import Response

from ovmstrio.access.allowance import CallerAllowance
from ovmstrio.api.openai.api import PREFIXES
from ovmstrio.config.text_models import TextModelSpec
from ovmstrio.core.errors import InvalidField, ModelFailure, Overloaded
from ovmstrio.core.generation import Task
from ovmstrio.core.speech import TranscriptionRequest, TranscriptPart
from tests.service.api.rest.openai.talking import chat_body, events_of
from tests.support.callers import bearer, gate_of
from tests.support.text_generators import CHAT, load_generator, text_spec
from tests.support.transcribers import ScriptedTranscriber
from tests.support.waits import WAIT_SECONDS
from tests.unit.api.rest.servers import Serving, serving_rest

EARS = "ears"
TEXT = "Ever tried. Ever --> failed."


async def _load(spec: Any, version: int, directory: Path) -> Any:
    if isinstance(spec, TextModelSpec) and spec.task is Task.SPEECH_TO_TEXT:
        await trio.lowlevel.checkpoint()
        return ScriptedTranscriber(spec.name)
    return await load_generator(spec, version, directory)


@pytest.fixture
async def ears(tmp_path: Path) -> AsyncIterator[Serving]:
    """Serve ``ears``, which writes down speech, ``chat``, which makes text, and ``echo``, which takes tensors."""
    spec = text_spec(tmp_path / EARS, EARS).model_copy(update={"task": Task.SPEECH_TO_TEXT})
    async with serving_rest(tmp_path, models=(spec, text_spec(tmp_path / CHAT)), loader=_load) as server:
        yield server


def _service(serving: Serving) -> ScriptedTranscriber:
    service: Any = serving.registry.peek(EARS)
    assert isinstance(service, ScriptedTranscriber)
    return service


async def _post(serving: Serving, path: str = "/v3/audio/transcriptions", **fields: Any) -> Response:
    files = {"file": ("a.wav", fields.pop("file", b"sound"), "audio/wav")}
    return await serving.post(path, data={"model": EARS, **fields}, files=files)


@pytest.mark.parametrize("prefix", PREFIXES)
async def test_a_recording_is_written_down_under_all_prefixes(ears: Serving, prefix: str) -> None:
    """As JSON, with its length; the service gets the file as it was sent."""
    sound = bytes(range(256)) * 2000 + b"\r\n--boundary"
    answer = await _post(ears, f"{prefix}/audio/transcriptions", file=sound)

    assert answer.status_code == 200
    assert answer.json() == {"text": TEXT, "usage": {"type": "duration", "seconds": 10}}
    assert _service(ears).requests == [TranscriptionRequest(sound)]


async def test_tokens_a_minute_do_not_keep_from_listening(tmp_path: Path, mock_clock: trio.testing.MockClock) -> None:
    """For what is heard is not counted, so that it is not refused for what was written either."""
    del mock_clock
    spec = text_spec(tmp_path / EARS, EARS).model_copy(update={"task": Task.SPEECH_TO_TEXT})
    gate = gate_of({"shop": "infer:*"}, CallerAllowance("shop", tokens_per_minute=1))
    models = (spec, text_spec(tmp_path / CHAT))
    async with serving_rest(tmp_path, models=models, loader=_load, front_end={"gate": gate}) as server:
        written = [
            (await server.post("/v3/chat/completions", json=chat_body("one two"), headers=bearer("shop"))).status_code
            for _ in range(2)
        ]
        files = {"file": ("a.wav", b"sound", "audio/wav")}
        heard = await server.post("/v3/audio/transcriptions", data={"model": EARS}, files=files, headers=bearer("shop"))
    assert (written, heard.status_code) == ([200, 429], 200)


async def test_all_fields_reach_the_service(ears: Serving) -> None:
    """Translations are asked for by their path."""
    fields: dict[str, Any] = {
        "language": "EN",
        "prompt": "Beckett",
        "temperature": "0.5",
        "response_format": "verbose_json",
        "timestamp_granularities[]": ["word", "segment"],
        "chunking_strategy": "auto",
        "unknown": "passed over",
    }
    await _post(ears, **fields)
    await _post(ears, "/v1/audio/translations", language="")

    assert _service(ears).requests == [
        TranscriptionRequest(
            b"sound", language="en", prompt="Beckett", temperature=0.5, wants_segments=True, wants_words=True
        ),
        TranscriptionRequest(b"sound", translates=True),
    ]


async def test_an_answer_has_the_form_that_is_asked_for(ears: Serving) -> None:
    """An arrow within a subtitle cannot be taken for its times."""
    plain = await _post(ears, response_format="text")
    subtitles = await _post(ears, response_format="srt")
    web = await _post(ears, response_format="vtt")

    assert (plain.text, plain.headers["content-type"]) == (f"{TEXT}\n", "text/plain; charset=utf-8")
    assert subtitles.text == (
        "1\n00:00:00,000 --> 00:00:01,500\nEver tried.\n\n2\n00:00:01,500 --> 01:02:03,062\nEver -> failed.\n\n"
    )
    assert web.headers["content-type"] == "text/vtt; charset=utf-8"
    assert web.text.startswith("WEBVTT\n\n00:00:00.000 --> 00:00:01.500\nEver tried.\n\n")
    assert [asked.wants_segments for asked in _service(ears).requests] == [False, True, True]


async def test_a_verbose_answer_tells_of_segments_unless_words_alone_are_asked_for(ears: Serving) -> None:
    """With the fields that OpenAI's clients know."""
    whole = (await _post(ears, response_format="verbose_json")).json()
    words = {"response_format": "verbose_json", "timestamp_granularities[]": "word"}
    alone = (await _post(ears, "/v3/audio/translations", **words)).json()

    assert (whole["task"], whole["language"], whole["duration"], whole["text"]) == ("transcribe", "en", 9.25, TEXT)
    first, second = whole["segments"]
    assert (first["id"], first["start"], first["end"], first["text"]) == (0, 0.0, 1.5, " Ever tried.")
    assert (second["id"], second["seek"]) == (1, 150)
    assert set(first) >= {"tokens", "temperature", "avg_logprob", "compression_ratio", "no_speech_prob"}
    assert "words" not in whole
    assert alone["task"] == "translate"
    assert alone["words"] == [{"word": "Ever", "start": 0.25, "end": 0.75}]
    assert "segments" not in alone


async def test_a_stream_has_a_delta_a_part_and_all_of_it_at_its_end(ears: Serving) -> None:
    """In OpenAI's events."""
    answer = await _post(ears, stream="true")

    assert answer.headers["content-type"].startswith("text/event-stream")
    assert events_of(answer.text) == [
        {"type": "transcript.text.delta", "delta": "Ever tried."},
        {"type": "transcript.text.delta", "delta": " Ever --> failed."},
        {"type": "transcript.text.done", "text": TEXT, "usage": {"type": "duration", "seconds": 10}},
    ]


async def test_what_fails_before_the_first_part_has_a_status_and_later_an_event(ears: Serving) -> None:
    """A file that is no sound, a full queue, a process that ended."""
    service = _service(ears)
    service.refusal = InvalidField("no sound", field="file")
    refused = await _post(ears, stream="true")
    service.refusal = Overloaded("full", retry_after_seconds=3)
    full = await _post(ears)
    service.refusal, service.steps = None, (TranscriptPart("one"), ModelFailure("it has ended"))
    ended = await _post(ears, stream="true")
    whole = await _post(ears)

    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "file")
    assert (full.status_code, full.headers["retry-after"]) == (429, "3")
    assert full.json()["error"]["code"] == "rate_limit_exceeded"
    assert [each.get("delta") or each["error"]["message"] for each in events_of(ended.text)] == ["one", "it has ended"]
    assert (whole.status_code, whole.json()["error"]["message"]) == (500, "it has ended")


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"response_format": "xml"}, "response_format", "response_format should be one of json, text, srt"),
        ({"temperature": "warm"}, "temperature", "temperature is not a valid number; got 'warm'"),
        ({"temperature": "3"}, "temperature", "temperature out of range(0.0, 2.0)"),
        ({"temperature": "nan"}, "temperature", "temperature out of range(0.0, 2.0)"),
        ({"stream": "perhaps"}, "stream", "stream field is not a boolean"),
        ({"stream": "true", "response_format": "srt"}, "response_format", "a stream has text alone: json or text"),
        ({"timestamp_granularities[]": "letter"}, "timestamp_granularities", "should be segment or word; got 'letter'"),
        (
            {"timestamp_granularities[]": "word", "response_format": "srt"},
            "timestamp_granularities",
            "timestamp_granularities are told where response_format is json or verbose_json",
        ),
        ({"include[]": "logprobs"}, "include", "include is not supported"),
        ({"chunking_strategy": "server_vad"}, "chunking_strategy", "chunking_strategy is auto here"),
        ({"prompt": "x" * 20_001}, "prompt", "prompt may have 20000 characters"),
    ],
)
async def test_a_field_that_cannot_be_is_refused(ears: Serving, fields: dict[str, str], param: str, said: str) -> None:
    """By its name, before the model is asked."""
    answer = await _post(ears, **fields)

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert said in answer.json()["error"]["message"]
    assert _service(ears).requests == []


async def test_all_that_is_wrong_is_told_at_once(ears: Serving) -> None:
    """Not one after the other."""
    answer = await _post(ears, response_format="xml", temperature="9")

    message = answer.json()["error"]["message"]
    assert "response_format should be one of" in message
    assert "temperature out of range" in message


async def test_a_body_that_is_no_such_form_is_refused(ears: Serving) -> None:
    """With what it should be."""
    path = "/v3/audio/transcriptions"
    as_json = await ears.post(path, json={"model": EARS})
    headers = {"content-type": "multipart/form-data"}
    without_boundary = await ears.post(path, content=b"x", headers=headers)
    broken = await ears.post(path, content=b"--b\r\nx", headers={"content-type": "multipart/form-data; boundary=b"})
    no_file = await ears.post(path, files={"model": (None, EARS)})
    no_model = await ears.post(path, files={"file": ("a.wav", b"sound")})
    many = await ears.post(path, files=[(f"n{number}", (None, "x")) for number in range(65)])

    assert {each.status_code for each in (as_json, without_boundary, broken, no_file, no_model, many)} == {400}
    assert as_json.json()["error"]["message"].startswith(
        "a recording is sent as the part 'file' of multipart/form-data"
    )
    assert "boundary" in without_boundary.json()["error"]["message"]
    assert "cannot be parsed" in broken.json()["error"]["message"]
    assert no_file.json()["error"] | {"message": ""} == {
        "message": "",
        "type": "invalid_request_error",
        "param": "file",
        "code": "missing_required_parameter",
    }
    assert no_model.json()["error"]["param"] == "model"
    assert "more than 64 parts" in many.json()["error"]["message"]


async def test_a_model_that_writes_down_nothing_is_refused(ears: Serving) -> None:
    """One of another task, one of tensors, and none."""
    chat = await _post(ears, model=CHAT)
    tensors = await _post(ears, model="echo")
    nothing = await _post(ears, model="nothing")

    assert chat.json()["error"]["message"] == 'the service "chat" does no speech2text; it does text_generation'
    assert (chat.status_code, tensors.status_code) == (400, 400)
    assert (nothing.status_code, nothing.json()["error"]["code"]) == (404, "model_not_found")


async def test_a_body_that_is_too_large_is_refused(tmp_path: Path) -> None:
    """By the server's limit for messages, in OpenAI's form."""
    spec = text_spec(tmp_path / EARS, EARS).model_copy(update={"task": Task.SPEECH_TO_TEXT})
    options = {"max_body_bytes": 4096}
    async with serving_rest(tmp_path, models=(spec,), loader=_load, front_end=options) as server:
        answer = await _post(server, file=b"x" * 5000)
        fits = await _post(server, file=b"x" * 3000)

    assert (answer.status_code, fits.status_code) == (413, 200)


async def test_a_deadline_ends_the_request(ears: Serving) -> None:
    """The service is told."""
    service = _service(ears)
    service.steps = (TranscriptPart("one"), trio.Event())
    files = {"file": ("a.wav", b"sound"), "model": (None, EARS)}
    late = await ears.post("/v3/audio/transcriptions", files=files, headers={"x-request-timeout": "0.05"})
    assert (late.status_code, late.json()["error"]["code"]) == (504, "timeout")
    assert service.left.is_set()
    assert service.requests[0].deadline < math.inf


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_client_that_leaves_ends_its_request(ears: Serving, is_stream: bool) -> None:
    """While it waits for the answer, and in the midst of one."""
    service = _service(ears)
    service.steps = (TranscriptPart("one"), trio.Event())
    parts = {"model": EARS, "stream": "true" if is_stream else "false", 'file"; filename="a.wav': "sound"}
    body = "".join(f'--b\r\ncontent-disposition: form-data; name="{name}"\r\n\r\n{parts[name]}\r\n' for name in parts)
    head = "POST /v3/audio/transcriptions HTTP/1.1\r\nhost: h\r\ncontent-type: multipart/form-data; boundary=b\r\n"
    data = f"{body}--b--\r\n"
    with trio.fail_after(WAIT_SECONDS):
        async with ears.connect() as peer:
            await peer.send(f"{head}content-length: {len(data)}\r\n\r\n{data}".encode())
            await service.waiting.wait()
        await service.left.wait()
