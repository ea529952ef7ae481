"""OpenAI's own client against a server whose queue is full: it is told when to come again, and does."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from tests.support.served_in_thread import serving_in_thread
from tests.support.tiny_llm import write_tiny_folder

pytestmark = pytest.mark.slow

MESSAGES: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    """Give the client of a server that makes one text at a time, while one request may wait."""
    folder = write_tiny_folder(tmp_path_factory.mktemp("text") / "model")
    options = {"model_name": "chat", "model_path": folder, "task": "text_generation", "cache_size": 0.05}
    with serving_in_thread(**options, max_num_seqs=1, max_queue=1) as server:
        http = openai.DefaultHttpxClient(trust_env=False, timeout=120)
        url = f"http://{server.http}/v3"
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0, http_client=http) as made:
            yield made


def _short(client: openai.OpenAI) -> openai.RateLimitError | int:
    """Ask for one token; give how many came, or what was said instead."""
    try:
        answer = client.chat.completions.create(model="chat", messages=MESSAGES, max_tokens=1)
    except openai.RateLimitError as refused:
        return refused
    return answer.usage.completion_tokens if answer.usage else 0


def _beside_a_long_text(client: openai.OpenAI, asking: openai.OpenAI) -> list[openai.RateLimitError | int]:
    """Ask four times at once while a long text is made."""
    with client.chat.completions.create(
        model="chat", messages=MESSAGES, max_tokens=1900, stream=True, extra_body={"ignore_eos": True}
    ) as stream:
        next(iter(stream))
        with ThreadPoolExecutor(4) as threads:
            return list(threads.map(_short, [asking] * 4))


def test_a_full_queue_is_an_error_with_the_time_to_come_again(client: openai.OpenAI) -> None:
    """Whoever fits into it is answered."""
    # A machine that stops the client for seconds lets the long text end before anybody has asked.
    for _ in range(5):
        came = _beside_a_long_text(client, client)
        refused = [each for each in came if isinstance(each, openai.RateLimitError)]
        if refused:
            break
    assert refused
    assert {each for each in came if isinstance(each, int)} <= {1}
    for each in refused:
        assert each.code == "rate_limit_exceeded"
        assert int(each.response.headers["retry-after"]) >= 1


def test_a_client_that_comes_again_is_answered(client: openai.OpenAI) -> None:
    """As OpenAI's does by itself."""
    came = _beside_a_long_text(client, client.with_options(max_retries=20))

    assert came == [1, 1, 1, 1]
