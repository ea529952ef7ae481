"""OpenAI endpoint ``/responses`` (Responses API)."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol
from uuid import uuid4

import orjson

from ovmstrio.core.errors import ErrorList, ServerError
from ovmstrio.core.generation import Conversation, Finish
from ovmstrio.protocols.openai.api import DONE
from ovmstrio.protocols.openai.fields import (
    NO_TOOLS,
    Fields,
    PromptSize,
    Tools,
    check_ignored_responses_fields,
    content_text,
    make_request,
    read_max_tokens,
    read_response_format,
    read_role,
    read_tool_list,
    read_tools,
    read_top_logprobs,
)
from ovmstrio.protocols.openai.known_fields import RESPONSES
from ovmstrio.protocols.openai.response_tools import (
    ADDITIONAL_TOOLS,
    CUSTOM_CALL,
    FUNCTION_CALL,
    SHELL_CALL,
    ClientTools,
    MessageList,
    custom_input,
    read_agent_tool,
)
from ovmstrio.protocols.openai.text_endpoint import ParsedRequest, logprob_document

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from ovmstrio.core.generation import GenerationChunk, GenerationLimits, TokenLogprob, ToolCallDelta
    from ovmstrio.protocols.openai.api import Body
    from ovmstrio.protocols.openai.response_tools import ClientTool
    from ovmstrio.protocols.openai.text_endpoint import Usage

RESPONSE_PREFIX: Final = "resp_"

# Input items


class _Input(NamedTuple):
    """Messages, and the tools of input items."""

    messages: tuple[Mapping[str, Any], ...]
    tools: Tools


def _read_input(fields: Fields) -> _Input:
    """Return instructions and input items as messages; tool calls join the preceding assistant message."""
    tools = NO_TOOLS
    conversation = MessageList()
    instructions = fields.prompt_text("instructions")
    system = [instructions] if instructions else []
    given = fields.get("input")
    if given is None:
        fields.refuse("input", "input missing in request", code="missing_required_parameter")
    elif isinstance(given, str):
        conversation.add({"role": "user", "content": fields.prompt_text("input")})
    else:
        if given == []:
            fields.refuse("input", "Messages array cannot be empty")
        for item in fields.objects("input", "input is not a string or array", "Input item is not a JSON object"):
            kind = item.word("type")
            if kind == ADDITIONAL_TOOLS:
                further = read_tool_list(item, read_agent_tool)
                fields_so_far = tools.parameters_fields + further.parameters_fields
                tools = Tools(tools.tools + further.tools, parameters_fields=fields_so_far)
            elif kind is None or kind == "message":
                message = {"role": read_role(item), "content": content_text(item, "content")}
                if system and message["role"] == "system" and not conversation.messages:
                    system.append(message["content"])
                else:
                    conversation.add(message)
            else:
                conversation.add_item(kind, item)
    # Many chat templates refuse or drop a second system message.
    first = [{"role": "system", "content": "\n\n".join(system)}] if system else []
    return _Input((*first, *conversation.messages), tools)


# Output items


def item_id(prefix: str, response: str, number: int) -> str:
    """Return the id of an item, which has the digits of the response's id and the item's number in the response."""
    return f"{prefix}_{response.removeprefix(RESPONSE_PREFIX)}{number:04x}"


class _Event(NamedTuple):
    """Event: type without the prefix ``response.``, and data without the sequence number."""

    kind: str
    data: Mapping[str, Any]


class _Item(ABC):
    def __init__(self, prefix: str, response: str, place: int) -> None:
        self.id = item_id(prefix, response, place)
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
    def grow(self, text: str) -> Iterator[_Event]:
        """Append text; yield the delta event."""

    @abstractmethod
    def end_part(self) -> Iterator[_Event]:
        """Return the events that complete the text."""

    @abstractmethod
    def document(self, status: str) -> Mapping[str, Any]:
        """Return the item's current document."""


class _Reasoning(_Item):
    def __init__(self, response: str, place: int) -> None:
        super().__init__("rs", response, place)

    def _part(self) -> Mapping[str, Any]:
        return {"type": "summary_text", "text": self.text}

    def begin_part(self) -> Iterator[_Event]:
        yield _Event("reasoning_summary_part.added", {**self.at, "summary_index": 0, "part": self._part()})

    def grow(self, text: str) -> Iterator[_Event]:
        self.parts.append(text)
        yield _Event("reasoning_summary_text.delta", {**self.at, "summary_index": 0, "delta": text})

    def end_part(self) -> Iterator[_Event]:
        yield _Event("reasoning_summary_text.done", {**self.at, "summary_index": 0, "text": self.text})
        yield _Event("reasoning_summary_part.done", {**self.at, "summary_index": 0, "part": self._part()})

    def document(self, status: str) -> Mapping[str, Any]:
        return {"id": self.id, "type": "reasoning", "status": status, "summary": [self._part()] if self.parts else []}


class _Message(_Item):
    def __init__(self, response: str, place: int, top_logprobs: int) -> None:
        super().__init__("msg", response, place)
        self._top_logprobs = top_logprobs
        self.logprobs: list[Mapping[str, Any]] = []
        self._is_started = False

    def _part(self) -> Mapping[str, Any]:
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": self.logprobs}

    def begin_part(self) -> Iterator[_Event]:
        self._is_started = True
        yield _Event("content_part.added", {**self.at, "content_index": 0, "part": self._part()})

    def grow(self, text: str, logprobs: Sequence[TokenLogprob] = ()) -> Iterator[_Event]:
        self.parts.append(text)
        added = [logprob_document(token, self._top_logprobs) for token in logprobs]
        self.logprobs += added
        yield _Event("output_text.delta", {**self.at, "content_index": 0, "delta": text, "logprobs": added})

    def end_part(self) -> Iterator[_Event]:
        yield _Event("output_text.done", {**self.at, "content_index": 0, "text": self.text, "logprobs": self.logprobs})
        yield _Event("content_part.done", {**self.at, "content_index": 0, "part": self._part()})

    def document(self, status: str) -> Mapping[str, Any]:
        content = [self._part()] if self._is_started else []
        return {"id": self.id, "type": "message", "status": status, "role": "assistant", "content": content}


class _ToolCall(_Item):
    """Call of a tool, in the form of its client; only the arguments of functions are streamed as they arrive."""

    def __init__(self, response: str, place: int, delta: ToolCallDelta, tool: ClientTool) -> None:
        super().__init__(tool.form.prefix, response, place)
        self.index = delta.index
        self._call_id = delta.id or f"call_{uuid4().hex}"
        self._tool = tool

    def grow(self, text: str) -> Iterator[_Event]:
        self.parts.append(text)
        if self._tool.form is FUNCTION_CALL:
            yield _Event("function_call_arguments.delta", {**self.at, "delta": text})

    def end_part(self) -> Iterator[_Event]:
        form = self._tool.form
        if form is FUNCTION_CALL:
            names = {"name": self._tool.names["name"], "arguments": self.text}
            yield _Event("function_call_arguments.done", {**self.at, **names})
        elif form is CUSTOM_CALL:
            given = custom_input(self.text)
            yield _Event("custom_tool_call_input.delta", {**self.at, "delta": given})
            yield _Event("custom_tool_call_input.done", {**self.at, "input": given})
        elif form is SHELL_CALL:
            for number, command in enumerate(form.fields(self.text)["action"]["commands"]):
                at = {"output_index": self.place, "command_index": number}
                yield _Event("shell_call_command.added", {**at, "command": command})
                yield _Event("shell_call_command.done", {**at, "command": command})

    def document(self, status: str) -> Mapping[str, Any]:
        form, names = self._tool.form, self._tool.names
        head = {"id": self.id, "type": form.type, "status": status, "call_id": self._call_id}
        return {**head, **names, **form.fields(self.text)}


class _OutputItems:
    """Output items of a response; at most the last one is open."""

    def __init__(self, response: str, tools: ClientTools, top_logprobs: int) -> None:
        self._response = response
        self._tools = tools
        self._top_logprobs = top_logprobs
        self._ended: list[Mapping[str, Any]] = []
        self._open: _Item | None = None
        self._early_logprobs: Sequence[TokenLogprob] = ()  # of tokens before the first item

    def documents(self, status: str = "in_progress") -> list[Mapping[str, Any]]:
        """Return all documents; ``status`` applies to an open last item."""
        return [*self._ended, *([] if self._open is None else [self._open.document(status)])]

    def take(self, piece: GenerationChunk) -> Iterator[_Event]:
        """Append a delta and yield its events."""
        if piece.reasoning:
            if not isinstance(self._open, _Reasoning):
                yield from self._open_item(_Reasoning(self._response, self._next_place))
            yield from self._delta(piece.reasoning)
        logprobs = (*self._early_logprobs, *piece.logprobs)
        if piece.text and not isinstance(self._open, _Message):
            yield from self._open_item(_Message(self._response, self._next_place, self._top_logprobs))
        if isinstance(self._open, _Message) and not piece.calls and (piece.text or piece.logprobs):
            yield from self._open.grow(piece.text, logprobs)
            logprobs = ()
        # Tokens without text are the beginning of a message, or markers of reasoning and calls, which have none.
        self._early_logprobs = logprobs if self._open is None else ()
        for delta in piece.calls:
            if not isinstance(self._open, _ToolCall) or self._open.index != delta.index:
                tool = self._tools.find(delta.name)
                yield from self._open_item(_ToolCall(self._response, self._next_place, delta, tool))
            if delta.arguments:
                yield from self._delta(delta.arguments)

    def end(self, status: str) -> Iterator[_Event]:
        """Close the last item and yield its events; an empty response has an empty message."""
        if self._open is None and not self._ended:
            message = _Message(self._response, 0, self._top_logprobs)
            yield from self._open_item(message)
            if self._early_logprobs:
                yield from message.grow("", self._early_logprobs)
        yield from self._close_item(status)

    @property
    def _next_place(self) -> int:
        return len(self._ended) + (self._open is not None)

    def _delta(self, text: str) -> Iterator[_Event]:
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


class ResponseSlot(Protocol):
    """Place of a response in the store."""

    @property
    def head(self) -> Mapping[str, Any]:
        """Fields of the response: its id, the previous response, and whether it is stored and in the background."""

    def save(self, document: Mapping[str, Any]) -> None:
        """Store the final document."""


_NOT_STORED: Final = {"previous_response_id": None, "store": False, "background": False}


class _Response:
    def __init__(
        self, model: str, document: Mapping[str, Any], parsed: ParsedRequest, slot: ResponseSlot | None
    ) -> None:
        request = parsed.requests[0]
        prompt: Conversation = request.prompt  # type: ignore[assignment]  # the endpoint makes no other
        tools = ClientTools(document)
        unstored: Mapping[str, Any] = {**_NOT_STORED, "id": f"{RESPONSE_PREFIX}{uuid4().hex}"}
        stored = unstored if slot is None else slot.head
        self.items = _OutputItems(stored["id"], tools, request.top_logprobs)
        self.status = "completed"
        self._slot = slot
        self._head = {
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "instructions": document.get("instructions"),
            "max_output_tokens": request.sampling.max_tokens,
            "max_tool_calls": document.get("max_tool_calls"),
            "metadata": document.get("metadata") or {},
            "parallel_tool_calls": document.get("parallel_tool_calls", True),
            "reasoning": document.get("reasoning") or {"effort": None, "summary": None},
            "temperature": request.sampling.temperature,
            "text": document.get("text") or {"format": {"type": "text"}},
            "tool_choice": _choice(prompt, tools),
            "tools": tools.documents,
            "top_p": request.sampling.top_p,
            "truncation": "disabled",
            **stored,
        }

    def take(self, piece: GenerationChunk) -> Iterator[_Event]:
        """Add a delta and yield its events."""
        if piece.finish is Finish.LENGTH:
            self.status = "incomplete"
        yield from self.items.take(piece)

    def document(
        self, status: str, usage: Usage | None = None, error: Exception | None = None, item_status: str = "in_progress"
    ) -> dict[str, Any]:
        """Return the document; ``item_status`` applies to an open last item."""
        return {
            **self._head,
            "status": status,
            "error": None if error is None else _error(error),
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": self.items.documents(item_status),
            "usage": None if usage is None else _usage(usage),
        }

    def final(self, status: str, usage: Usage | None = None, error: Exception | None = None) -> Mapping[str, Any]:
        """Return the final document, and store it."""
        document = self.document(status, usage, error, "incomplete")
        if self._slot is not None:
            self._slot.save(document)
        return document


class _ResponseBuilder:
    def __init__(self, response: _Response) -> None:
        self._response = response

    def take(self, index: int, piece: GenerationChunk) -> None:
        del index
        for _ in self._response.take(piece):
            pass

    def document(self, usage: Usage) -> Mapping[str, Any]:
        for _ in self._response.items.end(self._response.status):
            pass
        return self._response.final(self._response.status, usage)


class ResponseStream:
    """Encoder of a response's events."""

    def __init__(self, response: _Response) -> None:
        self._response = response
        self._status = "queued"
        self._number = 0

    @property
    def document(self) -> Mapping[str, Any]:
        """The document of the response so far."""
        return self._response.document(self._status)

    def queued(self) -> bytes:
        """Encode the first events of a response that runs in the background."""
        document = {"response": self.document}
        return self._encode((_Event("created", document), _Event("queued", document)))

    def begin(self, usage: Usage) -> bytes:
        """Encode the first events, or the next ones of a queued response."""
        del usage
        self._status = "in_progress"
        document = {"response": self.document}
        created = () if self._number else (_Event("created", document),)
        return self._encode((*created, _Event("in_progress", document)))

    def write(self, index: int, piece: GenerationChunk, usage: Usage) -> bytes:
        """Encode a delta."""
        del index, usage
        return self._encode(self._response.take(piece))

    def end(self, usage: Usage) -> bytes:
        """Encode the last events."""
        status = self._response.status
        ended = self._encode(self._response.items.end(status))
        return ended + self._encode((_Event(status, {"response": self._response.final(status, usage)}),)) + DONE

    def fail(self, error: Exception) -> bytes:
        """Encode a failure, which ends the events."""
        return self._encode((_Event("failed", {"response": self._response.final("failed", error=error)}),)) + DONE

    def cancel(self) -> None:
        """Store the response as cancelled."""
        self._response.final("cancelled")

    def _encode(self, events: Iterable[_Event]) -> bytes:
        written = []
        for kind, data in events:
            document = {"type": f"response.{kind}", "sequence_number": self._number, **data}
            self._number += 1
            written.append(b"event: response.%b\ndata: %b\n\n" % (kind.encode(), orjson.dumps(document)))
        return b"".join(written)


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


def _choice(prompt: Conversation, tools: ClientTools) -> Any:
    if not prompt.tool_name:
        return prompt.tool_choice
    form, names = tools.find(prompt.tool_name)
    if form is FUNCTION_CALL or form is CUSTOM_CALL:
        return {"type": "custom" if form is CUSTOM_CALL else "function", **names}
    return {"type": prompt.tool_name}


# Endpoint

_LOGPROBS: Final = "message.output_text.logprobs"


class Responses:
    """Endpoint; ``slot`` stores the response of one request.

    Attributes:
        stream: event writer of the request, once its body is parsed.
    """

    known_fields = RESPONSES

    def __init__(self, slot: ResponseSlot | None = None) -> None:
        self._slot = slot
        self.stream: ResponseStream | None = None

    def read(
        self, document: Mapping[str, Any], limits: GenerationLimits, *, is_stream: bool, deadline: float
    ) -> ParsedRequest:
        """Parse a body: instructions, input, tools and sampling parameters."""
        errors = ErrorList()
        fields = Fields(document, errors, prompt=PromptSize(limits, "input"))
        max_tokens = read_max_tokens(fields, limits, "max_output_tokens")
        given = _read_input(fields)
        tools = read_tools(fields, read_agent_tool, given.tools)
        once = fields.flag("parallel_tool_calls") is False
        text = fields.within("text")
        options = _read_template_options(fields, text)
        prompt = Conversation(
            given.messages,
            tools.tools,
            tools.choice,
            tools.name,
            options,
            returns_first_call_only=once,
            parameters_fields=tools.parameters_fields,
            images=tuple(fields.prompt.images),
        )
        logprobs = _LOGPROBS in (fields.items("include") or ())
        request = make_request(
            fields,
            limits,
            prompt,
            max_tokens=max_tokens,
            is_stream=is_stream,
            logprobs=logprobs,
            top_logprobs=read_top_logprobs(
                fields, is_stream=is_stream, logprobs=logprobs, requirement=f"{_LOGPROBS} in include"
            ),
            grammar=None if text is None else read_response_format(text, "format"),
            prompt_field="input",
            deadline=deadline,
        )
        if request.n > 1:
            fields.refuse("n", "n greater than 1 is not supported for Responses API", got=str(request.n))
        RESPONSES.check(fields)
        if self._slot is None:
            for name in ("store", "background", "previous_response_id"):
                if fields.get(name):
                    message = f"{name} is not supported: responses of graphs are not stored"
                    fields.refuse(name, message, code="unsupported_parameter")
        check_ignored_responses_fields(fields)
        # The response repeats this object, so check its size.
        fields.mapping("text")
        errors.raise_if_any()
        return ParsedRequest((request,))

    def response_builder(self, body: Body, parsed: ParsedRequest) -> _ResponseBuilder:
        """Create a response builder."""
        return _ResponseBuilder(_Response(body.model, body.document, parsed, self._slot))

    def response_stream(
        self, body: Body, parsed: ParsedRequest, write_error: Callable[[Exception], bytes]
    ) -> ResponseStream:
        """Create an event writer, which encodes failures itself."""
        del write_error
        self.stream = ResponseStream(_Response(body.model, body.document, parsed, self._slot))
        return self.stream


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
