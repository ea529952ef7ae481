"""Base of Ollama's endpoints: error format, bodies, options of requests, and the figures of answers."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import UTC, datetime
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, Final

import orjson

from ovmstrio.core.errors import ErrorList, ServerError
from ovmstrio.core.generation import Finish, Grammar, GrammarKind, Task
from ovmstrio.protocols.openai.api import ErrorFormat, client_message, client_status
from ovmstrio.protocols.openai.fields import (
    Fields,
    PromptSize,
    make_request,
    read_max_tokens,
    read_response_format,
    read_top_logprobs,
    shown,
)
from ovmstrio.protocols.openai.known_fields import KnownFields, Refused
from ovmstrio.protocols.openai.raw_http_routes import accepts_raw_requests, answer_raw_request
from ovmstrio.protocols.openai.text_endpoint import (
    ChoiceText,
    ParsedRequest,
    answer_text,
    logprob_document,
    parse_arguments,
)
from ovmstrio.transport.http.responses import json_response, retry_after_headers
from ovmstrio.transport.http.sse import NO_PROXY_BUFFERING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ovmstrio.core.generation import (
        Conversation,
        GenerationChunk,
        GenerationLimits,
        GenerationRequest,
        Image,
        TokenLogprob,
    )
    from ovmstrio.core.http_messages import Headers, HttpAnswer, HttpRequest
    from ovmstrio.protocols.openai.api import Body, OpenAIApi
    from ovmstrio.protocols.openai.text_endpoint import Usage
    from ovmstrio.transport.http.router import Rule

STREAM_HEADERS: Final[Headers] = (("content-type", "application/x-ndjson"), NO_PROXY_BUFFERING)
_DEFAULT_TAG: Final = ":latest"


class OllamaErrors(ErrorFormat):
    """Ollama's format, ``{"error": text}``."""

    def refuse(self, error: Exception) -> HttpAnswer:
        """Convert an error to a response."""
        answer = json_response({"error": client_message(error)}, client_status(error))
        return answer.with_headers(retry_after_headers(error)) if isinstance(error, ServerError) else answer

    def event(self, error: Exception) -> bytes:
        """Encode an error as the last line of a stream."""
        return encode_line({"error": client_message(error)})


def encode_line(document: Mapping[str, Any]) -> bytes:
    """Encode a document as a line of a stream."""
    return orjson.dumps(document) + b"\n"


async def read_body(api: OpenAIApi, request: HttpRequest, known: KnownFields) -> Body:
    """Parse a body: answers stream by default, and the tag ``latest`` of an unknown name is the model itself.

    Raises:
        ServerError: as ``OpenAIApi.body``.
    """
    body = await api.body(request, known)
    model = resolve_name(api, body.model)
    if body.document.get("stream") is not None or "stream" not in known.used:
        return body._replace(model=model)
    return body._replace(model=model, document={**body.document, "stream": True})


def resolve_name(api: OpenAIApi, name: str) -> str:
    """Return the name of the service that a client names."""
    return name if api.plane.has_service(name) else name.removesuffix(_DEFAULT_TAG)


# ----------------------------------------------------------------------
# Options
# ----------------------------------------------------------------------


def check_keep_alive(fields: Fields, name: str) -> None:
    """Check the type of a duration: seconds, or a string such as ``5m``."""
    value = fields.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float | str)):
        fields.refuse(name, f"{name} is neither a number nor a string", got=shown(value))


def _check_integer(fields: Fields, name: str) -> None:
    fields.integer(name, f"{fields.path(name)} is not an integer")


def _check_number(fields: Fields, name: str) -> None:
    fields.number(name, float("-inf"), float("inf"))


_SAMPLING: Final = ("temperature", "top_p", "min_p", "seed", "presence_penalty", "frequency_penalty", "stop")
OPTIONS: Final = KnownFields(
    frozenset({*_SAMPLING, "top_k", "num_predict", "repeat_penalty"}),
    {
        **dict.fromkeys(
            ("num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "num_keep", "draft_num_predict"),
            _check_integer,
        ),
        **dict.fromkeys(
            ("numa", "low_vram", "f16_kv", "logits_all", "vocab_only", "use_mmap", "use_mlock", "embedding_only"),
            Fields.flag,
        ),
        **dict.fromkeys(("mirostat_tau", "mirostat_eta"), _check_number),
    },
    {
        "mirostat": Refused("the generation library has no Mirostat; use temperature and top_p"),
        "penalize_newline": Refused("the generation library penalizes all tokens alike", neutral=True),
        "repeat_last_n": Refused("the generation library penalizes tokens of the complete text", neutral=-1),
        "tfs_z": Refused("the generation library has no tail-free sampling; use min_p", neutral=1),
        "typical_p": Refused("the generation library has no typical sampling; use min_p", neutral=1),
    },
)
"""Members of ``options``."""
_DEFAULTS: Final = "defaults come from the model's `generation_config.json`"
OPTION_NOTES: Final[Mapping[str, str]] = {
    **dict.fromkeys((*_SAMPLING, "top_k", "repeat_penalty"), _DEFAULTS),
    "num_predict": "0 and negative values are no limit",
    **dict.fromkeys(("num_ctx", "num_keep"), "the context is the model's, and the server does not shorten prompts"),
    **dict.fromkeys(("num_batch", "num_gpu", "main_gpu", "num_thread"), "options of the model decide"),
    "draft_num_predict": "`draft_models_path` and `prompt_lookup` of the model decide",
    **dict.fromkeys(
        ("numa", "low_vram", "f16_kv", "logits_all", "vocab_only", "use_mmap", "use_mlock", "embedding_only"),
        "how OpenVINO loads a model depends on options of the model",
    ),
    **dict.fromkeys(("mirostat_tau", "mirostat_eta"), "they belong to `mirostat`"),
}
"""Notes on options that work or have no effect, for their table in ``docs/ollama.md``."""
NOTES: Final[Mapping[str, str]] = {
    "keep_alive": "models stay loaded; `idle_unload_seconds` unloads idle ones",
    "shift": "an answer ends at the end of the context",
    "truncate": "the server does not shorten prompts: a prompt that is too long is an error",
    "top_logprobs": "0 to 20, with `logprobs` and `stream` false",
}
"""Notes on fields of bodies; those of an endpoint take precedence."""


def _read_request(
    fields: Fields,
    limits: GenerationLimits,
    prompt: Conversation | str,
    *,
    is_stream: bool,
    deadline: float,
) -> GenerationRequest:
    """Return the request for a prompt, from the fields that chat and generation share."""
    options = fields.within("options") or fields.translated({}, PromptSize())
    predict = options.integer("num_predict", f"{options.path('num_predict')} is not an integer")
    # 0 and negative values are no limit.
    limited = options.translated(
        {"num_predict": predict if predict is not None and predict > 0 else None}, PromptSize()
    )
    top_k = options.get("top_k")
    sampling = {name: options.get(name) for name in _SAMPLING}
    sampling |= {"top_k": -1 if top_k == 0 else top_k, "repetition_penalty": options.number("repeat_penalty", 0, 1e6)}
    logprobs = bool(fields.flag("logprobs"))
    request = make_request(
        options.translated(sampling, PromptSize()),
        limits,
        prompt,
        max_tokens=read_max_tokens(limited, limits, "num_predict"),
        is_stream=is_stream,
        logprobs=logprobs,
        top_logprobs=read_top_logprobs(fields, is_stream=is_stream, logprobs=logprobs),
        deadline=deadline,
    )
    OPTIONS.check(options)
    return replace(request, grammar=_read_format(fields))


def _read_format(fields: Fields) -> Grammar | None:
    form = fields.get("format")
    if form is None or form == "":
        return None
    if form == "json":
        return Grammar(GrammarKind.JSON_OBJECT, "")
    if not isinstance(form, dict):
        fields.refuse("format", 'format is neither "json" nor a JSON schema', got=shown(form))
        return None
    schema = {"format": {"type": "json_schema", "schema": form}}
    return read_response_format(fields.translated(schema, PromptSize()), "format")


def read_thinking(fields: Fields) -> dict[str, Any]:
    """Return the template options for ``think``: a boolean or an effort; none leave it to the template."""
    think = fields.get("think")
    if think is None:
        return {}
    if isinstance(think, bool):
        return {"enable_thinking": think}
    effort = fields.choice("think", ("low", "medium", "high"), "think is neither a boolean nor low, medium or high")
    return {} if effort is None else {"enable_thinking": True, "reasoning_effort": effort}


def image_parts(fields: Fields) -> list[dict[str, Any]]:
    """Return images, which are files in base64, as parts of a chat's content."""
    images = fields.items("images") or []
    for at, each in enumerate(images):
        if not isinstance(each, str):
            fields.refuse(f"images[{at}]", f"{fields.path('images')}[{at}] is not a string", got=shown(each))
    files = [each for each in images if isinstance(each, str)]
    return [
        {"type": "image_url", "image_url": {"url": f"data:image/{_image_type(each)};base64,{each}"}} for each in files
    ]


def images_of(prompt: PromptSize) -> tuple[Image, ...]:
    """Return the images of a prompt with their paths in Ollama's body."""
    return tuple(each._replace(field=_IMAGE_PATH.sub(r"images\1", each.field)) for each in prompt.images)


_IMAGE_PATH: Final = re.compile(r"content(\[\d+\])\.image_url\.url$")
_IMAGE_TYPES: Final[Mapping[str, str]] = {"/9j/": "jpeg", "R0lG": "gif", "UklG": "webp", "Qk": "bmp"}
"""Types of image files, by their first bytes in base64; others are PNG."""


def _image_type(encoded: str) -> str:
    return next((kind for begin, kind in _IMAGE_TYPES.items() if encoded.startswith(begin)), "png")


# ----------------------------------------------------------------------
# Answers
# ----------------------------------------------------------------------


class OllamaAnswer:
    """Documents of one answer: the complete one, or lines as deltas arrive.

    Args:
        body: the request.
        parsed: the parsed request.
        content: creates the fields for a text, its reasoning and its complete tool calls.
        write_error: encodes an error as a line.
    """

    def __init__(
        self,
        body: Body,
        parsed: ParsedRequest,
        content: Callable[[str, str, list[dict[str, Any]]], dict[str, Any]],
        write_error: Callable[[Exception], bytes] | None = None,
    ) -> None:
        self._write_error = write_error
        self._model = body.document["model"]
        self._content = content
        self._has_logprobs = parsed.requests[0].logprobs
        self._top_logprobs = parsed.requests[0].top_logprobs
        self._text = ChoiceText()
        self._began = perf_counter_ns()
        self._first = 0

    def take(self, index: int, piece: GenerationChunk) -> None:
        """Append a delta."""
        del index
        self._first = self._first or perf_counter_ns()
        self._text.take(piece)

    def document(self, usage: Usage) -> Mapping[str, Any]:
        """Return the complete document."""
        text = self._text
        content = self._content("".join(text.text), "".join(text.reasoning), self._take_calls())
        return {**self._head(), **content, **self._logprobs(text.logprobs), **self._end(usage)}

    def begin(self, usage: Usage) -> bytes:
        """Return nothing: an error before the first token has an HTTP status."""
        del usage
        return b""

    def write(self, index: int, piece: GenerationChunk, usage: Usage) -> bytes:
        """Encode a delta; a tool call is complete once the next one or the end comes."""
        del index, usage
        self._first = self._first or perf_counter_ns()
        calls: list[dict[str, Any]] = []
        if piece.calls or piece.finish is not None:
            self._text.take(replace(piece, text="", reasoning="", logprobs=()))
            calls = self._take_calls(None if piece.finish is not None else max(self._text.calls))
        if not (piece.text or piece.reasoning or calls or piece.logprobs):
            return b""
        content = self._content(piece.text, piece.reasoning, calls)
        return encode_line({**self._head(), **content, **self._logprobs(piece.logprobs), "done": False})

    def fail(self, error: Exception) -> bytes:
        """Encode a failure, which ends the stream."""
        return b"" if self._write_error is None else self._write_error(error)

    def end(self, usage: Usage) -> bytes:
        """Encode the last line."""
        return encode_line({**self._head(), **self._content("", "", []), **self._end(usage)})

    def _head(self) -> dict[str, Any]:
        return {"model": self._model, "created_at": now()}

    def _take_calls(self, kept: int | None = None) -> list[dict[str, Any]]:
        """Remove and return the tool calls except ``kept``; a call that was cut off is no call."""
        made = []
        for index in sorted(self._text.calls.keys() - {kept}):
            call = self._text.calls.pop(index)
            arguments = parse_arguments("".join(call["arguments"]))
            if arguments is not None:
                function = {"index": index, "name": call["name"], "arguments": arguments}
                made.append({"id": call["id"], "function": function})
        return made

    def _logprobs(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        if not self._has_logprobs or not tokens:
            return {}
        return {"logprobs": [logprob_document(token, self._top_logprobs) for token in tokens]}

    def _end(self, usage: Usage) -> dict[str, Any]:
        ended = perf_counter_ns()
        first = self._first or ended
        return {
            "done": True,
            "done_reason": Finish.LENGTH.value if self._text.finish is Finish.LENGTH else Finish.STOP.value,
            "total_duration": ended - self._began,
            "load_duration": 0,
            "prompt_eval_count": usage.prompt,
            "prompt_eval_duration": first - self._began,
            "eval_count": usage.completion,
            "eval_duration": ended - first,
        }


def now() -> str:
    """Return the time as Ollama writes it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


# ----------------------------------------------------------------------
# Endpoints
# ----------------------------------------------------------------------


class OllamaEndpoint:
    """Text generation endpoint.

    Args:
        known_fields: fields of bodies.
        prompt_field: field of the prompt.
        no_prompt: empty value of this field.
        read_prompt: parses the prompt of a body.
        content: creates the fields of an answer for a text, its reasoning and its complete tool calls.
    """

    def __init__(
        self,
        known_fields: KnownFields,
        prompt_field: str,
        no_prompt: str | list[Any],
        read_prompt: Callable[[Fields, PromptSize], Conversation | str],
        content: Callable[[str, str, list[dict[str, Any]]], dict[str, Any]],
    ) -> None:
        self.known_fields = known_fields
        self._prompt_field = prompt_field
        self._no_prompt = no_prompt
        self._read_prompt = read_prompt
        self._content = content

    def rules(self, api: OpenAIApi, path: str) -> list[Rule]:
        """Return the routes."""

        async def answer(request: HttpRequest) -> HttpAnswer:
            body = await read_body(api, request, self.known_fields)
            if accepts_raw_requests(api.plane, body.model):
                headers = tuple(line for line in request.headers if line[0] != "content-encoding")
                given = request._replace(body=orjson.dumps(body.document), headers=headers)
                if (answered := await answer_raw_request(api, given, body.model)) is not None:
                    return answered
            if body.document.get(self._prompt_field) in (None, self._no_prompt):
                return await self._answer_loading(api, request, body)
            return await answer_text(api, self, request, body)

        return api.rules(path, "POST", answer, has_tasks=True, prefixes=("/api",))

    def read(
        self, document: Mapping[str, Any], limits: GenerationLimits, *, is_stream: bool, deadline: float
    ) -> ParsedRequest:
        """Parse a body: prompt and options."""
        errors = ErrorList()
        fields = Fields(document, errors)
        prompt = self._read_prompt(fields, PromptSize(limits, self._prompt_field))
        request = _read_request(fields, limits, prompt, is_stream=is_stream, deadline=deadline)
        self.known_fields.check(fields)
        errors.raise_if_any()
        return ParsedRequest((request,))

    def response_builder(self, body: Body, parsed: ParsedRequest) -> OllamaAnswer:
        """Create a builder of the complete answer."""
        return OllamaAnswer(body, parsed, self._content)

    def response_stream(
        self, body: Body, parsed: ParsedRequest, write_error: Callable[[Exception], bytes]
    ) -> OllamaAnswer:
        """Create an encoder of lines."""
        return OllamaAnswer(body, parsed, self._content, write_error)

    async def _answer_loading(self, api: OpenAIApi, request: HttpRequest, body: Body) -> HttpAnswer:
        """Answer a request without a prompt, which loads or unloads a model in Ollama; here models stay loaded."""
        errors = ErrorList()
        self.known_fields.check(Fields(body.document, errors))
        errors.raise_if_any()
        reason = "unload" if body.document.get("keep_alive") in {0, "0", "0s"} else "load"
        with await api.call(request, body.model, Task.TEXT_GENERATION):
            head = {"model": body.document["model"], "created_at": now()}
            return json_response({**head, **self._content("", "", []), "done": True, "done_reason": reason})
