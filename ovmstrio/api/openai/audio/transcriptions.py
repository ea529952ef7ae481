"""``/audio/transcriptions`` and ``/audio/translations``: what is said in a recording, whole or as events."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from ovmstrio.api.deadlines import deadline_of
from ovmstrio.api.event_streams import answer_with_events
from ovmstrio.api.openai.audio.recording_forms import AskedTranscript, RecordingForm, read_form, read_request
from ovmstrio.api.openai.audio.transcript_answers import WrittenDown
from ovmstrio.api.openai.payload_paths import answer_payload
from ovmstrio.api.openai.pieces import write_event
from ovmstrio.core.generation import Task
from ovmstrio.dataplane.generation import open_transcript

if TYPE_CHECKING:
    from ovmstrio.api.event_streams import EventSink
    from ovmstrio.api.openai.api import OpenAIApi
    from ovmstrio.core.http import HttpAnswer, HttpRequest
    from ovmstrio.wire.http.router import Rule

__all__ = ["transcription_rules"]


def transcription_rules(api: OpenAIApi) -> list[Rule]:
    """Make the rules of both paths; a graph that takes whole requests may answer them, too."""

    async def answer(request: HttpRequest, *, path: str, translates: bool) -> HttpAnswer:
        answered = await answer_payload(api, request, path.removeprefix("/"))
        if answered is not None:
            return answered
        form = await read_form(api, request)
        asked = read_request(form, translates=translates, deadline=deadline_of(request))
        if asked.is_stream:
            return await answer_with_events(request, partial(_stream, api, request, form, asked), api.form.event)
        return await _answer_whole(api, request, form, asked)

    async def transcribe(request: HttpRequest) -> HttpAnswer:
        return await answer(request, path="/audio/transcriptions", translates=False)

    async def translate(request: HttpRequest) -> HttpAnswer:
        return await answer(request, path="/audio/translations", translates=True)

    return [
        *api.rules("/audio/transcriptions", "POST", transcribe, has_tasks=True),
        *api.rules("/audio/translations", "POST", translate, has_tasks=True),
    ]


async def _answer_whole(
    api: OpenAIApi, request: HttpRequest, form: RecordingForm, asked: AskedTranscript
) -> HttpAnswer:
    written = WrittenDown()
    with await api.call(request, form.model, Task.SPEECH_TO_TEXT) as call:
        async with open_transcript(call, asked.request) as transcript:
            async for part in transcript:
                written.take(part)
            written.finish(transcript)
        answer = written.answer(
            asked.form,
            asked.granularities,
            translates=asked.request.translates,
            temperature=asked.request.temperature,
        )
        call.event.sent = len(answer.content)
        return answer


async def _stream(
    api: OpenAIApi, request: HttpRequest, form: RecordingForm, asked: AskedTranscript, events: EventSink
) -> None:
    """Send an event for each part, and one with all of it."""
    written = WrittenDown()
    with await api.call(request, form.model, Task.SPEECH_TO_TEXT, is_stream=True) as call:

        async def send(data: bytes) -> None:
            call.event.sent += len(data)
            await events.send(data)

        async with open_transcript(call, asked.request) as transcript:
            async for part in transcript:
                if text := written.take(part):
                    await send(write_event({"type": "transcript.text.delta", "delta": text}))
            written.finish(transcript)
        done = {"type": "transcript.text.done", "text": written.text.strip(), "usage": written.usage}
        await send(write_event(done))
