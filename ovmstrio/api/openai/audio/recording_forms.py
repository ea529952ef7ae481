"""Forms with a recording that is to be written down, as ``multipart/form-data``."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import trio

from ovmstrio.api.openai.api import model_of
from ovmstrio.api.openai.fields import Fields, shown
from ovmstrio.api.refusals import inflated_body
from ovmstrio.core.errors import InvalidField
from ovmstrio.core.gathered import Gathered
from ovmstrio.core.speech import TranscriptionRequest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ovmstrio.api.openai.api import OpenAIApi
    from ovmstrio.core.http import HttpRequest

__all__ = ["RecordingForm", "read_form", "read_request"]

_MULTIPART: Final = "multipart/form-data"
_MOST_PARTS: Final = 64
_AT_ONCE_BYTES: Final = 2**18
_FILE: Final = "file"
_LISTS: Final = ("timestamp_granularities", "include")
_NUMBERS: Final = ("temperature",)
_FLAGS: Final = {"true": True, "false": False}
_FORMATS: Final = ("json", "text", "srt", "verbose_json", "vtt")
_STREAMED: Final = ("json", "text")
_TIMED: Final = ("json", "verbose_json")
_GRANULARITIES: Final = ("segment", "word")
_MOST_PROMPT: Final = 20_000


class RecordingForm(NamedTuple):
    """The fields of a form as a document of JSON would have them, the file, and the model that is named."""

    document: Mapping[str, Any]
    audio: bytes
    model: str


class AskedTranscript(NamedTuple):
    """What is asked of the model, and how it is answered.

    ``granularities`` are those that the caller has named.
    """

    request: TranscriptionRequest
    form: str
    granularities: frozenset[str]
    is_stream: bool


async def read_form(api: OpenAIApi, request: HttpRequest) -> RecordingForm:
    """Read a form.

    Raises:
        InvalidField: it has no file or no model.
        InvalidRequest: it is no such form.
        PayloadTooLarge: it is too large once its encoding is undone.

    Cancellation: while its encoding is undone; not while a thread reads a large one.
    """
    kind = request.header("content-type") or ""
    if not kind.lower().startswith(_MULTIPART):
        message = f"a recording is sent as the part {_FILE!r} of {_MULTIPART}"
        raise InvalidField(message, field="content-type", got=repr(kind[:80]))
    body = await inflated_body(request, api.max_body_bytes)
    read = partial(_read_parts, kind, body)
    document, files = read() if len(body) <= _AT_ONCE_BYTES else await trio.to_thread.run_sync(read)
    model = model_of(document)
    if _FILE not in files:
        message = f"{_FILE} is missing in request: the recording is sent as a part of this name, with a filename"
        raise InvalidField(message, field=_FILE, code="missing_required_parameter")
    return RecordingForm(document, files[_FILE], model)


def _read_parts(kind: str, body: bytes) -> tuple[dict[str, Any], dict[str, bytes]]:
    from ovmstrio.core.multipart import form_parts  # noqa: PLC0415 - a framework, for the first who sends a form

    document: dict[str, Any] = {}
    files: dict[str, bytes] = {}
    for part in form_parts(kind, body, most=_MOST_PARTS):
        name = part.name.removesuffix("[]")
        if part.filename is not None:
            files[name] = part.content
        elif name in _LISTS:
            document.setdefault(name, []).append(part.text)
        elif part.text:
            document[name] = _value(name, part.text)
    return document, files


def _value(name: str, text: str) -> Any:
    """Give a field as a document of JSON would have it; what cannot be read so stays a text, which is refused later."""
    if len(text) > _MOST_PROMPT:
        return text
    if name in _NUMBERS:
        try:
            return float(text)
        except ValueError:
            return text
    return _FLAGS.get(text.lower(), text) if name == "stream" else text


def read_request(form: RecordingForm, *, translates: bool, deadline: float) -> AskedTranscript:
    """Read what is asked of the model.

    Raises:
        InvalidField: fields are not what they should be; all of them are told.
    """
    wrong = Gathered()
    fields = Fields(form.document, wrong)
    is_stream = bool(fields.flag("stream", "stream field is not a boolean"))
    answer = _choice(fields, "response_format", _FORMATS) or "json"
    granularities = _granularities(fields, answer)
    prompt = fields.text("prompt") or ""
    if len(prompt) > _MOST_PROMPT:
        fields.refuse("prompt", f"prompt may have {_MOST_PROMPT} characters", got=str(len(prompt)))
    temperature = fields.number("temperature", 0, 2, "temperature out of range(0.0, 2.0)")
    if is_stream and answer not in _STREAMED:
        fields.refuse("response_format", f"a stream has text alone: {' or '.join(_STREAMED)}", got=repr(answer))
    if fields.get("include"):
        fields.refuse("include", "include is not supported: tokens are not told", code="unsupported_parameter")
    if fields.word("chunking_strategy") not in (None, "auto"):
        fields.refuse("chunking_strategy", "chunking_strategy is auto here", got=shown(fields.get("chunking_strategy")))
    language = fields.name_text("language") or ""
    wrong.tell()
    asked = TranscriptionRequest(
        audio=form.audio,
        translates=translates,
        language=language.lower(),
        prompt=prompt,
        temperature=temperature or 0.0,
        wants_segments=answer in {"srt", "vtt", "verbose_json"} or "segment" in granularities,
        wants_words="word" in granularities,
        deadline=deadline,
    )
    return AskedTranscript(asked, answer, granularities, is_stream)


def _choice(fields: Fields, name: str, values: tuple[str, ...]) -> str | None:
    value = fields.name_text(name)
    if value is not None and value not in values:
        fields.refuse(name, f"{name} should be one of {', '.join(values)}", got=shown(value))
        return None
    return value


def _granularities(fields: Fields, answer: str) -> frozenset[str]:
    name = _LISTS[0]
    given = fields.get(name) or ()
    for each in given:
        if each not in _GRANULARITIES:
            fields.refuse(name, f"{name} should be {' or '.join(_GRANULARITIES)}", got=shown(each))
    if given and answer not in _TIMED:
        fields.refuse(name, f"{name} are told where response_format is {' or '.join(_TIMED)}", got=repr(answer))
    return frozenset(given)
