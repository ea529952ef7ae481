"""From what is asked of a text to the request of a graph and its parameters, and what no graph can do."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final

from ovmstrio.core.datatypes import BYTES
from ovmstrio.core.errors import InvalidField
from ovmstrio.core.gathered import Gathered
from ovmstrio.core.generation import Conversation, Sampling
from ovmstrio.core.request import InferInput, InferRequest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ovmstrio.core.generation import GenerationRequest
    from ovmstrio.core.request import ParameterValue
    from ovmstrio.runtimes.graphs.config.graph_config import ChatRoles

__all__ = ["chat_request", "sampling_parameters"]

_NO_PARAMETERS: Final = frozenset({"best_of", "stop_token_ids"})


def chat_request(graph: str, roles: ChatRoles, asked: GenerationRequest) -> InferRequest:
    """Make the request that a graph's inputs are fed with.

    Raises:
        InvalidField: graphs cannot do something of it, or it has no message of a user; all of it is told.
    """
    wrong = Gathered(_cannot(graph, asked))
    request = InferRequest(graph, deadline=asked.deadline)
    for name, give in ((roles.prompt, _prompt), (roles.messages, _messages)):
        if name:
            with wrong:
                _add(request, name, give(graph, asked))
    wrong.tell()
    return request


def sampling_parameters(asked: GenerationRequest) -> dict[str, ParameterValue]:
    """Give what was asked of the choice of tokens, by its names in the API; what was not asked for is left out."""
    sampling = asked.sampling
    given = {field.name: getattr(sampling, field.name) for field in fields(Sampling)}
    parameters = {name: value for name, value in given.items() if value is not None and name not in _NO_PARAMETERS}
    if sampling.max_tokens is not None:
        parameters["max_new_tokens"] = sampling.max_tokens
    if isinstance(asked.prompt, Conversation) and asked.prompt.template_options:
        parameters["chat_template_kwargs"] = json.dumps(dict(asked.prompt.template_options))
    return parameters


def _cannot(graph: str, asked: GenerationRequest) -> Iterator[InvalidField]:
    """Tell what is asked for that a graph cannot do."""
    whose = f'"{graph}" is a graph of user code, which'
    sampling, prompt = asked.sampling, asked.prompt
    if asked.n > 1:
        yield InvalidField(f"n: {whose} makes one text for a request; expected 1", field="n", got=str(asked.n))
    if sampling.best_of > 1:
        message = f"best_of: {whose} searches no beams; expected 1"
        yield InvalidField(message, field="best_of", got=str(sampling.best_of))
    if asked.logprobs:
        yield InvalidField(f"logprobs: {whose} tells no probabilities; leave it out", field="logprobs")
    if asked.echo:
        yield InvalidField(f"echo: {whose} does not say the prompt again; leave it out", field="echo")
    if sampling.stop_token_ids:
        yield InvalidField(f"stop_token_ids: {whose} has no numbers of tokens; use stop", field="stop_token_ids")
    if asked.grammar is not None:
        message = f"response_format: {whose} is held to no form; leave it out, or ask for the type text"
        yield InvalidField(message, field="response_format")
    if isinstance(prompt, Conversation) and prompt.tools and prompt.tool_choice != "none":
        yield InvalidField(f'tools: {whose} calls none; leave them out, or set tool_choice to "none"', field="tools")


def _prompt(graph: str, asked: GenerationRequest) -> bytes:
    match asked.prompt:
        case str() as text:
            return _encoded(text)
        case Conversation(messages=messages):
            return _encoded(_last_of_user(messages))
        case _:
            message = f'prompt: "{graph}" is a graph of user code, which takes a text'
            raise InvalidField(message, field="prompt", got="numbers of tokens")


def _messages(graph: str, asked: GenerationRequest) -> bytes:
    if isinstance(asked.prompt, Conversation):
        messages = [dict(message) for message in asked.prompt.messages]
    else:
        messages = [{"role": "user", "content": _prompt(graph, asked).decode()}]
    return _encoded(json.dumps(messages, ensure_ascii=False))


def _last_of_user(messages: Sequence[Mapping[str, Any]]) -> str:
    for message in reversed(messages):
        if message.get("role") == "user":
            return str(message.get("content") or "")
    roles = ", ".join(str(message.get("role"))[:20] for message in messages[-8:])
    raise InvalidField('messages: expected one with the role "user"', field="messages", got=roles or "none")


def _encoded(text: str) -> bytes:
    # Half of a surrogate pair, which user code could not decode, is no reason to refuse what else was said.
    return text.encode(errors="replace")


def _add(request: InferRequest, name: str, data: bytes) -> None:
    # As `/generate` gives a text: its bytes alone, without the length that clients of tensors write in front.
    request.inputs.append(InferInput(name, BYTES.name, (len(data),)))
    request.raw_inputs.append(data)
