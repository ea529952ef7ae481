from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import trio

from ovmstrio.core.errors import ContextExceeded
from ovmstrio.core.generation import Conversation, GenerationRequest, Grammar, GrammarKind, Sampling
from ovmstrio.core.text_bounds import max_characters, size_of
from ovmstrio.openvino.engine.frames import (
    REFUSED,
    TOKENS,
    decode_failure,
    decode_request,
    encode_request,
    encode_texts,
)
from ovmstrio.openvino.engine.program import EngineProgram
from ovmstrio.openvino.engine.prompts import Prompts
from ovmstrio.openvino.engine.text_tokenizing import TextTokenizing
from ovmstrio.runtimes.generation.engine_link import EngineLink
from tests.support.scripted_channel import ScriptedChannel
from tests.support.waits import WAIT_SECONDS

CONTEXT = 2000


class _CountingTokenizer:
    """Makes a token of each ``step`` characters, and counts the characters that it is given."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.characters = 0

    def get_vocab(self) -> dict[bytes, int]:
        return {b"a" * 100: 0}

    def encode(self, texts: str | list[str], **options: Any) -> Any:
        """Return the tokens, padded to those of the longest text."""
        del options
        rows = [np.arange(-(-len(text) // self.step)) for text in ([texts] if isinstance(texts, str) else texts)]
        self.characters += sum(map(len, [texts] if isinstance(texts, str) else texts))
        longest = max(map(len, rows))
        data = np.array([np.pad(row, (longest - len(row), 0)) for row in rows])
        mask = np.array([np.pad(np.ones(len(row), np.int64), (longest - len(row), 0)) for row in rows])
        return SimpleNamespace(input_ids=SimpleNamespace(data=data), attention_mask=SimpleNamespace(data=mask))


@pytest.mark.parametrize(
    ("characters", "step", "read"),
    [
        (30_000_000, 1, 0),
        (max_characters(CONTEXT), 1, 16_000),
        (max_characters(CONTEXT), 4, 16_000),
        (200_000, 16, 16_000 + 64_000),
    ],
)
def test_at_most_a_prefix_of_a_too_long_prompt_is_tokenized(characters: int, step: int, read: int) -> None:
    tokenizer = _CountingTokenizer(step)
    prompts = Prompts(tokenizer, str, CONTEXT)
    with pytest.raises(ContextExceeded, match=f"length is {CONTEXT} tokens.*the prompt has at least"):
        prompts.tokens_of("a" * characters)
    assert tokenizer.characters == read


@pytest.mark.parametrize(("characters", "step"), [(100, 1), (CONTEXT, 1), (100_000, 100), (200_000, 128)])
def test_prompt_that_fits_has_all_its_tokens(characters: int, step: int) -> None:
    tokenizer = _CountingTokenizer(step)
    tokens = Prompts(tokenizer, str, CONTEXT).tokens_of("a" * characters)
    assert tokens == list(range(-(-characters // step)))
    assert tokenizer.characters < characters * 7 / 3 + 1


def test_size_of_a_value_is_counted_up_to_a_bound() -> None:
    assert size_of({"ab": ["c", 1, None], "d": {"e": "fgh"}}, 1000) == 1 + 3 + 1 + 4 + 1 + 1 + 4
    assert size_of("x" * 100, 10) > 10
    assert 10 < size_of([[0] * 5] * 100, 10) < 120


def _messages(content: str) -> Conversation:
    return Conversation(({"role": "user", "content": content, "name": "n"}, {"role": "assistant", "content": ""}))


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a \U0001f600 text", "a \U0001f600 text"),
        ("", ""),
        ((1, 2, 3), (1, 2, 3)),
        (_messages("\u4e2d\u6587"), _messages("\u4e2d\u6587")),
        # openvino-genai cannot read half of a surrogate pair.
        (_messages("a\ud800b"), _messages("a?b")),
        (
            Conversation((), ({"type": "function", "function": {"name": "f"}},), "required", "f", {"$": 1}),
            Conversation((), ({"type": "function", "function": {"name": "f"}},), "required", "f", {"$": 1}),
        ),
    ],
)
def test_engine_decodes_the_request_that_was_encoded(prompt: Any, expected: Any) -> None:
    sampling = Sampling(max_tokens=5, temperature=0.5, stop_token_ids=(1, 2))
    options: Any = {"stop": ("x", "\ud800"), "n": 2, "grammar": Grammar(GrammarKind.REGEX, "[ab]")}
    request = GenerationRequest(prompt, sampling, skips_special_tokens=False, **options)
    assert decode_request(encode_request(request)) == replace(request, prompt=expected)


def test_texts_are_tokenized_in_parts_until_they_are_cancelled() -> None:
    tokenizer = _CountingTokenizer(1)
    prompts = Prompts(tokenizer, str, CONTEXT)
    answers: dict[int, Any] = {}
    tokenizing = TextTokenizing(prompts.tokenize_all, answers.__setitem__)
    options = {"add_special_tokens": True}
    tokenizing.add(11, 1, encode_texts(["a" * 100_000] * 50), options)
    tokenizing.add(12, 2, encode_texts(["abc", "", "\u4e2d"]), options)
    tokenizing.go_on()
    tokenizing.go_on()
    assert tokenizer.characters == 200_000
    tokenizing.cancel(1)
    while tokenizing.is_busy:
        tokenizing.go_on()
    assert tokenizer.characters == 200_004
    assert answers[11][0] == REFUSED
    kind, tokens, counts = answers[12]
    assert (kind, tokens.tolist(), counts.tolist()) == (TOKENS, [0, 1, 2, 0], [3, 0, 1])


def test_request_cancelled_in_the_queue_never_reaches_the_engine() -> None:
    added, cancelled = [], []

    class FakeEngine:
        is_busy = False

        def add(self, message: int, number: int, request: Any) -> None:
            added.append((message, number, request))

        def cancel(self, number: int) -> None:
            cancelled.append(number)

    channel: Any = ScriptedChannel(
        ["add", 1, "first"],
        ["add", 2, "second"],
        ["tokenize", 3, encode_texts(["abc"]), {}],
        ["cancel", 2],
        ["cancel", 3],
        ["add", 4, "last"],
        has_end=True,
    )

    def answer(message: int, value: Any) -> None:
        channel.send([message, value])

    tokenizing = TextTokenizing(pytest.fail, answer)
    EngineProgram(channel, FakeEngine(), tokenizing).run()  # type: ignore[arg-type]  # a part of an engine is enough
    assert added == [(2, 1, "first"), (7, 4, "last")]
    assert cancelled == [2, 3]
    for number in (3, 4):
        kind, failure = channel.sent[number]
        assert (kind, decode_failure(failure).message) == (REFUSED, "the request was cancelled")


async def test_cancelled_call_cancels_its_texts_in_the_engine() -> None:
    called = trio.Event()
    messages: list[Any] = []

    class FakeProcess:
        async def call(self, value: Any) -> Any:
            messages.append(value[:2])
            called.set()
            await trio.sleep_forever()

        async def tell(self, value: Any) -> None:
            await trio.lowlevel.checkpoint()
            messages.append(value)

    link: Any = EngineLink(SimpleNamespace(), itertools.count(7))  # type: ignore[arg-type]  # counts no texts
    async with trio.open_nursery() as nursery:
        nursery.start_soon(link.tokenize, FakeProcess(), ["abc", "x" * 1_000_000])
        with trio.fail_after(WAIT_SECONDS):
            await called.wait()
        nursery.cancel_scope.cancel()
    assert messages == [["tokenize", 7], ["cancel", 7]]
