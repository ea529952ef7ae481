"""Requests with texts that are too long, or too many: refused by their size, before a service sees them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from ovmstrio.core.text_bounds import MAX_ITEMS, MAX_TOKENIZED_CHARACTERS, max_characters
from tests.service.api.rest.openai.talking import generator_of
from tests.support.text_encoders import WORDS, LetterEncoder, load_encoder
from tests.support.text_generators import CHAT, LIMITS, text_spec
from tests.unit.api.rest.servers import Serving, serving_rest

TEXT: Any = object()
"""Stands for a text that is too long."""
assert LIMITS.context_length is not None
LONGEST = max_characters(LIMITS.context_length)
CHAT_PATH, COMPLETIONS, RESPONSES = "/v3/chat/completions", "/v3/completions", "/v3/responses"
CONTEXT = "This model's maximum context length is 1000 tokens, and {} has at least {} characters, which are at least"
USER = {"role": "user", "content": "a"}

TOO_LONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "message": (CHAT_PATH, {"messages": [{"role": "user", "content": TEXT}]}, "messages"),
    "part": (CHAT_PATH, {"messages": [{"role": "user", "content": [{"type": "text", "text": TEXT}]}]}, "messages"),
    "name": (CHAT_PATH, {"messages": [{**USER, "name": TEXT}]}, "messages"),
    "reasoning": (CHAT_PATH, {"messages": [{**USER, "reasoning_content": TEXT}]}, "messages"),
    "arguments": (
        CHAT_PATH,
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": TEXT}}]}]},
        "messages",
    ),
    "arguments as an object": (
        CHAT_PATH,
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": TEXT}}}]}]},
        "messages",
    ),
    "description": (
        CHAT_PATH,
        {"messages": [USER], "tools": [{"type": "function", "function": {"name": "f", "description": TEXT}}]},
        "messages",
    ),
    "parameters": (
        CHAT_PATH,
        {"messages": [USER], "tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": TEXT}}}]},
        "messages",
    ),
    "template options": (CHAT_PATH, {"messages": [USER], "chat_template_kwargs": {"a": TEXT}}, "messages"),
    "prompt": (COMPLETIONS, {"prompt": TEXT}, "prompt"),
    "second prompt": (COMPLETIONS, {"prompt": ["a", TEXT]}, "prompt[1]"),
    "input": (RESPONSES, {"input": TEXT}, "input"),
    "instructions": (RESPONSES, {"input": "a", "instructions": TEXT}, "input"),
    "item": (RESPONSES, {"input": [{"role": "user", "content": TEXT}]}, "input"),
    "output of a call": (
        RESPONSES,
        {"input": [{"type": "function_call_output", "call_id": "a", "output": TEXT}]},
        "input",
    ),
}

KINDS = {
    "words": "the cat ",
    "wide": "\u4e2d",
    "newlines": "\n",
    "controls": "\x01",
}


def filled(value: Any, text: str) -> Any:
    """Return a body with the text in its place."""
    if isinstance(value, dict):
        return {key: filled(each, text) for key, each in value.items()}
    if isinstance(value, list):
        return [filled(each, text) for each in value]
    return text if value is TEXT else value


@pytest.fixture
async def texts(tmp_path: Path) -> AsyncIterator[Serving]:
    """Serve ``words``, which makes vectors and scores, and ``chat``, which makes text."""
    models: Any = (text_spec(tmp_path / "words", WORDS), text_spec(tmp_path / "chat"))
    async with serving_rest(tmp_path, models=models, loader=load_encoder) as server:
        yield server


def encoder_of(serving: Serving) -> LetterEncoder:
    """Return what is served as ``words``."""
    service: Any = serving.registry.peek(WORDS)
    return service  # type: ignore[no-any-return]


async def refusal_of(serving: Serving, path: str, body: dict[str, Any], status: int = 400) -> dict[str, Any]:
    """Return the error that a body is refused with; no service was asked."""
    answer = await serving.post(path, json=body)
    assert answer.status_code == status, answer.text[:500]
    assert generator_of(serving).requests == []
    assert encoder_of(serving).asked == []
    assert len(answer.content) < 8192
    error: dict[str, Any] = answer.json()["error"]
    return error


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", TOO_LONG)
async def test_a_prompt_that_cannot_fit_is_refused_by_its_characters(texts: Serving, case: str, kind: str) -> None:
    """Wherever the text is, as an event stream too; the error has the code of a prompt with too many tokens."""
    path, body, field = TOO_LONG[case]
    text = KINDS[kind] * (LONGEST // len(KINDS[kind]) + 1)
    for more in ({}, {"stream": True}):
        error = await refusal_of(texts, path, {"model": CHAT, **filled(body, text), **more})
        assert error["message"].startswith(CONTEXT.format(field, "")[: -len(" characters, which are at least")])
        assert (error["param"], error["code"]) == (field, "context_length_exceeded")


async def test_texts_of_a_conversation_are_counted_together(texts: Serving) -> None:
    """Those before the one that is too much are counted, and nothing behind it is read."""
    part = "a" * (LONGEST // 100)
    messages = [{"role": "user", "content": part} for _ in range(102)]
    error = await refusal_of(texts, CHAT_PATH, {"model": CHAT, "messages": [*messages, 3]})
    assert error["message"].startswith(CONTEXT.format("messages", len(part) * 101))
    answer = await texts.post(CHAT_PATH, json={"model": CHAT, "messages": messages[:100]})
    assert answer.status_code == 200


MANY = MAX_ITEMS + 1
MEMBERS = "JSON body: expected at most 16384 objects and members of objects, got more"
TOO_MANY: dict[str, tuple[str, dict[str, Any], str]] = {
    "messages": (CHAT_PATH, {"messages": [USER] * MANY}, MEMBERS),
    "wrong messages": (CHAT_PATH, {"messages": [3] * MAX_ITEMS}, "and the rest of the request was not checked"),
    "wrong documents": (
        "/v3/rerank",
        {"query": "a", "documents": [3] * 500},
        "the rest of the request was not checked",
    ),
    "tools": (
        CHAT_PATH,
        {"messages": [USER], "tools": [{"type": "function", "function": {"name": "f"}}] * MANY},
        MEMBERS,
    ),
    "large schema": (
        CHAT_PATH,
        {
            "messages": [USER],
            "response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": ["a" * 2**18]}}},
        },
        "response_format.json_schema.schema: expected at most 262144 characters and members",
    ),
    "large metadata": (
        CHAT_PATH,
        {"messages": [USER], "metadata": {"a": ["b"] * 2**18}},
        "metadata: expected at most 262144 characters and members",
    ),
    "long role": (CHAT_PATH, {"messages": [{"role": "a" * 257, "content": "a"}]}, "Invalid message structure"),
    "long tool": (
        CHAT_PATH,
        {"messages": [USER], "tools": [{"type": "function", "function": {"name": "f" * 257}}]},
        "tools[0].function.name: expected at most 256 characters; got 257",
    ),
    "long type": (
        CHAT_PATH,
        {"messages": [{"role": "user", "content": [{"type": "a" * 100_000}]}]},
        "Unsupported content type; got 'aaaa",
    ),
    "long stop": (CHAT_PATH, {"messages": [USER], "stop": ["a" * 1025]}, "expected at most 1024 characters each"),
    "stop tokens": (
        COMPLETIONS,
        {"prompt": "a", "stop_token_ids": [1] * MANY},
        "stop_token_ids: expected at most 16384 members; got 16385",
    ),
    "logit_bias": (
        COMPLETIONS,
        {"prompt": "a", "logit_bias": dict.fromkeys(map(str, range(MANY)), 1)},
        MEMBERS,
    ),
    "include": (RESPONSES, {"input": "a", "include": ["a"] * MANY}, "include: expected at most 16384 members"),
    "stream options": (
        CHAT_PATH,
        {"messages": [USER], "stream": True, "stream_options": dict.fromkeys(map(str, range(MANY)), 1)},
        MEMBERS,
    ),
    "tokens": (COMPLETIONS, {"prompt": [1] * 1001}, "Number of prompt tokens: 1001 exceeds model max length: 1000"),
    "wrong tokens": (COMPLETIONS, {"prompt": [1] * 1000 + [-1]}, "Number of prompt tokens: 1001 exceeds"),
    "tokens of an input": ("/v3/embeddings", {"input": [1] * (2**18 + 1)}, "input: expected at most 262144 tokens"),
    "tokens of inputs": (
        "/v3/embeddings",
        {"input": [[1] * 1000] * 263},
        "input: expected at most 262144 tokens in all; got 263000",
    ),
    "texts": ("/v3/tokenize", {"text": ["a"] * MANY}, "text: expected at most 16384 texts; got 16385"),
    "bytes": (
        "/v3/tokenize",
        {"text": "a" * (MAX_TOKENIZED_CHARACTERS + 1)},
        "text: expected at most 4194304 bytes in one request; got 4194305; send several requests",
    ),
    "bytes of all texts": (
        "/v3/tokenize",
        {"text": ["a" * 2**20] * 4 + ["a"]},
        "text: expected at most 4194304 bytes in one request; got 4194305",
    ),
    "wide bytes": ("/v3/tokenize", {"text": "\u4e2d" * (2**22 // 3 + 1)}, "text: expected at most 4194304 bytes"),
    "padding": (
        "/v3/tokenize",
        {"text": ["a"] * 1025, "max_length": 4096, "pad_to_max_length": True},
        "max_length: expected at most 4194304 tokens in one request with the padding; got 4198400",
    ),
    "model": (CHAT_PATH, {"messages": [USER], "model": "a" * 1025}, "model field: expected at most 1024 characters"),
    "spoken": ("/v3/audio/speech", {"input": " " * 200_000}, "input may have 4096 characters"),
    "voice": ("/v3/audio/speech", {"input": "a", "voice": "a" * 257}, "voice: expected at most 256 characters"),
}


@pytest.mark.parametrize("case", TOO_MANY)
async def test_lists_objects_and_words_have_bounds(texts: Serving, case: str) -> None:
    """Each is refused with what was expected."""
    path, body, message = TOO_MANY[case]
    model = CHAT if path in {CHAT_PATH, COMPLETIONS, RESPONSES} else WORDS
    error = await refusal_of(texts, path, {"model": model, **body})
    assert message in error["message"]


async def test_the_largest_requests_that_fit_are_answered(texts: Serving) -> None:
    """Texts and lists at their bounds reach the service."""
    answer = await texts.post("/v3/tokenize", json={"model": WORDS, "text": ["a" * 2**20] * 4})
    assert [len(row) for row in answer.json()["tokens"]] == [2**20] * 4
    assert answer.json()["tokens"][3][-2:] == [97, 97]
    answer = await texts.post("/v3/tokenize", json={"model": WORDS, "text": ["b"] * MAX_ITEMS})
    assert answer.json() == {"tokens": [[98]] * MAX_ITEMS}
    answer = await texts.post("/v3/embeddings", json={"model": WORDS, "input": [[1] * 524] * 500})
    assert answer.json()["usage"]["prompt_tokens"] == 262_000
    text = "a \u4e2d\n\x01" * 40_000
    body = {"model": WORDS, "query": "a", "documents": [text, "b"], "return_documents": True}
    answer = await texts.post("/v3/rerank", json=body)
    assert [each["document"]["text"] for each in answer.json()["results"]] == [text, "b"]
