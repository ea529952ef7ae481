from __future__ import annotations

import base64
import math
from pathlib import Path
from typing import Any

import pytest
import trio
from httpx import RemoteProtocolError, Response

from ovmstrio.core.errors import InvalidField, ModelFailure, Overloaded
from ovmstrio.core.speech import AudioFormat, SpeechPart, SpeechRequest, TranscriptionRequest, TranscriptPart
from tests.service.protocols.openai.servers import (
    CHAT,
    EARS,
    PREFIXES,
    VOICE,
    events_of,
    expect_cancelled_on_disconnect,
    post_of,
    serve_openai,
    service_of,
)
from tests.support.waits import WAIT_SECONDS
from tests.unit.protocols.servers import Serving

SPEECH, TRANSCRIPTIONS = "/v3/audio/speech", "/v3/audio/transcriptions"
SOUND = b"head and firstsecond\x00"
TEXT = "Ever tried. Ever --> failed."
FIRST: dict[str, Any] = {VOICE: SpeechPart(b"first", 1.0), EARS: TranscriptPart("first")}
services = pytest.mark.parametrize("name", [VOICE, EARS])


async def _speak(serving: Serving, path: str = SPEECH, **fields: Any) -> Response:
    body = {"model": VOICE, "input": "Fail better.", **fields}
    return await serving.post(path, json={name: value for name, value in body.items() if value is not ...})


async def _transcribe(serving: Serving, path: str = TRANSCRIPTIONS, **fields: Any) -> Response:
    files = {"file": ("a.wav", fields.pop("file", b"sound"), "audio/wav")}
    return await serving.post(path, data={"model": EARS, **fields}, files=files)


async def _call(serving: Serving, name: str, **fields: Any) -> Response:
    return await (_speak if name == VOICE else _transcribe)(serving, **fields)


def _form(**fields: str) -> bytes:
    parts = {"model": EARS, 'file"; filename="a.wav': "sound", **fields}
    body = "".join(f'--b\r\ncontent-disposition: form-data; name="{name}"\r\n\r\n{parts[name]}\r\n' for name in parts)
    head = f"POST {TRANSCRIPTIONS} HTTP/1.1\r\nhost: h\r\ncontent-type: multipart/form-data; boundary=b\r\n"
    data = f"{body}--b--\r\n"
    return f"{head}content-length: {len(data)}\r\n\r\n{data}".encode()


def _speech(response_format: str) -> bytes:
    return post_of(SPEECH, {"model": VOICE, "input": "One. Two.", "response_format": response_format})


@pytest.mark.parametrize("prefix", PREFIXES)
async def test_a_text_is_answered_with_a_wav_file(serving: Serving, prefix: str) -> None:
    answer = await _speak(serving, f"{prefix}/audio/speech")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "audio/wav")
    assert (answer.content, answer.headers["content-length"]) == (SOUND, str(len(SOUND)))
    assert service_of(serving, VOICE).requests == [SpeechRequest("Fail better.")]


@pytest.mark.parametrize(
    ("fields", "request_"),
    [
        (
            {"voice": "anna", "language": "en-GB", "speed": 2, "response_format": "flac", "instructions": ""},
            SpeechRequest("Fail better.", "anna", "en-GB", 2.0, AudioFormat.FLAC),
        ),
        (
            dict.fromkeys(("voice", "language", "speed", "response_format", "stream_format")),
            SpeechRequest("Fail better."),
        ),
        ({"speed": 10**30}, SpeechRequest("Fail better.", speed=1e9)),
    ],
    ids=["all fields", "nulls", "large speed"],
)
async def test_fields_of_speech_reach_the_service(serving: Serving, fields: Any, request_: SpeechRequest) -> None:
    await _speak(serving, **fields)
    assert service_of(serving, VOICE).requests == [request_]


@pytest.mark.parametrize(
    ("form", "stream", "kind", "is_streamed"),
    [
        ("wav", None, "audio/wav", False),
        ("wav", "audio", "audio/wav", True),
        ("flac", None, "audio/flac", False),
        ("pcm", None, "audio/pcm", True),
        ("mp3", None, "audio/mpeg", True),
        ("opus", "audio", "audio/ogg", True),
    ],
)
async def test_a_file_is_streamed_on_request_or_if_its_head_has_no_length(
    serving: Serving, form: str, stream: str | None, kind: str, is_streamed: bool
) -> None:
    answer = await _speak(serving, response_format=form, stream_format=stream)
    assert (answer.content, answer.headers["content-type"]) == (SOUND, kind)
    assert ("content-length" in answer.headers) is not is_streamed
    assert ("x-accel-buffering" in answer.headers) is is_streamed
    requests = service_of(serving, VOICE).requests
    assert [(each.form.value, each.is_streamed) for each in requests] == [(form, is_streamed)]


async def test_each_event_of_speech_has_the_sound_of_a_sentence(serving: Serving) -> None:
    answer = await _speak(serving, stream_format="sse", response_format="pcm")
    assert answer.headers["content-type"].startswith("text/event-stream")
    first, second, done = events_of(answer.text)
    assert [base64.b64decode(each["audio"]) for each in (first, second)] == [b"head and first", b"second\x00"]
    assert {first["type"], second["type"]} == {"speech.audio.delta"}
    assert done == {"type": "speech.audio.done", "usage": {"type": "duration", "seconds": 5}}


async def test_the_first_sentence_is_sent_before_the_second_one_is_spoken(serving: Serving) -> None:
    service, resumed = service_of(serving, VOICE), trio.Event()
    service.steps = (SpeechPart(b"first", 1.0), resumed, SpeechPart(b"second", 1.0))
    with trio.fail_after(WAIT_SECONDS):
        async with serving.connect() as peer:
            await peer.send(_speech("pcm"))
            before = await peer.until(b"first\r\n")
            await service.waiting.wait()
            resumed.set()
            after = await peer.until(b"0\r\n\r\n")
    assert b"second" not in before
    assert after == b"6\r\nsecond\r\n0\r\n\r\n"


async def test_a_failure_after_the_first_sentence_truncates_the_answer(serving: Serving) -> None:
    service_of(serving, VOICE).steps = (FIRST[VOICE], ModelFailure("it has ended"))
    with pytest.raises(RemoteProtocolError):
        await _speak(serving, response_format="mp3")
    data = b'{"model": "voice", "input": "One. Two.", "response_format": "pcm"}'
    head = f"POST {SPEECH} HTTP/1.1\r\nhost: h\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    # A body in chunks is answered by the application instead of the fast lane.
    async with serving.connect() as peer:
        await peer.send(head.encode() + b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data))
        answer = await peer.rest()
    assert answer.startswith(b"HTTP/1.1 200")
    assert b"first" in answer
    assert not answer.endswith(b"0\r\n\r\n")


@pytest.mark.parametrize("prefix", PREFIXES)
async def test_a_recording_is_answered_with_its_text(serving: Serving, prefix: str) -> None:
    sound = bytes(range(256)) * 2000 + b"\r\n--boundary"
    answer = await _transcribe(serving, f"{prefix}/audio/transcriptions", file=sound)
    assert answer.status_code == 200
    assert answer.json() == {"text": TEXT, "usage": {"type": "duration", "seconds": 10}}
    assert service_of(serving, EARS).requests == [TranscriptionRequest(sound)]


async def test_fields_of_a_transcription_reach_the_service(serving: Serving) -> None:
    fields: dict[str, Any] = {
        "language": "EN",
        "prompt": "Beckett",
        "temperature": "0.5",
        "response_format": "verbose_json",
        "timestamp_granularities[]": ["word", "segment"],
        "chunking_strategy": "auto",
        "use_beam_search": "false",
        "stream_include_usage": "True",
        "to_language": "en",
        "user": "true",
    }
    await _transcribe(serving, **fields)
    await _transcribe(serving, "/v1/audio/translations", language="")
    assert service_of(serving, EARS).requests == [
        TranscriptionRequest(
            b"sound", language="en", prompt="Beckett", temperature=0.5, wants_segments=True, wants_words=True
        ),
        TranscriptionRequest(b"sound", translates=True),
    ]


SRT = "1\n00:00:00,000 --> 00:00:01,500\nEver tried.\n\n2\n00:00:01,500 --> 01:02:03,062\nEver -> failed.\n\n"
VTT = "WEBVTT\n\n00:00:00.000 --> 00:00:01.500\nEver tried.\n\n00:00:01.500 --> 01:02:03.062\nEver -> failed.\n\n"


@pytest.mark.parametrize(
    ("form", "kind", "text", "wants_segments"),
    [
        ("text", "text/plain; charset=utf-8", f"{TEXT}\n", False),
        ("srt", "text/plain; charset=utf-8", SRT, True),
        ("vtt", "text/vtt; charset=utf-8", VTT, True),
    ],
)
async def test_transcriptions_are_text_or_subtitles(
    serving: Serving, form: str, kind: str, text: str, wants_segments: bool
) -> None:
    answer = await _transcribe(serving, response_format=form)
    assert (answer.headers["content-type"], answer.text) == (kind, text)
    assert service_of(serving, EARS).requests[0].wants_segments is wants_segments


async def test_a_verbose_transcription_has_segments_unless_words_alone_are_requested(serving: Serving) -> None:
    full = (await _transcribe(serving, response_format="verbose_json")).json()
    fields = {"response_format": "verbose_json", "timestamp_granularities[]": "word"}
    words = (await _transcribe(serving, "/v3/audio/translations", **fields)).json()
    assert (full["task"], full["language"], full["duration"], full["text"]) == ("transcribe", "en", 9.25, TEXT)
    first, second = full["segments"]
    assert (first["id"], first["start"], first["end"], first["text"]) == (0, 0.0, 1.5, " Ever tried.")
    assert (second["id"], second["seek"]) == (1, 150)
    assert set(first) >= {"tokens", "temperature", "avg_logprob", "compression_ratio", "no_speech_prob"}
    assert words["words"] == [{"word": "Ever", "start": 0.25, "end": 0.75}]
    assert ("words" in full, "segments" in words, words["task"]) == (False, False, "translate")


async def test_a_streamed_transcription_has_a_delta_per_part_and_the_full_text_last(serving: Serving) -> None:
    answer = await _transcribe(serving, stream="true")
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert events_of(answer.text) == [
        {"type": "transcript.text.delta", "delta": "Ever tried."},
        {"type": "transcript.text.delta", "delta": " Ever --> failed."},
        {"type": "transcript.text.done", "text": TEXT, "usage": {"type": "duration", "seconds": 10}},
    ]


@pytest.mark.parametrize(
    ("options", "param", "code", "message"),
    [
        (
            {"json": {"model": EARS}},
            "content-type",
            None,
            "expected the recording as part 'file' of multipart/form-data",
        ),
        ({"content": b"x", "headers": {"content-type": "multipart/form-data"}}, None, None, "boundary"),
        (
            {"content": b"--b\r\nx", "headers": {"content-type": "multipart/form-data; boundary=b"}},
            None,
            None,
            "cannot be parsed",
        ),
        ({"files": {"model": (None, EARS)}}, "file", "missing_required_parameter", ""),
        ({"files": {"file": ("a.wav", b"sound")}}, "model", "missing_required_parameter", ""),
        ({"files": [(f"n{number}", (None, "x")) for number in range(65)]}, None, None, "at most 64 parts"),
    ],
    ids=["json", "no boundary", "malformed", "no file", "no model", "many parts"],
)
async def test_bad_forms_are_refused(
    serving: Serving, options: Any, param: str | None, code: str | None, message: str
) -> None:
    answer = await serving.post(TRANSCRIPTIONS, **options)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
    assert (error["param"], error["code"]) == (param, code)
    assert message in error["message"]


async def test_a_speech_body_that_is_not_json_is_refused(serving: Serving) -> None:
    answer = await serving.post(SPEECH, content=b"{", headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")


async def test_a_recording_above_the_message_size_limit_is_refused(tmp_path: Path) -> None:
    async with serve_openai(tmp_path, front_end={"max_body_bytes": 4096}) as server:
        statuses = [(await _transcribe(server, file=b"x" * size)).status_code for size in (5000, 3000)]
    assert statuses == [413, 200]


REFUSED: dict[str, list[tuple[dict[str, Any], str, str]]] = {
    VOICE: [
        ({"input": ...}, "input", "input field is missing in JSON body"),
        ({"input": None}, "input", "input field is missing in JSON body"),
        ({"input": ["a"]}, "input", "input field is not a string; got a list"),
        ({"input": " \n"}, "input", "input field is empty"),
        ({"input": "x" * 4097}, "input", "input: expected at most 4096 characters, or 100000 with stream_format audio"),
        (
            {"input": "x" * 100_001, "response_format": "mp3"},
            "input",
            "input: expected at most 100000 characters; got 100001",
        ),
        ({"voice": {"id": "v"}}, "voice", "voice field is not a string"),
        ({"language": 5}, "language", "language field is not a string; got 5"),
        ({"speed": "1"}, "speed", "speed field is not a number; got '1'"),
        ({"speed": True}, "speed", "speed field is not a number; got True"),
        ({"response_format": "aac"}, "response_format", "should be one of wav, pcm, flac, mp3, opus; got 'aac'"),
        ({"stream_format": "ws"}, "stream_format", "stream_format should be one of audio, sse; got 'ws'"),
        ({"instructions": "Whisper."}, "instructions", "instructions is not supported"),
        ({"new": 1}, "new", "Unknown parameter: 'new'; remove it"),
        ({"speeed": 1}, "speeed", "Unknown parameter: 'speeed'; did you mean 'speed'?"),
        ({"model": 7}, "model", "model field is not a string"),
        ({"input": "", "speed": "fast"}, "input", "speed field is"),
    ],
    EARS: [
        ({"response_format": "xml"}, "response_format", "response_format should be one of json, text, srt"),
        ({"temperature": "warm"}, "temperature", "temperature is not a valid number; got 'warm'"),
        ({"temperature": "3"}, "temperature", "temperature out of range(0.0, 2.0)"),
        ({"temperature": "nan"}, "temperature", "temperature out of range(0.0, 2.0)"),
        ({"stream": "perhaps"}, "stream", "stream field is not a boolean"),
        (
            {"stream": "true", "response_format": "srt"},
            "response_format",
            "response_format of a stream should be json or text",
        ),
        ({"timestamp_granularities[]": "letter"}, "timestamp_granularities", "segment or word; got 'letter'"),
        (
            {"timestamp_granularities[]": "word", "response_format": "srt"},
            "timestamp_granularities",
            "timestamp_granularities requires response_format json or verbose_json",
        ),
        ({"include[]": "logprobs"}, "include", "include is not supported"),
        ({"chunking_strategy": "server_vad"}, "chunking_strategy", "chunking_strategy should be auto"),
        ({"use_beam_search": "true"}, "use_beam_search", "use_beam_search is not supported"),
        ({"to_language": "fr"}, "to_language", "translations are English"),
        ({"new": "1"}, "new", "Unknown parameter: 'new'; remove it"),
        ({"prompt": "x" * 20_001}, "prompt", "prompt: expected at most 20000 characters"),
        ({"response_format": "xml", "temperature": "9"}, "response_format", "temperature out of range"),
    ],
}


@pytest.mark.parametrize(
    ("name", "fields", "param", "message"), [(name, *row) for name, rows in REFUSED.items() for row in rows]
)
async def test_a_bad_field_is_refused_before_the_service_is_called(
    serving: Serving, name: str, fields: dict[str, Any], param: str, message: str
) -> None:
    answer = await _call(serving, name, **fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert message in answer.json()["error"]["message"]
    assert service_of(serving, name).requests == []


@services
@pytest.mark.parametrize(
    ("model", "status", "code", "message"),
    [
        (CHAT, 400, "unsupported", 'the service "chat" does no {}; it does text_generation'),
        ("echo", 400, "unsupported", 'the service "echo" does no {}; it is a model that takes tensors'),
        ("nothing", 404, "model_not_found", "The model `nothing` does not exist"),
    ],
)
async def test_other_tasks_are_refused(
    serving: Serving, name: str, model: str, status: int, code: str, message: str
) -> None:
    answer = await _call(serving, name, model=model)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    task = "text2speech" if name == VOICE else "speech2text"
    assert answer.json()["error"]["message"].startswith(message.format(task))


@pytest.mark.parametrize(
    ("name", "fields"),
    [(VOICE, {}), (VOICE, {"response_format": "mp3"}), (VOICE, {"stream_format": "sse"}), (EARS, {"stream": "true"})],
)
@pytest.mark.parametrize(
    ("failure", "status", "error"),
    [
        (InvalidField("unknown", field="voice"), 400, {"param": "voice", "message": "unknown"}),
        (Overloaded("full", retry_after_seconds=3), 429, {"code": "rate_limit_exceeded", "message": "full"}),
        (ModelFailure("it has ended"), 500, {"message": "it has ended"}),
    ],
)
async def test_a_failure_before_the_first_part_has_a_status(
    serving: Serving, name: str, fields: Any, failure: Exception, status: int, error: dict[str, Any]
) -> None:
    service_of(serving, name).refusal = failure
    answer = await _call(serving, name, **fields)
    assert (answer.status_code, answer.headers.get("retry-after")) == (status, "3" if status == 429 else None)
    assert answer.json()["error"].items() >= error.items()


@services
@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_failure_after_the_first_part_is_a_last_event(serving: Serving, name: str, is_stream: bool) -> None:
    service_of(serving, name).steps = (FIRST[name], ModelFailure("it has ended"))
    stream = {"stream_format": "sse"} if name == VOICE else {"stream": "true"}
    answer = await _call(serving, name, **(stream if is_stream else {}))
    assert answer.status_code == (200 if is_stream else 500)
    *events, last = events_of(answer.text) if is_stream else [answer.json()]
    kind = {VOICE: "speech.audio.delta", EARS: "transcript.text.delta"}[name]
    assert [each["type"] for each in events] == [kind] * is_stream
    assert last["error"]["message"] == "it has ended"


@services
async def test_a_deadline_ends_the_request(serving: Serving, name: str) -> None:
    service, headers = service_of(serving, name), {"x-request-timeout": "0.05"}
    service.steps = (FIRST[name], trio.Event())
    if name == VOICE:
        late = await serving.post(SPEECH, json={"model": VOICE, "input": "One. Two."}, headers=headers)
    else:
        files = {"file": ("a.wav", b"sound"), "model": (None, EARS)}
        late = await serving.post(TRANSCRIPTIONS, files=files, headers=headers)
    assert (late.status_code, late.json()["error"]["code"]) == (504, "timeout")
    assert service.left.is_set()
    assert service.requests[0].deadline < math.inf


@pytest.mark.parametrize(
    ("name", "request_bytes"),
    [
        (VOICE, _speech("wav")),
        (VOICE, _speech("pcm")),
        (EARS, _form(stream="false")),
        (EARS, _form(stream="true")),
    ],
    ids=["speech", "streamed speech", "transcription", "streamed transcription"],
)
async def test_a_client_that_disconnects_ends_its_request(serving: Serving, name: str, request_bytes: bytes) -> None:
    service_of(serving, name).steps = (FIRST[name], trio.Event())
    await expect_cancelled_on_disconnect(serving, name, request_bytes)
