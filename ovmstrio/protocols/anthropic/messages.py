"""Anthropic endpoint ``/messages``: the next message of a conversation.

::

    body ─> messages in chat's form ─> readers of chat ─> GenerationRequest
    deltas ─> MessageBlocks ─> content blocks, and events that report each change
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

import orjson

from ovmstrio.core.errors import ErrorList
from ovmstrio.core.generation import Conversation, Finish
from ovmstrio.protocols.openai.fields import (
    Fields,
    PromptSize,
    make_request,
    read_chat_message,
    read_max_tokens,
    read_response_format,
    read_stop,
    read_tools,
    shown,
)
from ovmstrio.protocols.openai.known_fields import KnownFields, Refused
from ovmstrio.protocols.openai.text_endpoint import ParsedRequest, parse_arguments

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from ovmstrio.core.generation import GenerationChunk, GenerationLimits
    from ovmstrio.protocols.openai.api import Body
    from ovmstrio.protocols.openai.text_endpoint import Usage

# ----------------------------------------------------------------------
# Fields
# ----------------------------------------------------------------------

_PROMPT: Final = frozenset({"model", "messages", "system", "tools", "tool_choice", "thinking", "output_config"})
_IGNORED: Final[Mapping[str, Callable[[Fields, str], object]]] = {
    **dict.fromkeys(
        ("service_tier", "inference_geo", "speed", "user_profile_id", "workspace_id", "fallback_credit_token"),
        Fields.text,
    ),
    **dict.fromkeys(
        ("metadata", "cache_control", "context_management", "diagnostics", "billing_policy"), Fields.mapping
    ),
    "fallbacks": Fields.items,
}
_REFUSED: Final = {
    "container": Refused("the server runs no code of requests"),
    "mcp_servers": Refused("the server calls no tools; the client calls them"),
    "compaction": Refused("the server does not summarize conversations; the client does"),
    "thread": Refused("the server stores no conversations; send all messages"),
}
MESSAGES: Final = KnownFields(
    _PROMPT | {"max_tokens", "stop_sequences", "stream", "temperature", "top_k", "top_p", "output_format"},
    _IGNORED,
    _REFUSED,
)
NOTES: Final[Mapping[str, str]] = {
    **dict.fromkeys(("temperature", "top_p", "top_k"), "defaults come from the model's `generation_config.json`"),
    "max_tokens": "required, except for `/messages/count_tokens`",
    "cache_control": "the server caches prefixes of all prompts",
    "context_management": "the server removes nothing from a conversation",
    **dict.fromkeys(("metadata", "user_profile_id", "workspace_id", "diagnostics"), "notes of the caller"),
    **dict.fromkeys(("service_tier", "speed", "inference_geo"), "the server has one tier and one place"),
    **dict.fromkeys(("billing_policy", "fallback_credit_token"), "the server sends no bills"),
    "fallbacks": "a model that fails is an error",
}
"""Notes on fields that work or have no effect, for their table in ``docs/anthropic.md``."""

# ----------------------------------------------------------------------
# Conversation
# ----------------------------------------------------------------------

_BILLING: Final = "x-anthropic-billing-header:"
"""Beginning of a system block that Claude Code adds for the operator of the API; it differs for each request."""
_ROLES: Final = ("user", "assistant", "system")
_EFFORTS: Final[Mapping[str, str]] = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}
"""Efforts, with the ones that chat templates know."""


class _ChatMessages:
    """Messages in chat's form, each with the message of the body that it comes from.

    Consecutive turns of one role become one message, and later system messages become text of the user: most chat
    templates accept neither.
    """

    def __init__(self) -> None:
        self.made: list[tuple[Fields, dict[str, Any]]] = []
        self.loaded_tools: set[str] = set()
        self._tool_names: dict[str, str] = {}

    def add_system(self, fields: Fields) -> None:
        parts = [part for block in _blocks(fields, "system") for part in self._parts(block)]
        kept = [part for part in parts if not str(part.get("text")).startswith(_BILLING)]
        if kept:
            self.made.append((fields, {"role": "system", "content": kept}))

    def add(self, message: Fields) -> None:
        role = message.choice("role", _ROLES)
        if role is None:
            if message.get("role") is None:
                message.refuse("role", f"{message.path('role')} is missing")
            return
        if role == "system" and any(each["role"] != "system" for _, each in self.made):
            role = "user"
        if message.get("content") is None:
            message.refuse("content", f"{message.path('content')} is missing")
        for block in _blocks(message, "content"):
            kind = block.word("type")
            if kind == "tool_result":
                self._add_tool_result(block)
            elif role == "assistant" and kind == "tool_use":
                self._turn(message, role).setdefault("tool_calls", []).append(self._tool_call(block))
            elif role == "assistant" and kind == "thinking":
                turn = self._turn(message, role)
                turn["reasoning_content"] = turn.get("reasoning_content", "") + (block.text("thinking") or "")
            else:
                self._turn(message, role)["content"] += self._parts(block)

    def _turn(self, message: Fields, role: str) -> dict[str, Any]:
        if not self.made or self.made[-1][1]["role"] != role:
            self.made.append((message, {"role": role, "content": []}))
        return self.made[-1][1]

    def _tool_call(self, block: Fields) -> dict[str, Any]:
        name, number = block.name_text("name") or "", block.text("id") or ""
        self._tool_names[number] = name
        return {"id": number, "type": "function", "function": {"name": name, "arguments": block.mapping("input") or {}}}

    def _add_tool_result(self, block: Fields) -> None:
        number = block.text("tool_use_id") or ""
        block.flag("is_error")
        parts = [part for inner in _blocks(block, "content") for part in self._parts(inner)]
        message = {"role": "tool", "tool_call_id": number, "content": parts}
        if number in self._tool_names:
            # Some templates need the name of the function.
            message["name"] = self._tool_names[number]
        self.made.append((block, message))

    def _parts(self, block: Fields) -> list[dict[str, Any]]:
        """Return a block in the form of chat's content parts."""
        kind = block.word("type")
        if kind == "text":
            return [{"type": "text", "text": block.get("text")}] if block.get("text") != "" else []
        if kind == "image":
            return [{"type": "image_url", "image_url": {"url": _image_url(block)}}]
        if kind == "document":
            return [{"type": "text", "text": _document_text(block)}]
        if kind == "tool_reference":
            name = block.name_text("tool_name") or ""
            self.loaded_tools.add(name)
            return [{"type": "text", "text": f"The tool {name} is available now."}]
        if kind != "redacted_thinking":
            block.refuse("type", f"{block.path('type')}: blocks of this type are not supported", got=shown(kind))
        return []


def _blocks(fields: Fields, name: str) -> Iterator[Fields]:
    """Yield the blocks of a content; a string is a block of text."""
    value = fields.get(name)
    if isinstance(value, str):
        yield fields.translated({"type": "text", "text": value}, PromptSize())
    else:
        yield from fields.objects(name, f"{fields.path(name)} is neither a string nor an array of blocks")


def _image_url(block: Fields) -> str:
    source = _source(block, ("base64", "url"))
    if source is None:
        return ""
    names = ("url",) if source.get("type") == "url" else ("media_type", "data")
    texts = [source.text(name) for name in names]
    for name in (name for name in names if source.get(name) is None):
        source.refuse(name, f"{source.path(name)} is missing")
    return "data:{};base64,{}".format(*texts) if len(texts) > 1 else texts[0] or ""


def _document_text(block: Fields) -> str:
    source = _source(block, ("text",))
    texts = (block.text("title"), block.text("context"), None if source is None else source.text("data"))
    return "\n".join(text for text in texts if text)


def _source(block: Fields, kinds: tuple[str, ...]) -> Fields | None:
    source = block.within("source")
    if source is None or source.choice("type", kinds) is None:
        block.refuse("source", f"{block.path('source')}: expected a source of type {' or '.join(kinds)}")
        return None
    return source


def read_conversation(fields: Fields, limits: GenerationLimits) -> Conversation:
    """Return the conversation of a body, read as a chat."""
    prompt = PromptSize(limits, "messages")
    chat = _ChatMessages()
    chat.add_system(fields)
    count = len(chat.made)
    for message in fields.objects("messages"):
        chat.add(message)
    last = chat.made[-1][1] if len(chat.made) > count else None
    if last is None:
        fields.refuse("messages", "messages: expected at least one message with content")
    messages = tuple(read_chat_message(source.translated(message, prompt)) for source, message in chat.made)
    # The answer continues a last message of the assistant (prefill).
    continues = last is not None and last["role"] == "assistant"
    if continues and last is not None and last.get("tool_calls"):
        fields.refuse("messages", "messages: the last message uses tools; expected a message with their results")
    choice = fields.within("tool_choice")
    given_tools = [tool for tool in fields.objects("tools") if not _is_deferred(tool, chat.loaded_tools)]
    chat_tools = [_chat_tool(tool) for tool in given_tools]
    chat_choice = None if choice is None else _chat_choice(choice)
    tools = read_tools(fields.translated({"tools": chat_tools, "tool_choice": chat_choice}, prompt))
    options: dict[str, Any] = {"enable_thinking": _read_thinking(fields)}
    output = fields.within("output_config")
    effort = None if output is None else output.choice("effort", tuple(_EFFORTS))
    if effort is not None:
        options["reasoning_effort"] = _EFFORTS[effort]
    if continues:
        options["add_generation_prompt"] = False
    return Conversation(
        messages,
        tools.tools,
        tools.choice,
        tools.name,
        options,
        returns_first_call_only=choice is not None and bool(choice.flag("disable_parallel_tool_use")),
        continues_final_message=continues,
        parameters_fields=tuple(tool.path("input_schema") for tool in given_tools),
        images=tuple(each._replace(field=each.field.replace(".image_url.url", ".source")) for each in prompt.images),
    )


def _is_deferred(tool: Fields, loaded: set[str]) -> bool:
    """Return whether a tool is not part of the prompt, because no result has referred to it yet."""
    return bool(tool.flag("defer_loading")) and tool.name_text("name") not in loaded


def _chat_tool(tool: Fields) -> dict[str, Any]:
    kind = tool.word("type")
    if kind is not None and kind != "custom":
        message = f"{tool.path('type')}: the server has no tools of its own; define one with input_schema"
        tool.refuse("type", message, got=shown(kind), code="unsupported_parameter")
    elif tool.get("input_schema") is None:
        tool.refuse("input_schema", f"{tool.path('input_schema')} is missing")
    made = {name: tool.get(name) for name in ("name", "description", "strict")}
    return {"type": "function", **made, "parameters": tool.mapping("input_schema")}


def _chat_choice(choice: Fields) -> Any:
    kind = choice.choice("type", ("auto", "any", "tool", "none"))
    if kind == "tool":
        return {"type": "function", "name": choice.get("name")}
    return "required" if kind == "any" else kind


def _read_thinking(fields: Fields) -> bool:
    thinking = fields.within("thinking")
    if thinking is None:
        return False
    # Reasoning has no limit of its own: it counts for max_tokens.
    thinking.unsigned("budget_tokens")
    thinking.name_text("display")
    return thinking.choice("type", ("enabled", "adaptive", "between_tools", "disabled")) not in {None, "disabled"}


# ----------------------------------------------------------------------
# Answer
# ----------------------------------------------------------------------

_DELTAS: Final[Mapping[str, str]] = {"text": "text", "thinking": "thinking", "tool_use": "partial_json"}
"""Text fields of deltas, by block type."""
_DELTA_TYPES: Final = {"text": "text_delta", "thinking": "thinking_delta", "tool_use": "input_json_delta"}


class _MessageBlocks:
    """Content blocks of an answer; at most the last one is open.

    Attributes:
        documents: the blocks, complete once closed.
    """

    def __init__(self, thinking: Mapping[str, Any]) -> None:
        self.documents: list[dict[str, Any]] = []
        self._has_reasoning = thinking.get("type", "disabled") != "disabled"
        self._shows_reasoning = thinking.get("display") != "omitted"
        self._open: str | int | None = None  # Type of the block, or index of the tool call
        self._parts: list[str] = []

    def take(self, piece: GenerationChunk) -> Iterator[dict[str, Any]]:
        """Append a delta and yield its events."""
        if piece.reasoning and self._has_reasoning:
            yield from self._grow("thinking", {"thinking": "", "signature": ""}, piece.reasoning)
        if piece.text:
            yield from self._grow("text", {"text": ""}, piece.text)
        for call in piece.calls:
            begin = {"id": call.id or f"toolu_{uuid4().hex}", "name": call.name, "input": {}}
            yield from self._grow("tool_use", begin, call.arguments, call.index)

    def close(self) -> Iterator[dict[str, Any]]:
        """Complete the open block and yield its events."""
        if self._open is None:
            return
        block, text, index = self.documents[-1], "".join(self._parts), len(self.documents) - 1
        if block["type"] == "tool_use":
            # A call that was cut off has no valid input.
            block["input"] = parse_arguments(text) or {}
        else:
            block[block["type"]] = text
        if block["type"] == "thinking":
            # Clients return the signature with the block; the server does not check it.
            block["signature"] = uuid4().hex
            delta = {"type": "signature_delta", "signature": block["signature"]}
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
        self._open, self._parts = None, []

    def _grow(self, kind: str, begin: dict[str, Any], text: str, call: int | None = None) -> Iterator[dict[str, Any]]:
        key = kind if call is None else call
        if self._open != key:
            yield from self.close()
            self._open = key
            self.documents.append({"type": kind, **begin})
            yield {
                "type": "content_block_start",
                "index": len(self.documents) - 1,
                "content_block": {**self.documents[-1]},
            }
        if text and (kind != "thinking" or self._shows_reasoning):
            self._parts.append(text)
            delta = {"type": _DELTA_TYPES[kind], _DELTAS[kind]: text}
            yield {"type": "content_block_delta", "index": len(self.documents) - 1, "delta": delta}


class _Answer:
    """Head, content and end of a message."""

    def __init__(self, body: Body, parsed: ParsedRequest) -> None:
        self._head = {"id": f"msg_{uuid4().hex}", "type": "message", "role": "assistant", "model": body.model}
        self._request = parsed.requests[0]
        self._last: GenerationChunk | None = None
        self.blocks = _MessageBlocks(body.document.get("thinking") or {})

    def take(self, piece: GenerationChunk) -> Iterator[dict[str, Any]]:
        """Append a delta and yield its events."""
        if piece.finish is not None:
            self._last = piece
        return self.blocks.take(piece)

    def document(self, usage: Usage, end: Mapping[str, Any]) -> dict[str, Any]:
        return {**self._head, "content": self.blocks.documents, **end, "usage": _usage(usage)}

    def end(self, usage: Usage) -> dict[str, Any]:
        stop = "" if self._last is None else self._last.stop
        return {"stop_reason": self._stop_reason(usage), "stop_sequence": stop or None}

    def _stop_reason(self, usage: Usage) -> str:
        if self._last is None or self._last.finish is Finish.STOP:
            return "stop_sequence" if self._last is not None and self._last.stop else "end_turn"
        if self._last.finish is Finish.TOOL_CALLS:
            return "tool_use"
        most = self._request.sampling.max_tokens
        return "max_tokens" if most is None or usage.completion >= most else "model_context_window_exceeded"


class _MessageBuilder:
    def __init__(self, answer: _Answer) -> None:
        self._answer = answer

    def take(self, index: int, piece: GenerationChunk) -> None:
        del index
        for _ in self._answer.take(piece):
            pass

    def document(self, usage: Usage) -> Mapping[str, Any]:
        for _ in self._answer.blocks.close():
            pass
        return self._answer.document(usage, self._answer.end(usage))


class _MessageStream:
    def __init__(self, answer: _Answer, write_error: Callable[[Exception], bytes]) -> None:
        self._answer = answer
        self.fail = write_error

    def begin(self, usage: Usage) -> bytes:
        message = self._answer.document(usage, {"stop_reason": None, "stop_sequence": None})
        return encode_events(({"type": "message_start", "message": message}, {"type": "ping"}))

    def write(self, index: int, piece: GenerationChunk, usage: Usage) -> bytes:
        del index, usage
        return encode_events(self._answer.take(piece))

    def end(self, usage: Usage) -> bytes:
        delta = {"type": "message_delta", "delta": self._answer.end(usage), "usage": _usage(usage)}
        return encode_events((*self._answer.blocks.close(), delta, {"type": "message_stop"}))


def encode_events(events: Iterable[Mapping[str, Any]]) -> bytes:
    """Encode events, each named by its type."""
    return b"".join(b"event: %b\ndata: %b\n\n" % (event["type"].encode(), orjson.dumps(event)) for event in events)


def _usage(usage: Usage) -> Mapping[str, Any]:
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.completion,
        "output_tokens_details": {"thinking_tokens": usage.reasoning},
    }


# ----------------------------------------------------------------------
# Endpoint
# ----------------------------------------------------------------------


class Messages:
    """Endpoint."""

    known_fields = MESSAGES

    def read(
        self, document: Mapping[str, Any], limits: GenerationLimits, *, is_stream: bool, deadline: float
    ) -> ParsedRequest:
        """Parse a body: system text, messages, tools and sampling parameters."""
        errors = ErrorList()
        fields = Fields(document, errors)
        max_tokens = read_max_tokens(fields, limits, "max_tokens", minimum=0)
        if document.get("max_tokens") is None:
            fields.refuse("max_tokens", "max_tokens is missing", code="missing_required_parameter")
        request = make_request(
            fields,
            limits,
            read_conversation(fields, limits),
            max_tokens=max_tokens,
            is_stream=is_stream,
            logprobs=False,
            deadline=deadline,
        )
        output = fields.within("output_config")
        grammar = None if output is None else read_response_format(output, "format")
        grammar = grammar or read_response_format(fields, "output_format")
        request = replace(request, stop=read_stop(fields, "stop_sequences"), grammar=grammar)
        MESSAGES.check(fields)
        errors.raise_if_any()
        return ParsedRequest((request,))

    def response_builder(self, body: Body, parsed: ParsedRequest) -> _MessageBuilder:
        """Create a message builder."""
        return _MessageBuilder(_Answer(body, parsed))

    def response_stream(
        self, body: Body, parsed: ParsedRequest, write_error: Callable[[Exception], bytes]
    ) -> _MessageStream:
        """Create an event encoder."""
        return _MessageStream(_Answer(body, parsed), write_error)
