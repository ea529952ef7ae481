"""OpenAI endpoint ``/chat/completions``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from ovmstrio.core.errors import ErrorList
from ovmstrio.core.generation import Conversation
from ovmstrio.protocols.openai.fields import (
    Fields,
    PromptSize,
    make_request,
    read_max_tokens,
    read_messages,
    read_prompt_logprobs,
    read_stream_options,
    read_tools,
    read_top_logprobs,
)
from ovmstrio.protocols.openai.known_fields import CHAT
from ovmstrio.protocols.openai.text_endpoint import (
    ChunkStream,
    ParsedRequest,
    ResponseBuilder,
    logprob_document,
    prompt_logprobs_document,
    reasoning_fields,
    response_head,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ovmstrio.core.generation import Finish, GenerationChunk, GenerationLimits, TokenLogprob, ToolCallDelta
    from ovmstrio.protocols.openai.api import Body
    from ovmstrio.protocols.openai.text_endpoint import Usage

# Responses


class _ChatBuilder(ResponseBuilder):
    def document(self, usage: Usage) -> Mapping[str, Any]:
        prompt = self._texts[0].prompt_logprobs
        more = {"prompt_logprobs": prompt_logprobs_document(prompt)} if self._has_prompt_logprobs else {}
        return {
            **response_head("chatcmpl", "chat.completion", self._model),
            **more,
            "choices": [
                {
                    "index": index,
                    "message": text.message(),
                    "logprobs": _logprobs(text.logprobs, self._top_logprobs) if self._has_logprobs else None,
                    "finish_reason": text.finish.value,
                }
                for index, text in enumerate(self._texts)
            ],
            "usage": usage.document(),
        }


class _ChatStream(ChunkStream):
    def __init__(self, model: str, parsed: ParsedRequest, write_error: Callable[[Exception], bytes]) -> None:
        super().__init__(response_head("chatcmpl", "chat.completion.chunk", model), parsed, write_error)
        self._started: set[int] = set()

    def write(self, index: int, piece: GenerationChunk, usage: Usage) -> bytes:
        """Encode a chunk; the first chunk of a choice is preceded by its role."""
        first = b""
        if index not in self._started:
            self._started.add(index)
            first = self._chunk(index, {"role": "assistant", "content": self._parsed.echoed}, None, None, usage)
        if self._has_text_only(piece):
            return first + self._text_event(index, b'"delta":{"content":', piece.text, b"}") if piece.text else first
        piece = self._parsed.returned(piece)
        delta = _delta(piece)
        if not delta and not piece.finish and not piece.logprobs:
            return first
        logprobs = _logprobs(piece.logprobs, 0) if self._has_logprobs and piece.logprobs else None
        return first + self._chunk(index, delta, logprobs, piece.finish, usage)

    def _chunk(self, index: int, delta: Mapping[str, Any], logprobs: Any, finish: Finish | None, usage: Usage) -> bytes:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": None if finish is None else finish.value,
        }
        return self._event([choice], usage)


def _delta(piece: GenerationChunk) -> dict[str, Any]:
    delta: dict[str, Any] = {}
    if piece.text:
        delta["content"] = piece.text
    if piece.reasoning:
        delta |= reasoning_fields(piece.reasoning)
    if piece.calls:
        delta["tool_calls"] = [_call_delta(call) for call in piece.calls]
    return delta


def _call_delta(call: ToolCallDelta) -> dict[str, Any]:
    function: dict[str, Any] = {"arguments": call.arguments}
    if not call.id and not call.name:
        return {"index": call.index, "function": function}
    return {"index": call.index, "id": call.id, "type": "function", "function": {"name": call.name, **function}}


def _logprobs(tokens: Sequence[TokenLogprob], top: int) -> Mapping[str, Any]:
    return {"content": [logprob_document(token, top) for token in tokens], "refusal": None}


# Endpoint


class Chat:
    """Endpoint."""

    known_fields = CHAT

    def read(
        self, document: Mapping[str, Any], limits: GenerationLimits, *, is_stream: bool, deadline: float
    ) -> ParsedRequest:
        """Parse a body: messages, tools and sampling parameters."""
        errors = ErrorList()
        fields = Fields(document, errors, prompt=PromptSize(limits, "messages"))
        options = read_stream_options(fields, is_stream=is_stream)
        max_tokens = read_max_tokens(fields, limits, "max_tokens", "max_completion_tokens")
        conversation = read_conversation(fields)
        logprobs = bool(fields.flag("logprobs"))
        request = make_request(
            fields,
            limits,
            conversation,
            max_tokens=max_tokens,
            is_stream=is_stream,
            logprobs=logprobs,
            top_logprobs=read_top_logprobs(fields, is_stream=is_stream, logprobs=logprobs),
            prompt_logprobs=read_prompt_logprobs(fields, is_stream=is_stream),
            prompt_field="messages",
            deadline=deadline,
        )
        echo, returns_reasoning = fields.flag("echo"), fields.flag("include_reasoning")
        shows_token_ids = bool(fields.flag("return_tokens_as_token_ids"))
        CHAT.check(fields)
        errors.raise_if_any()
        last = conversation.messages[-1]
        return ParsedRequest(
            (request,),
            options.includes_usage,
            options.has_continuous_usage,
            returns_reasoning=returns_reasoning is not False,
            shows_token_ids=shows_token_ids,
            echoed=last["content"] if echo and last["role"] == "assistant" else "",
        )

    def response_builder(self, body: Body, parsed: ParsedRequest) -> _ChatBuilder:
        """Create a response builder."""
        return _ChatBuilder(body.model, parsed)

    def response_stream(
        self, body: Body, parsed: ParsedRequest, write_error: Callable[[Exception], bytes]
    ) -> _ChatStream:
        """Create a chunk writer."""
        return _ChatStream(body.model, parsed, write_error)


def read_conversation(fields: Fields) -> Conversation:
    """Return the conversation of a body: messages, tools and options of the chat template."""
    messages = read_messages(fields)
    tools = read_tools(fields)
    given = fields.mapping("chat_template_kwargs", "chat_template_kwargs must be an object", is_prompt=True) or {}
    effort, verbosity = fields.name_text("reasoning_effort"), fields.name_text("verbosity")
    if effort is not None:
        given = {"enable_thinking": effort != "none", "reasoning_effort": effort, **given}
    if verbosity is not None:
        given = {"verbosity": verbosity, **given}
    documents = _read_documents(fields)
    if documents:
        given = {"documents": documents, **given}
    continues, options = _read_continuation(fields, messages, given)
    modalities = fields.items("modalities") or ["text"]
    if modalities != ["text"]:
        fields.refuse("modalities", "this model generates text only", code="unsupported_parameter")
    once = fields.flag("parallel_tool_calls") is False
    return Conversation(
        messages,
        tools.tools,
        tools.choice,
        tools.name,
        options,
        returns_first_call_only=once,
        continues_final_message=continues,
        parameters_fields=tools.parameters_fields,
        images=tuple(fields.prompt.images),
    )


def _read_documents(fields: Fields) -> list[Any]:
    """Return the documents for the chat template: objects with texts, such as a title."""
    name = "documents"
    documents = fields.items(name) or []
    for each in fields.objects(name):
        for key in each.names():
            each.prompt_text(key)
            each.prompt.add(len(key))
    return documents


_CONTINUE: Final = "continue_final_message"
_BEGIN: Final = "add_generation_prompt"


def _read_continuation(
    fields: Fields, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
) -> tuple[bool, Mapping[str, Any]]:
    """Return whether the answer continues the last message, and the template options.

    Template options with the names of these fields take precedence, and the fields exclude each other, as in vLLM.
    """
    given = {name: fields.flag(name) for name in (_CONTINUE, _BEGIN)}
    given |= {name: bool(options[name]) for name in given if options.get(name) is not None}
    continues, begins = given[_CONTINUE], given[_BEGIN]
    if begins is None and not continues:
        return False, options
    if continues and begins:
        fields.refuse(_CONTINUE, f"{_CONTINUE} and {_BEGIN} cannot both be true")
    elif continues and messages and messages[-1].get("tool_calls"):
        fields.refuse(_CONTINUE, f"{_CONTINUE} is not possible: the final message calls tools")
    return bool(continues), {**options, _BEGIN: bool(begins)}
