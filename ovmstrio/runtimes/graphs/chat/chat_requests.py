"""From what is asked of a text to the request of a graph and its parameters, and what no graph can do."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final

from ovmstrio.core.datatypes import BYTES
from ovmstrio.core.errors import InvalidRequest
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
        InvalidRequest: graphs cannot do something of it, or it has no message of a user; all of it is told.
    """
    wrong = Gathered()
    for problem in _cannot(graph, asked):
        wrong.add(InvalidRequest(problem))
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


def _cannot(graph: str, asked: GenerationRequest) -> Iterator[str]:
    """Tell what is asked for that a graph cannot do, each with the name of its field."""
    whose = f'"{graph}" is a graph of user code'
    if asked.n > 1:
        yield f"n: {whose}, which makes one text for a request; expected 1, got {asked.n}"
    if asked.sampling.best_of > 1:
        yield f"best_of: {whose}, which searches no beams; expected 1, got {asked.sampling.best_of}"
    if asked.logprobs:
        yield f"logprobs: {whose}, which tells no probabilities; leave it out"
    if asked.echo:
        yield f"echo: {whose}, whose text has no prompt in front; leave it out"
    if asked.sampling.stop_token_ids:
        yield f"stop_token_ids: {whose}, which has no numbers of tokens; use stop"
    if asked.grammar is not None:
        yield f"response_format: {whose}, which is held to no form; leave it out, or ask for one of type text"
    if isinstance(asked.prompt, Conversation) and asked.prompt.tools and asked.prompt.tool_choice != "none":
        yield f'tools: {whose}, which calls none; leave them out, or set tool_choice to "none"'


def _prompt(graph: str, asked: GenerationRequest) -> bytes:
    match asked.prompt:
        case str() as text:
            return _encoded(text)
        case Conversation(messages=messages):
            return _encoded(_last_of_user(messages))
        case _:
            raise InvalidRequest(
                f'prompt: "{graph}" is a graph of user code, which takes a text, not numbers of tokens'
            )


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
    raise InvalidRequest(f'messages: expected one with the role "user", got: {roles or "none"}')


def _encoded(text: str) -> bytes:
    # Half of a surrogate pair, which user code could not decode, is no reason to refuse what else was said.
    return text.encode(errors="replace")


def _add(request: InferRequest, name: str, data: bytes) -> None:
    # As `/generate` gives a text: its bytes alone, without the length that clients of tensors write in front.
    request.inputs.append(InferInput(name, BYTES.name, (len(data),)))
    request.raw_inputs.append(data)
