"""OpenAI endpoint ``/audio/speech``: a complete file, a streamed file, or events."""

from __future__ import annotations

import base64
import math
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ovmstrio.core.errors import ErrorList
from ovmstrio.core.generation import Task
from ovmstrio.core.http_messages import HttpAnswer
from ovmstrio.core.speech import AudioFormat, SpeechRequest
from ovmstrio.protocols.openai.api import encode_event
from ovmstrio.protocols.openai.fields import Fields, shown
from ovmstrio.protocols.openai.known_fields import SPEECH
from ovmstrio.protocols.openai.raw_http_routes import answer_raw_request
from ovmstrio.serving.generation_calls import open_speech
from ovmstrio.transport.http.responses import request_deadline
from ovmstrio.transport.http.sse import NO_PROXY_BUFFERING, stream_events

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ovmstrio.core.http_messages import Headers, HttpRequest
    from ovmstrio.protocols.openai.api import Body, OpenAIApi
    from ovmstrio.transport.http.router import Rule
    from ovmstrio.transport.http.sse import EventSink

_PATH: Final = "/audio/speech"
_TYPES: Final[Mapping[AudioFormat, str]] = {
    AudioFormat.WAV: "audio/wav",
    AudioFormat.PCM: "audio/pcm",
    AudioFormat.FLAC: "audio/flac",
    AudioFormat.MP3: "audio/mpeg",
    AudioFormat.OPUS: "audio/ogg",
}
_LENGTH_IN_HEADER: Final = frozenset({AudioFormat.WAV, AudioFormat.FLAC})
"""Formats whose header has the length; sent complete unless a stream is requested."""

_AUDIO, _EVENTS = "audio", "sse"
_MAX_COMPLETE_CHARACTERS: Final = 4096
_MAX_STREAMED_CHARACTERS: Final = 100_000
"""Maximum characters of a streamed text, of which only a few sentences are in memory."""


class _ParsedRequest(NamedTuple):
    """Parsed request; ``has_events`` selects server-sent events."""

    request: SpeechRequest
    has_events: bool


def speech_rules(api: OpenAIApi) -> list[Rule]:
    """Return the routes; a graph that accepts raw requests may answer instead."""

    async def speak(request: HttpRequest) -> HttpAnswer:
        answered = await answer_raw_request(api, request, _PATH.removeprefix("/"))
        if answered is not None:
            return answered
        body = await api.body(request, SPEECH)
        parsed = _read(body.document, request_deadline(request))
        stream = partial(_stream, api, request, body, parsed)
        if parsed.has_events:
            return await stream_events(request, stream, api.form.event)
        headers: Headers = (("content-type", _TYPES[parsed.request.form]),)
        if parsed.request.is_streamed:
            return await stream_events(request, stream, None, (*headers, NO_PROXY_BUFFERING))
        return await _answer_complete(api, request, body, parsed.request, headers)

    return api.rules(_PATH, "POST", speak, has_tasks=True)


async def _answer_complete(
    api: OpenAIApi, request: HttpRequest, body: Body, parsed: SpeechRequest, headers: Headers
) -> HttpAnswer:
    with await api.call(request, body.model, Task.TEXT_TO_SPEECH) as call:
        async with open_speech(call, parsed) as speech:
            sound = b"".join([part.audio async for part in speech])
        call.event.sent = len(sound)
        return HttpAnswer(200, headers, sound)


async def _stream(api: OpenAIApi, request: HttpRequest, body: Body, parsed: _ParsedRequest, sink: EventSink) -> None:
    """Send each sentence when it has been synthesised, raw or as an event."""
    seconds = 0.0
    with await api.call(request, body.model, Task.TEXT_TO_SPEECH, is_stream=True) as call:

        async def send(data: bytes) -> None:
            call.event.sent += len(data)
            await sink.send(data)

        async with open_speech(call, parsed.request) as speech:
            async for part in speech:
                seconds += part.seconds
                if part.audio:
                    await send(_delta(part.audio) if parsed.has_events else part.audio)
        if parsed.has_events:
            usage = {"type": "duration", "seconds": math.ceil(seconds)}
            await send(encode_event({"type": "speech.audio.done", "usage": usage}))


def _delta(audio: bytes) -> bytes:
    return encode_event({"type": "speech.audio.delta", "audio": base64.b64encode(audio).decode()})


def _read(document: Mapping[str, Any], deadline: float) -> _ParsedRequest:
    errors = ErrorList()
    fields = Fields(document, errors)
    stream = fields.choice("stream_format", (_AUDIO, _EVENTS), "stream_format field is not a string")
    forms = tuple(each.value for each in AudioFormat)
    form = AudioFormat(
        fields.choice("response_format", forms, "response_format field is not a string") or AudioFormat.WAV
    )
    is_streamed = stream is not None or form not in _LENGTH_IN_HEADER
    text = _read_text(fields, is_streamed=is_streamed)
    voice = fields.name_text("voice", "voice field is not a string")
    language = fields.name_text("language", "language field is not a string")
    speed = _read_speed(fields)
    SPEECH.check(fields)
    errors.raise_if_any()
    request = SpeechRequest(text, voice or "", language or "", speed, form, is_streamed, deadline)
    return _ParsedRequest(request, stream == _EVENTS)


def _read_text(fields: Fields, *, is_streamed: bool) -> str:
    text = fields.text("input", "input field is not a string")
    if text is None:
        if fields.get("input") is None:
            fields.refuse("input", "input field is missing in JSON body", code="missing_required_parameter")
        return ""
    most = _MAX_STREAMED_CHARACTERS if is_streamed else _MAX_COMPLETE_CHARACTERS
    if len(text) > most:
        more = "" if is_streamed else f", or {_MAX_STREAMED_CHARACTERS} with stream_format {_AUDIO}"
        fields.refuse("input", f"input: expected at most {most} characters{more}", got=str(len(text)))
    elif not text.strip():
        fields.refuse("input", "input field is empty")
    return text


def _read_speed(fields: Fields) -> float:
    speed = fields.get("speed")
    if speed is None:
        return 1.0
    if isinstance(speed, bool) or not isinstance(speed, int | float):
        fields.refuse("speed", "speed field is not a number", got=shown(speed))
        return 1.0
    # The model checks the range; clamp because huge integers do not convert to float.
    return float(max(-1e9, min(1e9, speed)))
