"""OpenAI's own client against the real server and a real, tiny model."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.support.processes import OvmsProcess, serving
from tests.support.tiny_llm import CONTEXT, write_tiny_folder

pytestmark = pytest.mark.e2e

MESSAGES: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "hello"}]
SECONDS = 120


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OvmsProcess]:
    """Serve the model as ``chat``."""
    root = tmp_path_factory.mktemp("text")
    folder = write_tiny_folder(root / "model")
    options = ("--model_name", "chat", "--model_path", str(folder), "--task", "text_generation")
    with serving(*options, log=root / "log") as running:
        yield running


@pytest.fixture
def client(server: OvmsProcess) -> Iterator[openai.OpenAI]:
    """Give the client, with no second tries."""
    http = openai.DefaultHttpxClient(trust_env=False, timeout=SECONDS)
    with openai.OpenAI(base_url=f"{server.rest}/v3", api_key="none", max_retries=0, http_client=http) as made:
        yield made


def test_the_model_is_listed(client: openai.OpenAI) -> None:
    """And told by its name."""
    assert [model.id for model in client.models.list()] == ["chat"]
    assert client.models.retrieve("chat").owned_by == "OVMS"


def test_a_chat_says_the_same_whole_and_streamed(client: openai.OpenAI) -> None:
    """With as many tokens."""
    whole = client.chat.completions.create(model="chat", messages=MESSAGES, max_tokens=12, temperature=0)
    chunks = list(
        client.chat.completions.create(
            model="chat",
            messages=MESSAGES,
            max_tokens=12,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert whole.choices[0].message.content == text
    assert text
    assert whole.usage is not None
    assert chunks[-1].usage is not None
    assert whole.usage.completion_tokens == chunks[-1].usage.completion_tokens == 12
    assert whole.usage.prompt_tokens == chunks[-1].usage.prompt_tokens
    assert chunks[-2].choices[0].finish_reason == "length"


def test_completions_take_texts_and_tokens(client: openai.OpenAI) -> None:
    """Echoed with their probabilities, where that is asked for."""
    answer = client.completions.create(
        model="chat", prompt=["the", "in"], max_tokens=3, echo=True, logprobs=1, temperature=0
    )
    tokens = client.completions.create(model="chat", prompt=[5, 6, 7], max_tokens=3)

    assert [choice.text[: len(said)] for choice, said in zip(answer.choices, ("the", "in"), strict=True)] == [
        "the",
        "in",
    ]
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    first, *others = logprobs.token_logprobs or []
    # The first one has nothing before it; the client's types know of no such token.
    assert str(first) == "None"
    assert all(value <= 0 for value in others)
    assert tokens.usage is not None
    assert tokens.usage.prompt_tokens == 3


def test_the_responses_api_answers_with_the_same_text(client: openai.OpenAI) -> None:
    """Its client puts the events together."""
    whole = client.responses.create(model="chat", input="hello", max_output_tokens=12, temperature=0)
    with client.responses.stream(model="chat", input="hello", max_output_tokens=12, temperature=0) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
    chat = client.chat.completions.create(model="chat", messages=MESSAGES, max_tokens=12, temperature=0)

    assert whole.output_text == "".join(deltas) == chat.choices[0].message.content
    assert whole.status == "incomplete"


def test_errors_are_those_that_the_client_knows(client: openai.OpenAI) -> None:
    """Each of its class, with the field."""
    with pytest.raises(openai.NotFoundError, match="The model `nothing` does not exist; there are: chat") as missing:
        client.chat.completions.create(model="nothing", messages=MESSAGES)
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError, match="temperature out of range") as wrong:
        client.chat.completions.create(model="chat", messages=MESSAGES, temperature=3)
    assert wrong.value.param == "temperature"
    long: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "x" * 2 * CONTEXT}]
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as beyond:
            client.chat.completions.create(model="chat", messages=long, stream=stream)
        assert beyond.value.code == "context_length_exceeded"


def test_a_stream_may_be_left_and_the_next_is_answered(client: openai.OpenAI) -> None:
    """As often as one likes."""
    for _ in range(5):
        stream = client.chat.completions.create(
            model="chat", messages=MESSAGES, max_tokens=1500, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        stream.close()
    answer = client.chat.completions.create(model="chat", messages=MESSAGES, max_tokens=2)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 2
