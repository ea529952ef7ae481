"""``/responses``: an answer to a conversation, of items."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from uuid import uuid4

import orjson

from ovmstrio.core.errors import Gathered, ServerError
from ovmstrio.core.generation import Conversation, Finish
from ovmstrio.protocols.openai.deltas import DONE
from ovmstrio.protocols.openai.fields import Fields, PromptSize, check_passed_over_of_responses, shown
from ovmstrio.protocols.openai.request_fields import (
    flattened,
    make_request,
    read_max_tokens,
    read_response_format,
    read_tools,
    role_of,
)
from ovmstrio.protocols.openai.text_endpoint import Asked, text_rules

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from ovmstrio.core.generation import GenerationLimits, Piece, TokenLogprob
    from ovmstrio.protocols.openai.api import Body, OpenAIApi
    from ovmstrio.protocols.openai.text_endpoint import Usage
    from ovmstrio.transport.http.router import Rule

__all__ = ["Event", "OutputItems", "ResponseEvents", "Responses", "WholeResponse", "read_input", "response_rules"]

# ----------------------------------------------------------------------
# Items of a body's input as the messages of a conversation
# ----------------------------------------------------------------------

_PASSED_OVER: Final = frozenset({"reasoning"})
"""What a model has thought is not said to it again."""


def read_input(fields: Fields) -> tuple[Mapping[str, Any], ...]:
    """Read instructions and input as messages; a call of a tool belongs to the assistant's message before it."""
    messages: list[dict[str, Any]] = []
    instructions = fields.prompt_text("instructions")
    if instructions:
        messages.append({"role": "system", "content": instructions})
    given = fields.get("input")
    if given is None:
        fields.refuse("input", "input missing in request", code="missing_required_parameter")
    elif isinstance(given, str):
        fields.prompt.add(len(given))
        messages.append({"role": "user", "content": given})
    else:
        if given == []:
            fields.refuse("input", "Messages array cannot be empty")
        told = "input is not a string or array"
        for item in fields.objects("input", told, "Input item is not a JSON object"):
            _add_item(messages, item)
    return tuple(messages)


def _add_item(messages: list[dict[str, Any]], item: Fields) -> None:
    kind = item.word("type")
    if kind is None or kind == "message":
        messages.append({"role": role_of(item), "content": flattened(item, "content")})
    elif kind == "function_call":
        _add_call(messages, item)
    elif kind == "function_call_output":
        called = item.prompt_text("call_id") or ""
        messages.append({"role": "tool", "tool_call_id": called, "content": flattened(item, "output")})
    elif not isinstance(kind, str) or kind not in _PASSED_OVER:
        item.refuse("type", "Unsupported input item type", got=shown(kind))


def _add_call(messages: list[dict[str, Any]], item: Fields) -> None:
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


# ----------------------------------------------------------------------
# Items of an answer, which grow piece by piece, and the events that tell how
# ----------------------------------------------------------------------


class Event(NamedTuple):
    """One event: its type behind ``response.``, and what it has beside the number of its place."""

    kind: str
    data: Mapping[str, Any]


class _Item(ABC):
    """An item that is being written."""

    def __init__(self, prefix: str, place: int) -> None:
        self.id = f"{prefix}_{uuid4().hex}"
        self.place = place
        self.parts: list[str] = []

    @property
    def text(self) -> str:
        """All that has come of it."""
        return "".join(self.parts)

    @property
    def at(self) -> dict[str, Any]:
        """Say which item an event is about."""
        return {"item_id": self.id, "output_index": self.place}

    def begin(self) -> Iterator[Event]:
        """Tell that it is there."""
        yield Event("output_item.added", {"output_index": self.place, "item": self.document("in_progress")})
        yield from self.begin_part()

    def end(self, status: str) -> Iterator[Event]:
        """Tell that it is whole."""
        yield from self.end_part()
        yield Event("output_item.done", {"output_index": self.place, "item": self.document(status)})

    def begin_part(self) -> Iterator[Event]:
        """Tell that its text begins."""
        return iter(())

    @abstractmethod
    def grow(self, text: str) -> Event:
        """Tell more of its text."""

    @abstractmethod
    def end_part(self) -> Iterator[Event]:
        """Tell that its text is whole."""

    @abstractmethod
    def document(self, status: str) -> Mapping[str, Any]:
        """Give it as it is now."""


class _Reasoning(_Item):
    """What a model thinks before it answers."""

    def __init__(self, place: int) -> None:
        super().__init__("rs", place)

    @property
    def _in_summary(self) -> dict[str, Any]:
        return {**self.at, "summary_index": 0}

    def _part(self) -> Mapping[str, Any]:
        return {"type": "summary_text", "text": self.text}

    def begin_part(self) -> Iterator[Event]:
        yield Event("reasoning_summary_part.added", {**self._in_summary, "part": self._part()})

    def grow(self, text: str) -> Event:
        self.parts.append(text)
        return Event("reasoning_summary_text.delta", {**self._in_summary, "delta": text})

    def end_part(self) -> Iterator[Event]:
        yield Event("reasoning_summary_text.done", {**self._in_summary, "text": self.text})
        yield Event("reasoning_summary_part.done", {**self._in_summary, "part": self._part()})

    def document(self, status: str) -> Mapping[str, Any]:
        return {
            "id": self.id,
            "type": "reasoning",
            "status": status,
            "summary": [self._part()] if self.parts else [],
        }


class _Message(_Item):
    """What a model says."""

    def __init__(self, place: int) -> None:
        super().__init__("msg", place)
        self.logprobs: list[Mapping[str, Any]] = []
        self._has_begun = False

    @property
    def _in_content(self) -> dict[str, Any]:
        return {**self.at, "content_index": 0}

    def _part(self) -> Mapping[str, Any]:
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": self.logprobs}

    def begin_part(self) -> Iterator[Event]:
        self._has_begun = True
        yield Event("content_part.added", {**self._in_content, "part": self._part()})

    def grow(self, text: str, logprobs: Sequence[TokenLogprob] = ()) -> Event:
        self.parts.append(text)
        told = [_logprob(token) for token in logprobs]
        self.logprobs += told
        return Event("output_text.delta", {**self._in_content, "delta": text, "logprobs": told})

    def end_part(self) -> Iterator[Event]:
        yield Event("output_text.done", {**self._in_content, "text": self.text, "logprobs": self.logprobs})
        yield Event("content_part.done", {**self._in_content, "part": self._part()})

    def document(self, status: str) -> Mapping[str, Any]:
        content = [self._part()] if self._has_begun else []
        return {"id": self.id, "type": "message", "status": status, "role": "assistant", "content": content}


class _Call(_Item):
    """A call of a tool."""

    def __init__(self, place: int, index: int, call_id: str, name: str) -> None:
        super().__init__("fc", place)
        self.index = index
        self._call_id = call_id or f"call_{uuid4().hex}"
        self._name = name

    def grow(self, text: str) -> Event:
        self.parts.append(text)
        return Event("function_call_arguments.delta", {**self.at, "delta": text})

    def end_part(self) -> Iterator[Event]:
        yield Event("function_call_arguments.done", {**self.at, "name": self._name, "arguments": self.text})

    def document(self, status: str) -> Mapping[str, Any]:
        return {
            "id": self.id,
            "type": "function_call",
            "status": status,
            "call_id": self._call_id,
            "name": self._name,
            "arguments": self.text,
        }


class OutputItems:
    """The items of one answer, of which at most the last one is open."""

    def __init__(self) -> None:
        self._ended: list[Mapping[str, Any]] = []
        self._open: _Item | None = None

    def documents(self, status: str = "in_progress") -> list[Mapping[str, Any]]:
        """Give them as they are now, the last one as in this state if it is open."""
        return [*self._ended, *([] if self._open is None else [self._open.document(status)])]

    def take(self, piece: Piece) -> Iterator[Event]:
        """Take one more piece, and tell what has become of it."""
        if piece.reasoning:
            if not isinstance(self._open, _Reasoning):
                yield from self._turn_to(_Reasoning(self._next_place))
            yield self._grown(piece.reasoning)
        if piece.text or (piece.logprobs and not piece.calls and not piece.reasoning):
            if not isinstance(self._open, _Message):
                yield from self._turn_to(_Message(self._next_place))
            message = self._open
            assert isinstance(message, _Message)  # noqa: S101 - it was opened here
            yield message.grow(piece.text, piece.logprobs)
        for delta in piece.calls:
            if not isinstance(self._open, _Call) or self._open.index != delta.index:
                yield from self._turn_to(_Call(self._next_place, delta.index, delta.id, delta.name))
            if delta.arguments:
                yield self._grown(delta.arguments)

    def end(self, status: str) -> Iterator[Event]:
        """Tell that there is no more; an answer of nothing is an empty message."""
        if self._open is None and not self._ended:
            yield from self._turn_to(_Message(0))
        yield from self._end_open(status)

    @property
    def _next_place(self) -> int:
        return len(self._ended) + (self._open is not None)

    def _grown(self, text: str) -> Event:
        assert self._open is not None  # noqa: S101 - it was opened by the caller
        return self._open.grow(text)

    def _turn_to(self, item: _Item) -> Iterator[Event]:
        yield from self._end_open("completed")
        self._open = item
        yield from item.begin()

    def _end_open(self, status: str) -> Iterator[Event]:
        item, self._open = self._open, None
        if item is not None:
            yield from item.end(status)
            self._ended.append(item.document(status))


def _logprob(token: TokenLogprob) -> Mapping[str, Any]:
    return {
        "token": token.text,
        "logprob": token.logprob if token.logprob is not None else 0.0,
        "bytes": list(token.text.encode(errors="replace")),
        "top_logprobs": [],
    }


# ----------------------------------------------------------------------
# Answers of the Responses API, whole and as events
# ----------------------------------------------------------------------


class _Response:
    """What is told of an answer beside its items: who gave it, and what it was asked with."""

    def __init__(self, model: str, document: Mapping[str, Any], asked: Asked) -> None:
        request = asked.requests[0]
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
        """Give it in a state."""
        why = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            **self._head,
            "status": status,
            "error": None if error is None else _error(error),
            "incomplete_details": why,
            "output": list(items),
            "usage": None if usage is None else _usage(usage),
        }


class WholeResponse:
    """An answer that is given at once."""

    def __init__(self, model: str, document: Mapping[str, Any], asked: Asked) -> None:
        self._response = _Response(model, document, asked)
        self._items = OutputItems()
        self._status = "completed"

    def take(self, index: int, piece: Piece) -> None:
        """Take one more piece."""
        del index
        for _ in self._items.take(piece):
            pass
        self._status = _status(piece, self._status)

    def document(self, usage: Usage) -> Mapping[str, Any]:
        """Give the answer."""
        for _ in self._items.end(self._status):
            pass
        return self._response.document(self._status, self._items.documents(), usage)


class ResponseEvents:
    """An answer as events, each with its type and number."""

    def __init__(self, model: str, document: Mapping[str, Any], asked: Asked) -> None:
        self._response = _Response(model, document, asked)
        self._items = OutputItems()
        self._status = "completed"
        self._number = 0
        self._has_begun = False

    def begin(self) -> bytes:
        """Tell that the answer is under way."""
        self._has_begun = True
        document = {"response": self._response.document("in_progress", (), None)}
        return self._written((Event("created", document), Event("in_progress", document)))

    def write(self, index: int, piece: Piece, usage: Usage) -> bytes:
        """Write one more piece."""
        del index, usage
        self._status = _status(piece, self._status)
        return self._written(self._items.take(piece))

    def end(self, usage: Usage) -> bytes:
        """Write the end of what is open, and of all."""
        ended = self._written(self._items.end(self._status))
        whole = self._response.document(self._status, self._items.documents(), usage)
        return ended + self._written((Event(self._status, {"response": whole}),)) + DONE

    def fail(self, error: Exception) -> bytes:
        """Write a failure, with what there is of the answer."""
        document = self._response.document("failed", self._items.documents("incomplete"), None, error)
        return self._written((Event("failed", {"response": document}),)) + DONE

    def _written(self, events: Iterable[Event]) -> bytes:
        written = []
        for kind, data in events:
            document = {"type": f"response.{kind}", "sequence_number": self._number, **data}
            self._number += 1
            written.append(b"event: response.%b\ndata: %b\n\n" % (kind.encode(), orjson.dumps(document)))
        return b"".join(written)


def _status(piece: Piece, status: str) -> str:
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
    told = error.message if isinstance(error, ServerError) else "internal error; the server's log has the details"
    return {"code": "server_error", "message": told}


def _choice(prompt: Conversation) -> Any:
    return {"type": "function", "name": prompt.tool_name} if prompt.tool_name else prompt.tool_choice


def _tool(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Give a tool as this API has it, on one level."""
    return {"type": "function", "description": None, "strict": False, **tool["function"]}


# ----------------------------------------------------------------------
# ``/responses``: an answer to a conversation, of items
# ----------------------------------------------------------------------

_UNSERVED: Final[Mapping[str, str]] = {
    "previous_response_id": "nothing is stored; send the conversation as input",
    "conversation": "nothing is stored; send the conversation as input",
    "background": "the answer is given to who waits for it",
    "prompt": "this server has no templates of prompts; send input",
}
_LOGPROBS: Final = "message.output_text.logprobs"


class Responses:
    """The endpoint."""

    def read(self, document: Mapping[str, Any], limits: GenerationLimits, *, is_stream: bool, deadline: float) -> Asked:
        """Read a body: input and instructions, tools, and how tokens are chosen."""
        wrong = Gathered()
        fields = Fields(document, wrong, prompt=PromptSize(limits, "input"))
        max_tokens = read_max_tokens(fields, limits, "max_output_tokens")
        messages = read_input(fields)
        tools = read_tools(fields)
        once = fields.flag("parallel_tool_calls") is False
        options = _read_template_options(fields)
        prompt = Conversation(messages, tools.tools, tools.choice, tools.name, options, calls_once=once)
        request = make_request(
            fields,
            limits,
            prompt,
            max_tokens=max_tokens,
            is_stream=is_stream,
            logprobs=_LOGPROBS in (fields.items("include") or ()),
            deadline=deadline,
        )
        written = fields.within("text")
        grammar = None if written is None else read_response_format(written, "format")
        if request.n > 1:
            fields.refuse("n", "n greater than 1 is not supported for Responses API", got=str(request.n))
        for name, reason in _UNSERVED.items():
            if fields.get(name):
                fields.refuse(name, f"{name} is not supported: {reason}", code="unsupported_parameter")
        check_passed_over_of_responses(fields)
        # It is told again with the answer.
        fields.mapping("text")
        wrong.tell()
        return Asked((replace(request, grammar=grammar or request.grammar),))

    def whole(self, body: Body, asked: Asked) -> WholeResponse:
        """Make what gathers an answer."""
        return WholeResponse(body.model, body.document, asked)

    def streamed(self, body: Body, asked: Asked, write_error: Callable[[Exception], bytes]) -> ResponseEvents:
        """Make what writes events; failures have an event of their own here."""
        del write_error
        return ResponseEvents(body.model, body.document, asked)


def response_rules(api: OpenAIApi) -> list[Rule]:
    """Make the rules."""
    return text_rules(api, "/responses", Responses())


def _read_template_options(fields: Fields) -> Mapping[str, Any]:
    """Read variables of the template; any effort to reason has the model think, but none."""
    options = fields.mapping("chat_template_kwargs", "chat_template_kwargs must be an object", is_prompt=True) or {}
    reasoning = fields.within("reasoning")
    if reasoning is None:
        return options
    fields.mapping("reasoning")
    effort = reasoning.name_text("effort")
    if effort is None:
        return options
    return {"enable_thinking": effort != "none", "reasoning_effort": effort, **options}
