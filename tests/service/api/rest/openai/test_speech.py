"""``/audio/speech``: forms of bodies and answers, and what is refused."""

from __future__ import annotations

import base64
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trio
from httpx import RemoteProtocolError, Response

from ovmstrio.access.allowance import CallerAllowance
from ovmstrio.api.openai.api import PREFIXES
from ovmstrio.config.text_models import TextModelSpec
from ovmstrio.core.errors import InvalidField, ModelFailure, Overloaded
from ovmstrio.core.generation import Task
from ovmstrio.core.speech import SoundForm, SpeechPart, SpeechRequest
from tests.service.api.rest.openai.talking import chat_body, events_of
from tests.support.callers import bearer, gate_of
from tests.support.speakers import ScriptedSpeaker
from tests.support.text_generators import CHAT, load_generator, text_spec
from tests.support.waits import WAIT_SECONDS
from tests.unit.api.rest.servers import Serving, serving_rest

VOICE = "voice"
ALL = b"head and firstsecond\x00"


async def _load(spec: Any, version: int, directory: Path) -> Any:
    if isinstance(spec, TextModelSpec) and spec.task is Task.TEXT_TO_SPEECH:
        await trio.lowlevel.checkpoint()
        return ScriptedSpeaker(spec.name)
    return await load_generator(spec, version, directory)


def _specs(folder: Path) -> tuple[TextModelSpec, ...]:
    voice = text_spec(folder / VOICE, VOICE).model_copy(update={"task": Task.TEXT_TO_SPEECH})
    return voice, text_spec(folder / CHAT)


@pytest.fixture
async def speaking(tmp_path: Path) -> AsyncIterator[Serving]:
    """Serve ``voice``, which speaks, ``chat``, which makes text, and ``echo``, which takes tensors."""
    async with serving_rest(tmp_path, models=_specs(tmp_path), loader=_load) as server:
        yield server


def _service(serving: Serving) -> ScriptedSpeaker:
    service: Any = serving.registry.peek(VOICE)
    assert isinstance(service, ScriptedSpeaker)
    return service


async def _speak(serving: Serving, path: str = "/v3/audio/speech", **fields: Any) -> Response:
    body = {"model": VOICE, "input": "Fail better.", **fields}
    return await serving.post(path, json={name: value for name, value in body.items() if value is not ...})


def _raw(form: str) -> bytes:
    data = f'{{"model": "{VOICE}", "input": "One. Two.", "response_format": "{form}"}}'
    return f"POST /v3/audio/speech HTTP/1.1\r\nhost: h\r\ncontent-length: {len(data)}\r\n\r\n{data}".encode()


@pytest.mark.parametrize("prefix", PREFIXES)
async def test_a_text_is_spoken_as_one_wav_file_under_all_prefixes(speaking: Serving, prefix: str) -> None:
    """As OVMS answers, whatever is left out of the body."""
    answer = await _speak(speaking, f"{prefix}/audio/speech")

    assert (answer.status_code, answer.headers["content-type"]) == (200, "audio/wav")
    assert (answer.content, answer.headers["content-length"]) == (ALL, str(len(ALL)))
    assert _service(speaking).requests == [SpeechRequest("Fail better.")]


async def test_all_fields_reach_the_service(speaking: Serving) -> None:
    """Null is as good as nothing, and unknown ones are passed over."""
    fields: dict[str, Any] = {
        "voice": "anna",
        "language": "en-GB",
        "speed": 2,
        "response_format": "flac",
        "instructions": "",
    }
    await _speak(speaking, **fields, unknown=1)
    await _speak(speaking, voice=None, language=None, speed=None, response_format=None, stream_format=None)
    await _speak(speaking, speed=10**30)

    assert _service(speaking).requests == [
        SpeechRequest("Fail better.", "anna", "en-GB", 2.0, SoundForm.FLAC),
        SpeechRequest("Fail better."),
        SpeechRequest("Fail better.", speed=1e9),
    ]


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
async def test_a_file_is_streamed_where_its_head_does_not_tell_its_length(
    speaking: Serving, form: str, stream: str | None, kind: str, is_streamed: bool
) -> None:
    """And where it is asked for: then the model knows of it."""
    answer = await _speak(speaking, response_format=form, stream_format=stream)

    assert (answer.content, answer.headers["content-type"]) == (ALL, kind)
    assert ("content-length" in answer.headers) is not is_streamed
    assert ("x-accel-buffering" in answer.headers) is is_streamed
    assert [(asked.form.value, asked.is_streamed) for asked in _service(speaking).requests] == [(form, is_streamed)]


async def test_events_have_the_sound_of_a_sentence_each(speaking: Serving) -> None:
    """In OpenAI's form, and how long it is at the end."""
    answer = await _speak(speaking, stream_format="sse", response_format="pcm")

    assert answer.headers["content-type"].startswith("text/event-stream")
    first, second, done = events_of(answer.text)
    assert [base64.b64decode(each["audio"]) for each in (first, second)] == [b"head and first", b"second\x00"]
    assert {first["type"], second["type"]} == {"speech.audio.delta"}
    assert done == {"type": "speech.audio.done", "usage": {"type": "duration", "seconds": 5}}


async def test_the_first_sentence_is_sent_before_the_second_one_is_spoken(speaking: Serving) -> None:
    """A client plays it meanwhile."""
    service, goes_on = _service(speaking), trio.Event()
    service.steps = (SpeechPart(b"first", 1.0), goes_on, SpeechPart(b"second", 1.0))
    request = _raw("pcm")
    with trio.fail_after(WAIT_SECONDS):
        async with speaking.connect() as peer:
            await peer.send(request)
            begun = b""
            while b"first" not in begun:
                begun += await peer.stream.receive_some()
            await service.waiting.wait()
            goes_on.set()
            rest = b""
            while not rest.endswith(b"0\r\n\r\n"):
                rest += await peer.stream.receive_some()

    assert b"second" not in begun
    assert rest == b"6\r\nsecond\r\n0\r\n\r\n"


async def test_what_fails_before_the_first_sentence_has_a_status(speaking: Serving) -> None:
    """Whatever form the answer would have had."""
    service = _service(speaking)
    service.refusal = InvalidField("Requested voice 'x' not found in available voices", field="voice")
    refused = [await _speak(speaking, **how) for how in ({}, {"response_format": "mp3"}, {"stream_format": "sse"})]
    service.refusal = Overloaded("full", retry_after_seconds=3)
    full = await _speak(speaking, response_format="pcm")
    service.refusal, service.steps = None, (ModelFailure("it has ended"),)
    failed = await _speak(speaking, response_format="pcm")

    assert [(each.status_code, each.json()["error"]["param"]) for each in refused] == [(400, "voice")] * 3
    assert (full.status_code, full.headers["retry-after"]) == (429, "3")
    assert (failed.status_code, failed.json()["error"]["message"]) == (500, "it has ended")


async def test_what_fails_later_breaks_the_sound_off_and_is_an_event_among_events(speaking: Serving) -> None:
    """Nobody takes half a text for all of it; a whole file is refused as a whole."""
    _service(speaking).steps = (SpeechPart(b"first", 1.0), ModelFailure("it has ended"))
    whole = await _speak(speaking)
    events = events_of((await _speak(speaking, stream_format="sse")).text)
    with pytest.raises(RemoteProtocolError):
        await _speak(speaking, response_format="mp3")

    assert (whole.status_code, whole.json()["error"]["message"]) == (500, "it has ended")
    assert [each.get("type") or each["error"]["message"] for each in events] == ["speech.audio.delta", "it has ended"]


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"input": ...}, "input", "input field is missing in JSON body"),
        ({"input": None}, "input", "input field is missing in JSON body"),
        ({"input": ["a"]}, "input", "input field is not a string; got a list"),
        ({"input": " \n"}, "input", "input field is empty"),
        ({"input": "x" * 4097}, "input", "input may have 4096 characters, or 100000 where stream_format is audio"),
        ({"input": "x" * 100_001, "response_format": "mp3"}, "input", "input may have 100000 characters; got 100001"),
        ({"voice": {"id": "v"}}, "voice", "voice field is not a string"),
        ({"language": 5}, "language", "language field is not a string; got 5"),
        ({"speed": "1"}, "speed", "speed field is not a number; got '1'"),
        ({"speed": True}, "speed", "speed field is not a number; got True"),
        ({"response_format": "aac"}, "response_format", "should be one of wav, pcm, flac, mp3, opus; got 'aac'"),
        ({"stream_format": "ws"}, "stream_format", "stream_format should be one of audio, sse; got 'ws'"),
        ({"instructions": "Whisper."}, "instructions", "instructions are not supported"),
        ({"model": 7}, "model", "model field is not a string"),
    ],
)
async def test_a_field_that_cannot_be_is_refused(
    speaking: Serving, fields: dict[str, Any], param: str, said: str
) -> None:
    """By its name, before the model is asked."""
    answer = await _speak(speaking, **fields)

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert said in answer.json()["error"]["message"]
    assert _service(speaking).requests == []


async def test_all_that_is_wrong_is_told_at_once(speaking: Serving) -> None:
    """Not one after the other."""
    message = (await _speak(speaking, input="", speed="fast", voice=1)).json()["error"]["message"]

    assert all(said in message for said in ("input field is empty", "speed field is", "voice field is"))


async def test_a_body_that_is_no_json_and_a_model_that_does_not_speak_are_refused(speaking: Serving) -> None:
    """One of another task, one of tensors, and none."""
    broken = await speaking.post("/v3/audio/speech", content=b"{", headers={"content-type": "application/json"})
    chat = await _speak(speaking, model=CHAT)
    tensors = await _speak(speaking, model="echo", stream_format="audio")
    nothing = await _speak(speaking, model="nothing")

    assert (broken.status_code, broken.json()["error"]["code"]) == (400, "invalid_json")
    assert chat.json()["error"]["message"] == 'the service "chat" does no text2speech; it does text_generation'
    assert (chat.status_code, tensors.status_code) == (400, 400)
    assert (nothing.status_code, nothing.json()["error"]["code"]) == (404, "model_not_found")


async def test_tokens_a_minute_do_not_keep_from_speaking(tmp_path: Path, mock_clock: trio.testing.MockClock) -> None:
    """For what is spoken is not counted in tokens."""
    del mock_clock
    gate = gate_of({"shop": "infer:*"}, CallerAllowance("shop", tokens_per_minute=1))
    async with serving_rest(tmp_path, models=_specs(tmp_path), loader=_load, front_end={"gate": gate}) as server:
        written = [
            (await server.post("/v3/chat/completions", json=chat_body("one two"), headers=bearer("shop"))).status_code
            for _ in range(2)
        ]
        body = {"model": VOICE, "input": "three"}
        spoken = await server.post("/v3/audio/speech", json=body, headers=bearer("shop"))
    assert (written, spoken.status_code) == ([200, 429], 200)


async def test_a_deadline_ends_the_request(speaking: Serving) -> None:
    """The service is told."""
    service = _service(speaking)
    service.steps = (SpeechPart(b"one", 1.0), trio.Event())
    body = {"model": VOICE, "input": "One. Two."}
    late = await speaking.post("/v3/audio/speech", json=body, headers={"x-request-timeout": "0.05"})

    assert (late.status_code, late.json()["error"]["code"]) == (504, "timeout")
    assert service.left.is_set()
    assert service.requests[0].deadline < math.inf


@pytest.mark.parametrize("form", ["wav", "pcm"])
async def test_a_client_that_leaves_ends_its_request(speaking: Serving, form: str) -> None:
    """While it waits for the file, and in the midst of one."""
    service = _service(speaking)
    service.steps = (SpeechPart(b"one", 1.0), trio.Event())
    with trio.fail_after(WAIT_SECONDS):
        async with speaking.connect() as peer:
            await peer.send(_raw(form))
            await service.waiting.wait()
        await service.left.wait()


async def test_the_document_of_all_calls_has_an_example(speaking: Serving) -> None:
    """Which can be sent as it is."""
    await _speak(speaking)
    paths = (await speaking.get("/openapi.json")).json()["paths"]
    example = paths["/v3/audio/speech"]["post"]["requestBody"]["content"]["application/json"]["example"]

    assert example["model"] == VOICE
    assert (await speaking.post("/v3/audio/speech", json=example)).status_code == 200


async def test_a_stream_breaks_off_for_clients_of_the_application_as_well(speaking: Serving) -> None:
    """As those that send their bodies in chunks; there is no last chunk, which would say that all has come."""
    _service(speaking).steps = (SpeechPart(b"first", 1.0), ModelFailure("it has ended"))
    data = f'{{"model": "{VOICE}", "input": "One. Two.", "response_format": "pcm"}}'
    head = "POST /v3/audio/speech HTTP/1.1\r\nhost: h\r\ncontent-type: application/json\r\ntransfer-encoding: chunked"
    with trio.fail_after(WAIT_SECONDS):
        async with speaking.connect() as peer:
            await peer.send(f"{head}\r\n\r\n{len(data):x}\r\n{data}\r\n0\r\n\r\n".encode())
            answer = await peer.rest()

    assert answer.startswith(b"HTTP/1.1 200")
    assert b"first" in answer
    assert not answer.endswith(b"0\r\n\r\n")
