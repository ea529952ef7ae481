"""Calls that a client insists on, with OpenAI's own client, of a model whose weights know nothing of them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import openai
import pytest

from tests.support.processes import OvmsProcess, serving
from tests.support.tiny_llm import write_tiny_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

_SIZE: Final = {
    "type": "object",
    "properties": {"size": {"enum": ["small", "large"]}},
    "required": ["size"],
    "additionalProperties": False,
}
_TOOLS: Final[Any] = [
    {"type": "function", "function": {"name": name, "description": name, "parameters": _SIZE}}
    for name in ("measure", "paint")
]
_NAMED: Final = {"type": "function", "function": {"name": "paint"}}
_HELLO: Final[Any] = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OvmsProcess]:
    """Serve a model that writes calls as Hermes does."""
    folder = write_tiny_folder(tmp_path_factory.mktemp("models") / "llm")
    options = ("--model_name", "llm", "--model_path", str(folder), "--task", "text_generation")
    with serving(*options, "--cache_size", "0.01", "--tool_parser", "hermes3") as running:
        yield running


@pytest.fixture
def client(server: OvmsProcess) -> Iterator[openai.OpenAI]:
    """Talk to it."""
    with openai.OpenAI(base_url=f"{server.rest}/v3", api_key="none", max_retries=0, timeout=120) as made:
        yield made


@pytest.mark.parametrize(("choice", "names"), [("required", {"measure", "paint"}), (_NAMED, {"paint"})])
def test_a_call_that_must_be_is_made_with_arguments_that_fit(
    client: openai.OpenAI, choice: Any, names: set[str]
) -> None:
    """Whole, and as a stream whose parts make the same call."""
    asked: dict[str, Any] = {"model": "llm", "messages": _HELLO, "tools": _TOOLS, "tool_choice": choice}
    asked |= {"max_tokens": 200, "temperature": 0}
    answer = client.chat.completions.create(**asked).choices[0]
    assert answer.finish_reason == "tool_calls"
    (call,) = answer.message.tool_calls or []
    assert call.type == "function"
    assert call.function.name in names
    assert json.loads(call.function.arguments)["size"] in {"small", "large"}
    with client.chat.completions.create(**asked, stream=True) as stream:
        choices = [chunk.choices[0] for chunk in stream]
    parts = [part.function for each in choices for part in each.delta.tool_calls or () if part.function is not None]
    assert "".join(part.name or "" for part in parts) == call.function.name
    assert "".join(part.arguments or "" for part in parts) == call.function.arguments
    assert choices[-1].finish_reason == "tool_calls"


def test_what_was_asked_before_is_told_as_cached(client: openai.OpenAI) -> None:
    """In the account of OpenAI's client."""
    asked: dict[str, Any] = {"model": "llm", "messages": [{"role": "user", "content": "of the men " * 20}]}
    found = []
    for _ in range(2):
        usage = client.chat.completions.create(**asked, max_tokens=1, temperature=0).usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        found.append(usage.prompt_tokens_details.cached_tokens)
        total = usage.prompt_tokens
    assert found == [0, total - 1]
