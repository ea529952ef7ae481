"""OpenAI endpoints ``/images/generations``, ``/images/edits`` and ``/images/variations``: complete, or as events."""

from __future__ import annotations

import base64
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import trio

from ovmstrio.core.errors import ErrorList, PayloadTooLarge
from ovmstrio.core.generation import Task
from ovmstrio.core.http_messages import HttpAnswer
from ovmstrio.core.images import ImageFormat, ImagePart, ImageRequest, parse_resolution
from ovmstrio.protocols.openai.api import encode_event
from ovmstrio.protocols.openai.fields import Fields, shown
from ovmstrio.protocols.openai.forms import Form, FormReader
from ovmstrio.protocols.openai.known_fields import IMAGE_EDITS, IMAGE_GENERATIONS, IMAGE_VARIATIONS, KnownFields
from ovmstrio.protocols.openai.raw_http_routes import answer_raw_request
from ovmstrio.serving.generation_calls import open_images
from ovmstrio.transport.http.responses import json_response, request_deadline
from ovmstrio.transport.http.sse import stream_events

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ovmstrio.core.http_messages import HttpRequest
    from ovmstrio.protocols.openai.api import OpenAIApi
    from ovmstrio.transport.http.router import Rule
    from ovmstrio.transport.http.sse import EventSink

# ----------------------------------------------------------------------
# Requests
# ----------------------------------------------------------------------

_B64_JSON: Final = "b64_json"
_AUTO: Final = "auto"
_MAX_PROMPT_CHARACTERS: Final = 32_000
_MAX_GUIDANCE: Final = 1000
_MAX_COMPRESSION: Final = 100
_MAX_PARTIAL_IMAGES: Final = 3
_SEEDS: Final = range(2**63)  # of openvino-genai
_COUNT: Final = "num_images_per_prompt"
_SIDES: Final = ("width", "height")
_TEXTS: Final = ("prompt_2", "prompt_3", "negative_prompt", "negative_prompt_2", "negative_prompt_3")
_INTEGERS: Final = (
    *("n", _COUNT, *_SIDES, "num_inference_steps", "seed", "rng_seed", "max_sequence_length"),
    *("output_compression", "partial_images"),
)
_FRACTIONS: Final = ("guidance_scale", "strength")


class _Endpoint(NamedTuple):
    """An endpoint: its path, fields, the prefix of its events, and the reader of its forms; None for JSON."""

    path: str
    known: KnownFields
    events: str
    form: FormReader | None = None


def _form_endpoint(path: str, known: KnownFields) -> _Endpoint:
    numbers: dict[str, Callable[[str], float]] = {**dict.fromkeys(_INTEGERS, int), **dict.fromkeys(_FRACTIONS, float)}
    texts = (known.used | known.ignored.keys()) - numbers.keys() - {"stream"}
    return _Endpoint(path, known, "image_edit", FormReader(known, "image", "image", texts, numbers))


_ENDPOINTS: Final = (
    _Endpoint("/images/generations", IMAGE_GENERATIONS, "image_generation"),
    _form_endpoint("/images/edits", IMAGE_EDITS),
    _form_endpoint("/images/variations", IMAGE_VARIATIONS),
)


class _ParsedRequest(NamedTuple):
    request: ImageRequest
    is_stream: bool


def _read(endpoint: _Endpoint, form: Form, deadline: float) -> _ParsedRequest:
    errors = ErrorList()
    fields = Fields(form.document, errors)
    prompt = _read_prompt(fields) if "prompt" in endpoint.known.used else ""
    given = fields.choice("response_format", (_B64_JSON, "url"), "response_format field is not a string")
    if given == "url":
        message = f"response_format url is not supported: the server stores no images; use {_B64_JSON}"
        fields.refuse("response_format", message, code="unsupported_parameter")
    file_format = ImageFormat(fields.choice("output_format", tuple(each.value for each in ImageFormat)) or "png")
    compression = fields.integer(
        "output_compression", "output_compression should be from 0 to 100", range(_MAX_COMPRESSION + 1)
    )
    if file_format is ImageFormat.PNG and compression not in (None, _MAX_COMPRESSION):
        fields.refuse("output_compression", "output_compression requires output_format jpeg or webp")
    options = _read_options(fields)
    if not form.files and options.get("strength", 1.0) != 1:
        fields.refuse("strength", "strength requires an image: use /images/edits", got=shown(options["strength"]))
    is_stream = bool(fields.flag("stream", "stream field is not a boolean"))
    count = f"partial_images should be from 0 to {_MAX_PARTIAL_IMAGES}"
    partial_images = fields.integer("partial_images", count, range(_MAX_PARTIAL_IMAGES + 1)) or 0
    if partial_images and not is_stream:
        fields.refuse("partial_images", "partial_images requires stream true")
    if is_stream and options.get(_COUNT, 1) > 1:
        fields.refuse("n", "n should be 1 in a stream", got=str(options[_COUNT]))
    for name, content in form.files.items():
        if not content:
            fields.refuse(name, f"{name}: the file is empty")
    endpoint.known.check(fields)
    errors.raise_if_any()
    image, mask = (form.files.get(name, b"") for name in ("image", "mask"))
    request = ImageRequest(prompt, image, mask, options, file_format, compression, partial_images, deadline)
    return _ParsedRequest(request, is_stream)


def _read_prompt(fields: Fields) -> str:
    text = fields.text("prompt", "prompt field is not a string")
    if text is None and fields.get("prompt") is None:
        fields.refuse("prompt", "prompt field is missing in body", code="missing_required_parameter")
    return _bounded(fields, "prompt", text or "")


def _bounded(fields: Fields, name: str, text: str) -> str:
    if len(text) > _MAX_PROMPT_CHARACTERS:
        fields.refuse(name, f"{name}: expected at most {_MAX_PROMPT_CHARACTERS} characters", got=str(len(text)))
    return text


def _read_options(fields: Fields) -> dict[str, Any]:
    """Return the generation options by openvino-genai's names; absent ones have the model's defaults."""
    found: dict[str, Any] = {name: _bounded(fields, name, fields.text(name) or "") for name in _TEXTS}
    found = {name: text for name, text in found.items() if text}
    for name in ("num_inference_steps", "max_sequence_length", *_SIDES):
        found[name] = fields.unsigned(name, minimum=1, message=f"{name} must be higher than 0")
    found["guidance_scale"] = fields.number("guidance_scale", 0, _MAX_GUIDANCE)
    found["strength"] = fields.number("strength", 0, 1, "strength out of range(0.0, 1.0)")
    found[_COUNT] = _read_once(
        fields, "n", _COUNT, lambda name: fields.unsigned(name, minimum=1, message=f"{name} must be higher than 0")
    )
    found["rng_seed"] = _read_once(
        fields,
        "seed",
        "rng_seed",
        lambda name: fields.integer(name, f"{name} field is not an unsigned integer", _SEEDS),
    )
    return {name: value for name, value in {**found, **_read_size(fields)}.items() if value is not None}


def _read_once(fields: Fields, name: str, alias: str, read: Callable[[str], int | None]) -> int | None:
    """Read a field with two names."""
    value, other = read(name), read(alias)
    if value is not None and other is not None and value != other:
        fields.refuse(alias, f"{alias} is another name of {name}: send one of both")
    return other if value is None else value


def _read_size(fields: Fields) -> dict[str, int]:
    size = fields.name_text("size", "size field is not a string")
    if size is None or size == _AUTO:
        return {}
    try:
        read = dict(zip(_SIDES, parse_resolution(size), strict=True))
    except ValueError:
        fields.refuse("size", "size field is not in correct format - WxH, such as 512x512", got=shown(size))
        return {}
    if any(fields.get(side) not in (None, value) for side, value in read.items()):
        fields.refuse("size", "size and width or height differ: send one of both", got=shown(size))
    return read


# ----------------------------------------------------------------------
# Answers
# ----------------------------------------------------------------------

_MAX_INLINE_BYTES: Final = 2**18


def _encode(document: Mapping[str, Any], files: Sequence[bytes]) -> HttpAnswer:
    data = [{_B64_JSON: base64.b64encode(file).decode()} for file in files]
    return json_response({**document, "data": data})


def _facts(part: ImagePart, request: ImageRequest) -> dict[str, Any]:
    width, height = part.size
    return {
        "background": "opaque",
        "output_format": request.form.value,
        "size": f"{width}x{height}",
    }


async def _answer_complete(api: OpenAIApi, request: HttpRequest, model: str, parsed: ImageRequest) -> HttpAnswer:
    with await api.call(request, model, Task.IMAGE_GENERATION) as call:
        async with open_images(call, parsed) as images:
            part = [part async for part in images][-1]
        size = sum(map(len, part.files))
        if size > api.max_body_bytes:
            raise PayloadTooLarge.of_outputs(size, api.max_body_bytes)
        encode = partial(_encode, {"created": int(time.time()), **_facts(part, parsed)}, part.files)
        answer = encode() if size <= _MAX_INLINE_BYTES else await trio.to_thread.run_sync(encode)
        call.event.sent = len(answer.content)
        return answer


async def _stream(
    api: OpenAIApi, request: HttpRequest, model: str, parsed: ImageRequest, sink: EventSink, *, kind: str
) -> None:
    """Send partial images, then the final one."""
    count = 0
    with await api.call(request, model, Task.IMAGE_GENERATION, is_stream=True) as call:
        async with open_images(call, parsed) as images:
            async for part in images:
                name = f"{kind}.partial_image" if part.is_partial else f"{kind}.completed"
                document = {"type": name, "created_at": int(time.time()), "quality": _AUTO, **_facts(part, parsed)}
                if part.is_partial:
                    document["partial_image_index"] = count
                    count += 1
                document[_B64_JSON] = base64.b64encode(part.files[0]).decode()
                data = b"event: %b\n%b" % (name.encode(), encode_event(document))
                call.event.sent += len(data)
                await sink.send(data)


def image_rules(api: OpenAIApi) -> list[Rule]:
    """Return the routes; a graph that accepts raw requests may answer instead."""

    async def answer(request: HttpRequest, *, endpoint: _Endpoint) -> HttpAnswer:
        answered = await answer_raw_request(api, request, endpoint.path.removeprefix("/"))
        if answered is not None:
            return answered
        if endpoint.form is None:
            body = await api.body(request, endpoint.known)
            form = Form(body.document, {}, body.model)
        else:
            form = await endpoint.form.read(api, request)
        parsed, is_stream = _read(endpoint, form, request_deadline(request))
        if is_stream:
            stream = partial(_stream, api, request, form.model, parsed, kind=endpoint.events)
            return await stream_events(request, stream, api.form.event)
        return await _answer_complete(api, request, form.model, parsed)

    rules = (api.rules(each.path, "POST", partial(answer, endpoint=each), has_tasks=True) for each in _ENDPOINTS)
    return [rule for found in rules for rule in found]
