"""OpenAI endpoints ``/audio/transcriptions`` and ``/audio/translations``: complete, or as events."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ovmstrio.core.errors import ErrorList
from ovmstrio.core.generation import Task
from ovmstrio.core.http_messages import HttpAnswer
from ovmstrio.core.speech import TranscriptionRequest
from ovmstrio.protocols.openai.api import encode_event
from ovmstrio.protocols.openai.fields import Fields, shown
from ovmstrio.protocols.openai.forms import FormReader
from ovmstrio.protocols.openai.known_fields import TRANSCRIPTION
from ovmstrio.protocols.openai.raw_http_routes import answer_raw_request
from ovmstrio.serving.generation_calls import open_transcript
from ovmstrio.transport.http.responses import json_response, request_deadline
from ovmstrio.transport.http.sse import stream_events

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ovmstrio.core.http_messages import HttpRequest
    from ovmstrio.core.speech import TimedText, Transcript, TranscriptPart
    from ovmstrio.protocols.openai.api import OpenAIApi
    from ovmstrio.protocols.openai.forms import Form
    from ovmstrio.transport.http.router import Rule
    from ovmstrio.transport.http.sse import EventSink

# Request form

_FILE: Final = "file"
_FORM: Final = FormReader(
    TRANSCRIPTION,
    _FILE,
    "recording",
    frozenset({"model", "prompt", "language", "response_format", "user"}),
    {"temperature": float},
    frozenset({"timestamp_granularities", "include"}),
)
_FORMATS: Final = ("json", "text", "srt", "verbose_json", "vtt")
_STREAMED: Final = ("json", "text")
_TIMED: Final = ("json", "verbose_json")
_GRANULARITIES: Final = ("segment", "word")
_MAX_PROMPT_CHARACTERS: Final = 20_000


class _ParsedRequest(NamedTuple):
    """Parsed request; ``granularities`` are the requested ones."""

    request: TranscriptionRequest
    form: str
    granularities: frozenset[str]
    is_stream: bool


def _read_request(form: Form, *, translates: bool, deadline: float) -> _ParsedRequest:
    errors = ErrorList()
    fields = Fields(form.document, errors)
    is_stream = bool(fields.flag("stream", "stream field is not a boolean"))
    answer = fields.choice("response_format", _FORMATS) or "json"
    granularities = _granularities(fields, answer)
    prompt = fields.text("prompt") or ""
    if len(prompt) > _MAX_PROMPT_CHARACTERS:
        fields.refuse("prompt", f"prompt: expected at most {_MAX_PROMPT_CHARACTERS} characters", got=str(len(prompt)))
    temperature = fields.number("temperature", 0, 2, "temperature out of range(0.0, 2.0)")
    if is_stream and answer not in _STREAMED:
        fields.refuse(
            "response_format", f"response_format of a stream should be {' or '.join(_STREAMED)}", got=repr(answer)
        )
    if fields.get("include"):
        fields.refuse(
            "include", "include is not supported: token probabilities are unknown", code="unsupported_parameter"
        )
    if fields.word("chunking_strategy") not in (None, "auto"):
        fields.refuse(
            "chunking_strategy", "chunking_strategy should be auto", got=shown(fields.get("chunking_strategy"))
        )
    language = fields.name_text("language") or ""
    TRANSCRIPTION.check(fields)
    errors.raise_if_any()
    request = TranscriptionRequest(
        audio=form.files[_FILE],
        translates=translates,
        language=language.lower(),
        prompt=prompt,
        temperature=temperature or 0.0,
        wants_segments=answer in {"srt", "vtt", "verbose_json"} or "segment" in granularities,
        wants_words="word" in granularities,
        deadline=deadline,
    )
    return _ParsedRequest(request, answer, granularities, is_stream)


def _granularities(fields: Fields, answer: str) -> frozenset[str]:
    name = "timestamp_granularities"
    given = fields.get(name) or ()
    for each in given:
        if each not in _GRANULARITIES:
            fields.refuse(name, f"{name} should be {' or '.join(_GRANULARITIES)}", got=shown(each))
    if given and answer not in _TIMED:
        fields.refuse(name, f"{name} requires response_format {' or '.join(_TIMED)}", got=repr(answer))
    return frozenset(given)


# Response formats

_TYPES: Final = {"text": "text/plain", "srt": "text/plain", "vtt": "text/vtt"}


@dataclass(slots=True)
class _CompleteTranscript:
    text: str = ""
    segments: list[TimedText] = field(default_factory=list)
    words: list[TimedText] = field(default_factory=list)
    language: str = ""
    seconds: float = 0.0

    def take(self, part: TranscriptPart) -> str:
        """Append a part; return its text as it follows the text so far."""
        text = part.text if self.text else part.text.lstrip()
        self.text += text
        self.segments += part.segments
        self.words += part.words
        return text

    def finish(self, transcript: Transcript) -> None:
        self.language, self.seconds = transcript.language, transcript.seconds

    @property
    def usage(self) -> dict[str, Any]:
        """Duration in seconds, rounded up."""
        return {"type": "duration", "seconds": int(-(-self.seconds // 1))}

    def answer(self, form: str, granularities: frozenset[str], *, translates: bool, temperature: float) -> HttpAnswer:
        if form in _TYPES:
            return HttpAnswer(200, (("content-type", f"{_TYPES[form]}; charset=utf-8"),), self._plain(form).encode())
        document: dict[str, Any] = {"text": self.text.strip()}
        if form == "verbose_json":
            task = "translate" if translates else "transcribe"
            document = {"task": task, "language": self.language, "duration": round(self.seconds, 3), **document}
        if "segment" in granularities or (form == "verbose_json" and not granularities):
            document["segments"] = [_segment(*each, temperature) for each in enumerate(self.segments)]
        if "word" in granularities:
            document["words"] = [
                {"word": each.text.strip(), "start": each.start, "end": each.end} for each in self.words
            ]
        return json_response({**document, "usage": self.usage})

    def _plain(self, form: str) -> str:
        if form == "text":
            return f"{self.text.strip()}\n"
        return _subtitles(self.segments, is_web=form == "vtt")


def _segment(number: int, span: TimedText, temperature: float) -> dict[str, Any]:
    """Return a segment; the library has no probabilities, so neutral values are returned."""
    raw = span.text.encode()
    return {
        "id": number,
        "seek": int(span.start * 100),
        "start": span.start,
        "end": span.end,
        "text": span.text,
        "tokens": [],
        "temperature": temperature,
        "avg_logprob": 0.0,
        "compression_ratio": round(len(raw) / len(zlib.compress(raw)), 3) if raw else 0.0,
        "no_speech_prob": 0.0,
    }


def _subtitles(segments: Sequence[TimedText], *, is_web: bool) -> str:
    mark = "." if is_web else ","
    blocks = ["WEBVTT\n\n"] if is_web else []
    for number, each in enumerate(segments, start=1):
        head = "" if is_web else f"{number}\n"
        # An empty line or an arrow would be read as subtitle syntax.
        text = " ".join(each.text.split()).replace("-->", "->")
        blocks.append(f"{head}{_time(each.start, mark)} --> {_time(each.end, mark)}\n{text}\n\n")
    return "".join(blocks)


def _time(seconds: float, mark: str) -> str:
    total_seconds, milliseconds = divmod(round(seconds * 1000), 1000)
    minutes, second = divmod(total_seconds, 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour:02}:{minute:02}:{second:02}{mark}{milliseconds:03}"


# Routes


def transcription_rules(api: OpenAIApi) -> list[Rule]:
    """Return the routes; a graph that accepts raw requests may answer instead."""

    async def answer(request: HttpRequest, *, path: str, translates: bool) -> HttpAnswer:
        answered = await answer_raw_request(api, request, path.removeprefix("/"))
        if answered is not None:
            return answered
        form = await _FORM.read(api, request)
        parsed = _read_request(form, translates=translates, deadline=request_deadline(request))
        if parsed.is_stream:
            return await stream_events(request, partial(_stream, api, request, form, parsed), api.form.event)
        return await _answer_complete(api, request, form, parsed)

    async def transcribe(request: HttpRequest) -> HttpAnswer:
        return await answer(request, path="/audio/transcriptions", translates=False)

    async def translate(request: HttpRequest) -> HttpAnswer:
        return await answer(request, path="/audio/translations", translates=True)

    return [
        *api.rules("/audio/transcriptions", "POST", transcribe, has_tasks=True),
        *api.rules("/audio/translations", "POST", translate, has_tasks=True),
    ]


async def _answer_complete(api: OpenAIApi, request: HttpRequest, form: Form, parsed: _ParsedRequest) -> HttpAnswer:
    complete = _CompleteTranscript()
    with await api.call(request, form.model, Task.SPEECH_TO_TEXT) as call:
        async with open_transcript(call, parsed.request) as transcript:
            async for part in transcript:
                complete.take(part)
            complete.finish(transcript)
        answer = complete.answer(
            parsed.form,
            parsed.granularities,
            translates=parsed.request.translates,
            temperature=parsed.request.temperature,
        )
        call.event.sent = len(answer.content)
        return answer


async def _stream(api: OpenAIApi, request: HttpRequest, form: Form, parsed: _ParsedRequest, events: EventSink) -> None:
    complete = _CompleteTranscript()
    with await api.call(request, form.model, Task.SPEECH_TO_TEXT, is_stream=True) as call:

        async def send(data: bytes) -> None:
            call.event.sent += len(data)
            await events.send(data)

        async with open_transcript(call, parsed.request) as transcript:
            async for part in transcript:
                if text := complete.take(part):
                    await send(encode_event({"type": "transcript.text.delta", "delta": text}))
            complete.finish(transcript)
        done = {"type": "transcript.text.done", "text": complete.text.strip(), "usage": complete.usage}
        await send(encode_event(done))
