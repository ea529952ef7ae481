"""Work of an engine for long texts and cancelled requests, counted in calls."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import trio

from ovmstrio.core.errors import ContextExceeded
from ovmstrio.core.generation import Conversation, GenerationRequest, Grammar, GrammarKind, Sampling
from ovmstrio.core.text_bounds import max_characters, prefix_lengths, size_of
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
from ovmstrio.work.messages.message_packets import Message
from tests.support.waits import WAIT_SECONDS

CONTEXT = 2000


class CountingTokenizer:
    """Makes a token of each ``step`` characters, and counts the characters that it is given."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.characters = 0

    def get_vocab(self) -> dict[bytes, int]:
        """Return a vocabulary whose longest token has 100 bytes."""
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
def test_of_a_prompt_that_cannot_fit_a_prefix_is_tokenized_at_most(characters: int, step: int, read: int) -> None:
    """None of it if its characters say so; the error tells how many tokens there are at least."""
    tokenizer = CountingTokenizer(step)
    prompts = Prompts(tokenizer, str, CONTEXT)
    with pytest.raises(ContextExceeded, match=f"length is {CONTEXT} tokens.*the prompt has at least"):
        prompts.tokens_of("a" * characters)
    assert tokenizer.characters == read


@pytest.mark.parametrize(("characters", "step"), [(100, 1), (CONTEXT, 1), (100_000, 100), (200_000, 128)])
def test_a_prompt_that_fits_has_all_its_tokens(characters: int, step: int) -> None:
    """Also one of few and long tokens, of which prefixes are tokenized first."""
    tokenizer = CountingTokenizer(step)
    tokens = Prompts(tokenizer, str, CONTEXT).tokens_of("a" * characters)
    assert tokens == list(range(-(-characters // step)))
    assert tokenizer.characters < characters * 7 / 3 + 1


def test_prefixes_grow_to_the_text() -> None:
    """A short text is its only prefix."""
    assert list(prefix_lengths(10, 5)) == [10]
    assert list(prefix_lengths(4096, 5)) == [4096]
    assert list(prefix_lengths(100_000, 5)) == [4096, 16_384, 65_536, 100_000]


def test_the_size_of_a_value_is_counted_up_to_a_bound() -> None:
    """Keys, texts and members count; the rest of a large value is not looked at."""
    assert size_of({"ab": ["c", 1, None], "d": {"e": "fgh"}}, 1000) == 1 + 3 + 1 + 4 + 1 + 1 + 4
    assert size_of("x" * 100, 10) > 10
    assert 10 < size_of([[0] * 5] * 100, 10) < 120


@pytest.mark.parametrize(
    "prompt",
    [
        "a \ud83d\ude00 text",
        "",
        (1, 2, 3),
        Conversation(
            ({"role": "user", "content": "\u4e2d\u6587", "name": "n"}, {"role": "assistant", "content": ""}),
            ({"type": "function", "function": {"name": "f", "parameters": {}}},),
            "required",
            "f",
            {"$": 1},
        ),
    ],
)
def test_a_request_is_the_same_in_the_engine(prompt: Any) -> None:
    """Whatever its prompt is."""
    grammar = Grammar(GrammarKind.REGEX, "[ab]")
    sampling = Sampling(max_tokens=5, temperature=0.5, stop_token_ids=(1, 2))
    asked = GenerationRequest(prompt, sampling, stop=("x",), n=2, grammar=grammar, skips_special_tokens=False)
    if isinstance(prompt, str):
        asked = GenerationRequest(prompt.encode("utf-16", "surrogatepass").decode("utf-16"), sampling)
    assert decode_request(encode_request(asked)) == asked


def test_half_of_a_surrogate_pair_is_a_question_mark_in_the_engine() -> None:
    """The library cannot read it."""
    asked = GenerationRequest(Conversation(({"role": "user", "content": "a\ud800b"},)), stop=("\ud800",))
    decoded = decode_request(encode_request(asked))
    assert isinstance(decoded.prompt, Conversation)
    assert decoded.prompt.messages[0]["content"] == "a?b"
    assert decoded.stop == ("\ud800",)


def test_texts_are_tokenized_a_few_at_a_time_until_their_client_leaves() -> None:
    """The rest of the texts of a cancelled request is not tokenized, and another request is answered."""
    tokenizer = CountingTokenizer(1)
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


class EndingChannel:
    """Has messages that have all come, and the end behind them."""

    def __init__(self, *messages: list[Any]) -> None:
        self._messages: list[Message | None] = [Message(list(each)) for each in enumerate(messages, start=2)]
        self._messages.append(None)
        self.sent: dict[int, Any] = {}

    def has_message(self) -> bool:
        """Return whether there is one more, or the end."""
        return bool(self._messages)

    def receive(self) -> Message | None:
        """Return the next message, None for the end."""
        return self._messages.pop(0)

    def send(self, value: Any) -> None:
        """Keep an answer by the number of its message."""
        self.sent[value[0]] = value[1]


def test_no_work_is_done_for_a_request_whose_cancellation_has_come() -> None:
    """It is answered, so that nothing waits for it; the requests around it reach the engine."""
    added, cancelled = [], []

    class FakeEngine:
        is_busy = False

        def add(self, message: int, number: int, request: Any) -> None:
            added.append((message, number, request))

        def cancel(self, number: int) -> None:
            cancelled.append(number)

    channel = EndingChannel(
        ["add", 1, "first"],
        ["add", 2, "second"],
        ["tokenize", 3, encode_texts(["abc"]), {}],
        ["cancel", 2],
        ["cancel", 3],
        ["add", 4, "last"],
    )

    def answer(message: int, value: Any) -> None:
        channel.send([message, value])

    tokenizing = TextTokenizing(pytest.fail, answer)
    EngineProgram(channel, FakeEngine(), tokenizing).run()  # type: ignore[arg-type]  # parts of each are enough
    assert added == [(2, 1, "first"), (7, 4, "last")]
    assert cancelled == [2, 3]
    for number in (3, 4):
        kind, failure = channel.sent[number]
        assert (kind, decode_failure(failure).message) == (REFUSED, "the request was cancelled")


async def test_a_client_that_leaves_ends_its_texts_in_the_engine() -> None:
    """The engine receives a cancellation with the number of the request."""
    asked = trio.Event()
    told: list[Any] = []

    class FakeProcess:
        async def call(self, value: Any) -> Any:
            told.append(value[:2])
            asked.set()
            await trio.sleep_forever()

        async def tell(self, value: Any) -> None:
            await trio.lowlevel.checkpoint()
            told.append(value)

    link: Any = EngineLink(SimpleNamespace(), itertools.count(7))  # type: ignore[arg-type]  # counts no texts
    async with trio.open_nursery() as nursery:
        nursery.start_soon(link.tokenize, FakeProcess(), ["abc", "x" * 1_000_000])
        with trio.fail_after(WAIT_SECONDS):
            await asked.wait()
        nursery.cancel_scope.cancel()
    assert told == [["tokenize", 7], ["cancel", 7]]
