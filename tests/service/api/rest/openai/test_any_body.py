"""Bodies that nobody should send: the caller is told, whatever it is, and nothing is left running."""

from __future__ import annotations

import json
from threading import current_thread, main_thread
from typing import Any

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from ovmstrio.api.openai.api import Body
from ovmstrio.api.openai.chat import Chat
from ovmstrio.api.openai.completions import Completions
from ovmstrio.api.openai.responses.endpoint import Responses
from ovmstrio.api.openai.text_endpoint import TextEndpoint, Usage
from ovmstrio.core.errors import InvalidRequest
from ovmstrio.core.generation import Finish, GenerationLimits, Piece
from tests.service.api.rest.openai.talking import chat_body, generator_of, post_of
from tests.support.examples import examples
from tests.support.text_generators import CHAT
from tests.support.waits import WAIT_SECONDS
from tests.unit.api.rest.servers import Serving

ENDPOINTS: dict[str, TextEndpoint] = {
    "/chat/completions": Chat(),
    "/completions": Completions(),
    "/responses": Responses(),
}
LIMITS = GenerationLimits(context_length=1000, max_tokens_limit=500, vocabulary_size=300)

_SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=9)
)
_KEYS = st.sampled_from(
    [
        "type", "text", "role", "content", "function", "name", "arguments", "parameters", "id", "url", "schema",
        "json_schema", "format", "effort", "include_usage", "tool_calls", "call_id", "output", "refusal", "strict",
    ]
) | st.text(max_size=5)  # fmt: skip
_KINDS = st.sampled_from(
    ["text", "function", "json_schema", "json_object", "regex", "grammar", "user", "message", "function_call", "auto"]
)
_VALUES = st.recursive(
    _SCALARS | _KINDS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_KEYS, inner, max_size=4),
    max_leaves=9,
)
_FIELDS = st.sampled_from(
    [
        "messages", "prompt", "input", "instructions", "stream_options", "max_tokens", "max_completion_tokens", "text",
        "max_output_tokens", "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "repetition_penalty",
        "seed", "stop", "n", "best_of", "logprobs", "top_logprobs", "echo", "tools", "tool_choice", "response_format",
        "chat_template_kwargs", "stop_token_ids", "logit_bias", "reasoning", "include", "metadata", "modalities",
        "ignore_eos", "min_tokens", "suffix", "store", "skip_special_tokens", "reasoning_effort",
    ]
)  # fmt: skip
_BODIES = st.dictionaries(_FIELDS, _VALUES, max_size=8)


@pytest.mark.parametrize("path", ENDPOINTS)
@settings(max_examples=examples(300), deadline=None)
@given(body=_BODIES, is_stream=st.booleans())
def test_any_body_is_read_or_refused(path: str, body: dict[str, Any], is_stream: bool) -> None:
    """What is read can be answered, and written down for another process."""
    endpoint = ENDPOINTS[path]
    try:
        asked = endpoint.read(body, LIMITS, is_stream=is_stream, deadline=0)
    except InvalidRequest:
        return
    for request in asked.requests:
        assert json.dumps(getattr(request.prompt, "messages", request.prompt))
        assert json.dumps(getattr(request.prompt, "tools", ()))
    gathered = endpoint.whole(Body(body, CHAT), asked)
    gathered.take(0, Piece(text="x", finish=Finish.STOP))
    assert json.dumps(gathered.document(Usage()))


BAD_BODIES: dict[str, bytes] = {
    "nothing": b"",
    "no JSON": b"{",
    "no UTF-8": b'{"model": "\xff"}',
    "a list": b"[1]",
    "null": b"null",
    "deep lists": b'{"model": "chat", "messages": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    "a deep tool": b'{"model": "chat", "messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function", '
    b'"function": {"name": "f", "parameters": ' + b'{"a":' * 300 + b"1" + b"}" * 300 + b"}}]}",
    "a deep variable": b'{"model": "chat", "messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": '
    + b'{"a":' * 300
    + b"1"
    + b"}" * 301,
    "half a letter": b'{"model": "chat", "messages": [{"role": "user", "content": "\\ud800"}]}',
    "a number without end": b'{"model": "chat", "messages": [], "temperature": 1e999}',
    "a model that is none": b'{"model": "..", "messages": []}',
    "a model of zeros": b'{"model": "\\u0000", "messages": []}',
}


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize("case", BAD_BODIES)
async def test_a_bad_body_is_the_callers_fault(serving: Serving, case: str, path: str) -> None:
    """And never the server's, which clients would try again for."""
    answer = await serving.post(f"/v3{path}", content=BAD_BODIES[case])

    assert 400 <= answer.status_code < 500
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


PASSED_OVER: dict[str, list[Any]] = {
    "user": [5, ["x"], {}],
    "safety_identifier": [True],
    "prompt_cache_key": [{}],
    "service_tier": [1.5],
    "verbosity": [["low"]],
    "metadata": ["x", 1, []],
    "prediction": ["x", [1]],
}


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize("field", PASSED_OVER)
def test_a_field_that_says_nothing_here_is_of_its_kind_all_the_same(path: str, field: str) -> None:
    """Whoever sends another has a mistake, and is told its place."""
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "prompt": "a", "input": "a"}
    for value in PASSED_OVER[field]:
        with pytest.raises(InvalidRequest, match=field):
            ENDPOINTS[path].read({**body, field: value}, LIMITS, is_stream=False, deadline=0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stream_options", 1),
        ("max_tool_calls", "two"),
        ("include", ["message.output_text.logprobs", 1]),
        ("truncation", "most"),
        ("truncation", True),
        ("top_logprobs", 3),
    ],
)
def test_responses_take_their_own_fields_as_they_should_be(field: str, value: Any) -> None:
    """Whether they change the answer or not."""
    responses = ENDPOINTS["/responses"]
    with pytest.raises(InvalidRequest, match=field):
        responses.read({"input": "a", field: value}, LIMITS, is_stream=False, deadline=0)
    responses.read({"input": "a", "truncation": "auto", "include": ["a"]}, LIMITS, is_stream=False, deadline=0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"model": "chat", "messages": [' + b"3," * 100_000 + b"3]}", "a body may have 16384 objects in its lists"),
        (b'{"model": "chat", "messages": [' + b"{}," * 500_000 + b"{}]}", "at most 16384 objects and members"),
        (
            b'{"model": "chat", "messages": [{"role": "user", "content": [' + b"{}," * 30_000 + b"{}]}]}",
            "at most 16384 objects and members",
        ),
    ],
    ids=["wrong messages", "many objects", "many parts"],
)
async def test_a_body_of_too_many_values_is_refused_before_they_are_read(
    serving: Serving, content: bytes, message: str
) -> None:
    """One by one they would hold up everybody else for seconds."""
    answer = await serving.post("/v3/chat/completions", content=content)

    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


async def test_a_large_body_is_read_beside_the_event_loop(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small one is not worth a thread."""
    threads = []
    read = Chat.read

    def noted(self: Chat, *given: Any, **options: Any) -> Any:
        threads.append(current_thread() is not main_thread())
        return read(self, *given, **options)

    monkeypatch.setattr(Chat, "read", noted)
    generator_of(serving).limits = GenerationLimits()
    for text in ("x", "x" * 2**19):
        answer = await serving.post("/v3/chat/completions", json=chat_body(text))
        assert answer.status_code == 200
    assert threads == [False, True]


async def test_a_thousand_tools_are_taken(serving: Serving) -> None:
    """Each as it is."""
    tools = [{"type": "function", "function": {"name": f"f{number}"}} for number in range(1000)]
    answer = await serving.post("/v3/chat/completions", json=chat_body(tools=tools))

    assert answer.status_code == 200
    assert len(generator_of(serving).requests[-1].prompt.tools) == 1000  # type: ignore[union-attr]


async def test_a_client_may_leave_at_any_byte(serving: Serving) -> None:
    """Of its request, and of the answer: nothing of it goes on, and the next one is answered."""
    generator = generator_of(serving)
    request = post_of("/v3/chat/completions", chat_body("a b", stream=True))
    for size in range(0, len(request), 5):
        async with serving.connect() as peer:
            await peer.send(request[:size])
    async with serving.connect() as peer:
        await peer.send(request)
        text = b""
        with trio.fail_after(WAIT_SECONDS):
            while not text.endswith(b"0\r\n\r\n"):
                text += await peer.stream.receive_some()
    for size in range(0, len(text), 37):
        async with serving.connect() as peer:
            await peer.send(request)
            with trio.fail_after(WAIT_SECONDS):
                taken = 0
                while taken < size:
                    taken += len(await peer.stream.receive_some(size - taken))
    answer = await serving.post("/v3/chat/completions", json=chat_body("still here"))
    assert answer.json()["choices"][0]["message"]["content"] == "still here"
    await serving.wait_closed()
    assert generator.running == 0
