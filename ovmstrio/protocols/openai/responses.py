"""OpenAI endpoint ``/responses`` (Responses API)."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from uuid import uuid4

import orjson

from ovmstrio.core.errors import ErrorList, ServerError
from ovmstrio.core.generation import Conversation, Finish
from ovmstrio.protocols.openai.api import DONE
from ovmstrio.protocols.openai.fields import (
    Fields,
    PromptSize,
    check_ignored_responses_fields,
    content_text,
    make_request,
    read_max_tokens,
    read_response_format,
    read_role,
    read_tools,
    shown,
)
from ovmstrio.protocols.openai.known_fields import RESPONSES
from ovmstrio.protocols.openai.text_endpoint import ParsedRequest, logprob_document

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from ovmstrio.core.generation import GenerationChunk, GenerationLimits, TokenLogprob
    from ovmstrio.protocols.openai.api import Body
    from ovmstrio.protocols.openai.text_endpoint import Usage

# Input items

_IGNORED_ITEMS: Final = frozenset({"reasoning"})
"""Input items that are ignored: earlier reasoning is not sent to the model again."""


def _read_input(fields: Fields) -> tuple[Mapping[str, Any], ...]:
    """Return instructions and input items as messages; tool calls join the preceding assistant message."""
    messages: list[dict[str, Any]] = []
    instructions = fields.prompt_text("instructions")
    if instructions:
        messages.append({"role": "system", "content": instructions})
    given = fields.get("input")
    if given is None:
        fields.refuse("input", "input missing in request", code="missing_required_parameter")
    elif isinstance(given, str):
        messages.append({"role": "user", "content": fields.prompt_text("input")})
    else:
        if given == []:
            fields.refuse("input", "Messages array cannot be empty")
        for item in fields.objects("input", "input is not a string or array", "Input item is not a JSON object"):
            _add_item(messages, item)
    return tuple(messages)


def _add_item(messages: list[dict[str, Any]], item: Fields) -> None:
    kind = item.word("type")
    if kind is None or kind == "message":
        messages.append({"role": read_role(item), "content": content_text(item, "content")})
    elif kind == "function_call":
        _add_tool_call(messages, item)
    elif kind == "function_call_output":
        call_id = item.prompt_text("call_id") or ""
        messages.append({"role": "tool", "tool_call_id": call_id, "content": content_text(item, "output")})
    elif not isinstance(kind, str) or kind not in _IGNORED_ITEMS:
        item.refuse("type", "Unsupported input item type", got=shown(kind))


def _add_tool_call(messages: list[dict[str, Any]], item: Fields) -> None:
    name, arguments = item.prompt_text("name"), item.prompt_text("arguments")
    if not name:
        item.refuse("name", f"{item.path('name')} is missing")
    call = {
        "id": item.prompt_text("call_id") or "",
        "type": "function",
        "function": {"name": name or "", "arguments": arguments or "{}"},
    }
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    messages[-1].setdefault("tool_calls", []).append(call)


# Output items


class _Event(NamedTuple):
    """Event: type without the prefix ``response.``, and data without the sequence number."""

    kind: str
    data: Mapping[str, Any]


class _Item(ABC):
    def __init__(self, prefix: str, place: int) -> None:
        self.id = f"{prefix}_{uuid4().hex}"
        self.place = place
        self.parts: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self.parts)

    @property
    def at(self) -> dict[str, Any]:
        return {"item_id": self.id, "output_index": self.place}

    def begin(self) -> Iterator[_Event]:
        yield _Event("output_item.added", {"output_index": self.place, "item": self.document("in_progress")})
        yield from self.begin_part()

    def end(self, status: str) -> Iterator[_Event]:
        yield from self.end_part()
        yield _Event("output_item.done", {"output_index": self.place, "item": self.document(status)})

    def begin_part(self) -> Iterator[_Event]:
        return iter(())

    @abstractmethod
    def grow(self, text: str) -> _Event:
        """Append text; return the delta event."""

    @abstractmethod
    def end_part(self) -> Iterator[_Event]:
        """Return the events that complete the text."""

    @abstractmethod
    def document(self, status: str) -> Mapping[str, Any]:
        """Return the item's current document."""


class _Reasoning(_Item):
    def __init__(self, place: int) -> None:
        super().__init__("rs", place)

    def _part(self) -> Mapping[str, Any]:
        return {"type": "summary_text", "text": self.text}

    def begin_part(self) -> Iterator[_Event]:
        yield _Event("reasoning_summary_part.added", {**self.at, "summary_index": 0, "part": self._part()})

    def grow(self, text: str) -> _Event:
        self.parts.append(text)
        return _Event("reasoning_summary_text.delta", {**self.at, "summary_index": 0, "delta": text})

    def end_part(self) -> Iterator[_Event]:
        yield _Event("reasoning_summary_text.done", {**self.at, "summary_index": 0, "text": self.text})
        yield _Event("reasoning_summary_part.done", {**self.at, "summary_index": 0, "part": self._part()})

    def document(self, status: str) -> Mapping[str, Any]:
        return {"id": self.id, "type": "reasoning", "status": status, "summary": [self._part()] if self.parts else []}


class _Message(_Item):
    def __init__(self, place: int) -> None:
        super().__init__("msg", place)
        self.logprobs: list[Mapping[str, Any]] = []
        self._is_started = False

    def _part(self) -> Mapping[str, Any]:
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": self.logprobs}

    def begin_part(self) -> Iterator[_Event]:
        self._is_started = True
        yield _Event("content_part.added", {**self.at, "content_index": 0, "part": self._part()})

    def grow(self, text: str, logprobs: Sequence[TokenLogprob] = ()) -> _Event:
        self.parts.append(text)
        added = [logprob_document(token) for token in logprobs]
        self.logprobs += added
        return _Event("output_text.delta", {**self.at, "content_index": 0, "delta": text, "logprobs": added})

    def end_part(self) -> Iterator[_Event]:
        yield _Event("output_text.done", {**self.at, "content_index": 0, "text": self.text, "logprobs": self.logprobs})
        yield _Event("content_part.done", {**self.at, "content_index": 0, "part": self._part()})

    def document(self, status: str) -> Mapping[str, Any]:
        content = [self._part()] if self._is_started else []
        return {"id": self.id, "type": "message", "status": status, "role": "assistant", "content": content}


class _ToolCall(_Item):
    def __init__(self, place: int, index: int, call_id: str, name: str) -> None:
        super().__init__("fc", place)
        self.index = index
        self._call_id = call_id or f"call_{uuid4().hex}"
        self._name = name

    def grow(self, text: str) -> _Event:
        self.parts.append(text)
        return _Event("function_call_arguments.delta", {**self.at, "delta": text})

    def end_part(self) -> Iterator[_Event]:
        yield _Event("function_call_arguments.done", {**self.at, "name": self._name, "arguments": self.text})

    def document(self, status: str) -> Mapping[str, Any]:
        return {
            "id": self.id,
            "type": "function_call",
            "status": status,
            "call_id": self._call_id,
            "name": self._name,
            "arguments": self.text,
        }


class _OutputItems:
    """Output items of a response; at most the last one is open."""

    def __init__(self) -> None:
        self._ended: list[Mapping[str, Any]] = []
        self._open: _Item | None = None

    def documents(self, status: str = "in_progress") -> list[Mapping[str, Any]]:
        """Return all documents; ``status`` applies to an open last item."""
        return [*self._ended, *([] if self._open is None else [self._open.document(status)])]

    def take(self, piece: GenerationChunk) -> Iterator[_Event]:
        """Append a delta and yield its events."""
        if piece.reasoning:
            if not isinstance(self._open, _Reasoning):
                yield from self._open_item(_Reasoning(self._next_place))
            yield self._delta(piece.reasoning)
        if piece.text or (piece.logprobs and not piece.calls and not piece.reasoning):
            if not isinstance(self._open, _Message):
                yield from self._open_item(_Message(self._next_place))
            message = self._open
            assert isinstance(message, _Message)  # noqa: S101 - opened above
            yield message.grow(piece.text, piece.logprobs)
        for delta in piece.calls:
            if not isinstance(self._open, _ToolCall) or self._open.index != delta.index:
                yield from self._open_item(_ToolCall(self._next_place, delta.index, delta.id, delta.name))
            if delta.arguments:
                yield self._delta(delta.arguments)

    def end(self, status: str) -> Iterator[_Event]:
        """Close the last item and yield its events; an empty response has an empty message."""
        if self._open is None and not self._ended:
            yield from self._open_item(_Message(0))
        yield from self._close_item(status)

    @property
    def _next_place(self) -> int:
        return len(self._ended) + (self._open is not None)

    def _delta(self, text: str) -> _Event:
        assert self._open is not None  # noqa: S101 - opened by the caller
        return self._open.grow(text)

    def _open_item(self, item: _Item) -> Iterator[_Event]:
        yield from self._close_item("completed")
        self._open = item
        yield from item.begin()

    def _close_item(self, status: str) -> Iterator[_Event]:
        item, self._open = self._open, None
        if item is not None:
            yield from item.end(status)
            self._ended.append(item.document(status))


# Responses


class _Response:
    def __init__(self, model: str, document: Mapping[str, Any], parsed: ParsedRequest) -> None:
        request = parsed.requests[0]
        prompt: Conversation = request.prompt  # type: ignore[assignment]  # the endpoint makes no other
        self._head = {
            "id": f"resp_{uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "instructions": document.get("instructions"),
            "max_output_tokens": request.sampling.max_tokens,
            "metadata": document.get("metadata") or {},
            "parallel_tool_calls": document.get("parallel_tool_calls", True),
            "previous_response_id": None,
            "reasoning": document.get("reasoning") or {"effort": None, "summary": None},
            "store": False,
            "temperature": request.sampling.temperature,
            "text": document.get("text") or {"format": {"type": "text"}},
            "tool_choice": _choice(prompt),
            "tools": [_tool(tool) for tool in prompt.tools],
            "top_p": request.sampling.top_p,
            "truncation": "disabled",
            "background": False,
        }

    def document(
        self, status: str, items: Iterable[Mapping[str, Any]], usage: Usage | None, error: Exception | None = None
    ) -> dict[str, Any]:
        return {
            **self._head,
            "status": status,
            "error": None if error is None else _error(error),
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": list(items),
            "usage": None if usage is None else _usage(usage),
        }


class _ResponseBuilder:
    def __init__(self, model: str, document: Mapping[str, Any], parsed: ParsedRequest) -> None:
        self._response = _Response(model, document, parsed)
        self._items = _OutputItems()
        self._status = "completed"

    def take(self, index: int, piece: GenerationChunk) -> None:
        del index
        for _ in self._items.take(piece):
            pass
        self._status = _status(piece, self._status)

    def document(self, usage: Usage) -> Mapping[str, Any]:
        for _ in self._items.end(self._status):
            pass
        return self._response.document(self._status, self._items.documents(), usage)


class _ResponseStream:
    def __init__(self, model: str, document: Mapping[str, Any], parsed: ParsedRequest) -> None:
        self._response = _Response(model, document, parsed)
        self._items = _OutputItems()
        self._status = "completed"
        self._number = 0

    def begin(self, usage: Usage) -> bytes:
        del usage
        document = {"response": self._response.document("in_progress", (), None)}
        return self._encode((_Event("created", document), _Event("in_progress", document)))

    def write(self, index: int, piece: GenerationChunk, usage: Usage) -> bytes:
        del index, usage
        self._status = _status(piece, self._status)
        return self._encode(self._items.take(piece))

    def end(self, usage: Usage) -> bytes:
        ended = self._encode(self._items.end(self._status))
        document = self._response.document(self._status, self._items.documents(), usage)
        return ended + self._encode((_Event(self._status, {"response": document}),)) + DONE

    def fail(self, error: Exception) -> bytes:
        document = self._response.document("failed", self._items.documents("incomplete"), None, error)
        return self._encode((_Event("failed", {"response": document}),)) + DONE

    def _encode(self, events: Iterable[_Event]) -> bytes:
        written = []
        for kind, data in events:
            document = {"type": f"response.{kind}", "sequence_number": self._number, **data}
            self._number += 1
            written.append(b"event: response.%b\ndata: %b\n\n" % (kind.encode(), orjson.dumps(document)))
        return b"".join(written)


def _status(piece: GenerationChunk, status: str) -> str:
    return "incomplete" if piece.finish is Finish.LENGTH else status


def _usage(usage: Usage) -> Mapping[str, Any]:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached},
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.prompt + usage.completion,
    }


def _error(error: Exception) -> Mapping[str, Any]:
    message = error.message if isinstance(error, ServerError) else "internal error; the server's log has the details"
    return {"code": "server_error", "message": message}


def _choice(prompt: Conversation) -> Any:
    return {"type": "function", "name": prompt.tool_name} if prompt.tool_name else prompt.tool_choice


def _tool(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"type": "function", "description": None, "strict": False, **tool["function"]}


# Endpoint

_LOGPROBS: Final = "message.output_text.logprobs"


class Responses:
    """Endpoint."""

    known_fields = RESPONSES

    def read(
        self, document: Mapping[str, Any], limits: GenerationLimits, *, is_stream: bool, deadline: float
    ) -> ParsedRequest:
        """Parse a body: instructions, input, tools and sampling parameters."""
        errors = ErrorList()
        fields = Fields(document, errors, prompt=PromptSize(limits, "input"))
        max_tokens = read_max_tokens(fields, limits, "max_output_tokens")
        messages = _read_input(fields)
        tools = read_tools(fields)
        once = fields.flag("parallel_tool_calls") is False
        text = fields.within("text")
        options = _read_template_options(fields, text)
        prompt = Conversation(
            messages,
            tools.tools,
            tools.choice,
            tools.name,
            options,
            returns_first_call_only=once,
            parameters_fields=tools.parameters_fields,
            images=tuple(fields.prompt.images),
        )
        request = make_request(
            fields,
            limits,
            prompt,
            max_tokens=max_tokens,
            is_stream=is_stream,
            logprobs=_LOGPROBS in (fields.items("include") or ()),
            grammar=None if text is None else read_response_format(text, "format"),
            prompt_field="input",
            deadline=deadline,
        )
        if request.n > 1:
            fields.refuse("n", "n greater than 1 is not supported for Responses API", got=str(request.n))
        RESPONSES.check(fields)
        check_ignored_responses_fields(fields)
        # The response repeats this object, so check its size.
        fields.mapping("text")
        errors.tell()
        return ParsedRequest((request,))

    def whole(self, body: Body, parsed: ParsedRequest) -> _ResponseBuilder:
        """Create a response builder."""
        return _ResponseBuilder(body.model, body.document, parsed)

    def streamed(self, body: Body, parsed: ParsedRequest, write_error: Callable[[Exception], bytes]) -> _ResponseStream:
        """Create an event writer, which encodes failures itself."""
        del write_error
        return _ResponseStream(body.model, body.document, parsed)


def _read_template_options(fields: Fields, text: Fields | None) -> Mapping[str, Any]:
    """Return chat template variables; any reasoning effort except ``none`` enables thinking."""
    verbosity = None if text is None else text.name_text("verbosity")
    options = fields.mapping("chat_template_kwargs", "chat_template_kwargs must be an object", is_prompt=True) or {}
    if verbosity is not None:
        options = {"verbosity": verbosity, **options}
    reasoning = fields.within("reasoning")
    if reasoning is None:
        return options
    fields.mapping("reasoning")
    effort = reasoning.name_text("effort")
    if effort is None:
        return options
    return {"enable_thinking": effort != "none", "reasoning_effort": effort, **options}
