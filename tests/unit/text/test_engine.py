from __future__ import annotations

import itertools
import math
import select
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, cast
from unittest.mock import Mock

import numpy as np
import pytest
import trio
import trio.testing
from openvino_genai.py_openvino_genai import GenerationConfig, GenerationStatus
from trio.testing import MockClock

from ovmstrio.core.errors import ContextExceeded, ModelFailure, NotReady, WorkerRestarting
from ovmstrio.core.generation import Conversation, GenerationRequest, Grammar, GrammarKind, Image, Sampling
from ovmstrio.core.worker_peers import StreamedResult
from ovmstrio.inference.engine import batch as batch_module
from ovmstrio.inference.engine.batch import Batch, QueuedRequest
from ovmstrio.inference.engine.engine import EngineProgram, TokenBytes, TokenizeQueue
from ovmstrio.inference.engine.grammar_precompile import GrammarCompiler, GrammarQueue
from ovmstrio.inference.engine.messages import (
    REJECTED,
    TOKENS,
    decode_failure,
    decode_request,
    encode_request,
    encode_texts,
)
from ovmstrio.inference.engine.pipeline import NO_TOP_K, ImagePrompt, Pipeline, configure_generation
from ovmstrio.inference.engine.prompts import PromptOptions, PromptTokenizer
from ovmstrio.inference.engine.tokenizer import find_token_bound
from ovmstrio.isolation.worker_process import WorkerProcess
from ovmstrio.text.engine_client import EngineClient
from ovmstrio.text.engine_sharing import ANSWERED, GENERATION_VERBS, LEAVING, LOST, READY, EngineServer, RemoteEngine
from ovmstrio.util.truncation import max_characters, size_of
from ovmstrio.workers.owners import CALL_ENGINE, LISTEN_ENGINE, OwnerTimeouts, WorkerEngines
from ovmstrio.workers.rpc import WorkerRpc
from tests.support.scripted_channel import ScriptedChannel
from tests.support.waits import WAIT_SECONDS

CONTEXT = 2000


class _CountingTokenizer:
    def __init__(self, step: int) -> None:
        self.step = step
        self.characters = 0

    def get_vocab(self) -> dict[bytes, int]:
        return {b"a" * 100: 0}

    def encode(self, texts: str | list[str], **options: Any) -> Any:
        self.options = options
        rows = [np.arange(-(-len(text) // self.step)) for text in ([texts] if isinstance(texts, str) else texts)]
        self.characters += sum(map(len, [texts] if isinstance(texts, str) else texts))
        longest = max(map(len, rows))
        data = np.array([np.pad(row, (longest - len(row), 0)) for row in rows])
        mask = np.array([np.pad(np.ones(len(row), np.int64), (longest - len(row), 0)) for row in rows])
        return SimpleNamespace(input_ids=SimpleNamespace(data=data), attention_mask=SimpleNamespace(data=mask))


@pytest.mark.parametrize(
    ("count_tokens", "bound"),
    [
        (lambda characters: characters // 2, None),
        (lambda characters: min(characters // 2, 64), 64),
        (lambda characters: min(characters // 2, 2000), 2000),
        (lambda characters: min(characters // 2, 2001), None),
        (lambda characters: characters // 9, None),
        (lambda _: 0, None),
        (lambda _: 1, None),
    ],
)
def test_bound_of_a_tokenizer_is_found_up_to_the_context(count_tokens: Callable[[int], int], bound: int | None) -> None:
    def encode(text: str, **_: Any) -> Any:
        return SimpleNamespace(attention_mask=SimpleNamespace(data=np.ones((1, count_tokens(len(text))), np.int64)))

    assert find_token_bound(SimpleNamespace(encode=encode), CONTEXT) == bound


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
    prompts = PromptTokenizer(tokenizer, str, CONTEXT)
    with pytest.raises(ContextExceeded, match=f"length is {CONTEXT} tokens.*the prompt has at least"):
        prompts.tokenize_prompt("a" * characters)
    assert tokenizer.characters == read


@pytest.mark.parametrize(("characters", "step"), [(100, 1), (CONTEXT, 1), (100_000, 100), (200_000, 128)])
def test_prompt_that_fits_has_all_its_tokens(characters: int, step: int) -> None:
    tokenizer = _CountingTokenizer(step)
    tokens = PromptTokenizer(tokenizer, str, CONTEXT).tokenize_prompt("a" * characters)
    assert tokens == list(range(-(-characters // step)))
    assert tokenizer.characters < characters * 7 / 3 + 1


_MARKED_UP: Final = (b"<s>", "▁Hi".encode(), "▁there".encode(), b"<0xE6>", b"<0x97>", b"<0xA5>", b"!", b"a")
"""Vocabulary of a tokenizer that writes spaces and bytes in marks, and drops the space at the beginning of a text."""


class _MarkedUpTokenizer:
    def get_vocab(self) -> dict[bytes, int]:
        return {token: number for number, token in enumerate(_MARKED_UP)}

    def encode(self, text: str, **options: Any) -> Any:
        del options
        return SimpleNamespace(input_ids=SimpleNamespace(data=np.array([[_MARKED_UP.index(text.encode())]])))

    def decode(self, rows: list[list[int]], skips_special_tokens: bool) -> list[str]:
        return [self._text(row, skips_special_tokens=skips_special_tokens) for row in rows]

    def _text(self, row: list[int], *, skips_special_tokens: bool) -> str:
        written = [_MARKED_UP[token] for token in row if token or not skips_special_tokens]
        data = [bytes.fromhex(each[3:5].decode()) if each.startswith(b"<0x") else each for each in written]
        return b"".join(data).replace("▁".encode(), b" ").decode(errors="replace").removeprefix(" ")


@pytest.mark.parametrize(
    ("text", "tokens", "expected"),
    [
        ("Hi there", [1, 2], [(b"Hi", 0), (b" there", 2)]),
        ("Hi there", [0, 1, 2], [(b"<s>", 0), (b"Hi", 0), (b" there", 2)]),
        ("Hi日!", [1, 3, 4, 5, 6], [(b"Hi", 0), (b"\xe6", 2), (b"\x97", 2), (b"\xa5", 2), (b"!", 3)]),
        ("Hi é there", [1, 6, 2], [(b"Hi", 0), (b"!", 2), (b" there", 4)]),
    ],
    ids=["words", "special token", "parts of a character", "text that the tokenizer has changed"],
)
def test_tokens_of_a_marked_up_vocabulary_have_the_bytes_of_the_text(
    text: str, tokens: list[int], expected: list[tuple[bytes, int]]
) -> None:
    tokenizer = _MarkedUpTokenizer()
    token_bytes = TokenBytes(tokenizer, tokenizer.decode)
    token_bytes.learn(tokens)
    assert list(token_bytes.split(text, tokens)) == expected


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
        (
            replace(_messages("a"), continues_final_message=True),
            replace(_messages("a"), continues_final_message=True),
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
    prompts = PromptTokenizer(tokenizer, str, CONTEXT)
    answers: dict[int, Any] = {}
    tokenizing = TokenizeQueue(prompts.tokenize_all, answers.__setitem__)
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
    assert answers[11][0] == REJECTED
    kind, tokens, counts = answers[12]
    assert (kind, tokens.tolist(), counts.tolist()) == (TOKENS, [0, 1, 2, 0], [3, 0, 1])


def test_request_cancelled_in_the_queue_never_reaches_the_engine() -> None:
    added: list[Any] = []
    cancelled: list[int] = []
    engine: Any = SimpleNamespace(is_busy=False, add=lambda *args: added.append(args), cancel=cancelled.append)
    channel: Any = ScriptedChannel(
        ["add", 1, "first"],
        ["add", 2, "second"],
        ["tokenize", 3, encode_texts(["abc"]), {}],
        ["cancel", 2],
        ["cancel", 3],
        ["add", 4, "last"],
        has_end=True,
    )

    tokenizing = TokenizeQueue(pytest.fail, lambda message, value: channel.send([message, value]))
    EngineProgram(channel, engine, tokenizing).run()
    assert added == [(2, 1, "first"), (7, 4, "last")]
    assert cancelled == [2, 3]
    for number in (3, 4):
        kind, failure = channel.sent[number]
        assert (kind, decode_failure(failure).message) == (REJECTED, "the request was cancelled")


async def test_cancelled_call_cancels_its_texts_in_the_engine() -> None:
    called = trio.Event()
    messages: list[Any] = []

    class FakeProcess:
        async def call(self, value: Any) -> Any:
            messages.append(value[:2])
            called.set()
            await trio.sleep_forever()

        async def notify(self, value: Any) -> None:
            await trio.lowlevel.checkpoint()
            messages.append(value)

    link: Any = EngineClient(SimpleNamespace(), itertools.count(7))  # type: ignore[arg-type]  # counts no texts
    async with trio.open_nursery() as nursery:
        nursery.start_soon(link.tokenize, FakeProcess(), ["abc", "x" * 1_000_000])
        with trio.fail_after(WAIT_SECONDS):
            await called.wait()
        nursery.cancel_scope.cancel()
    assert messages == [["tokenize", 7], ["cancel", 7]]


class _Compiler:
    def __init__(self, **errors: Exception) -> None:
        self.errors = errors
        self.compiled: list[str] = []

    def ask(self, request: GenerationRequest) -> str:
        return "" if request.grammar is None else request.grammar.text

    def compile(self, config: Any) -> None:
        self.compiled.append(config)
        if config in self.errors:
            raise self.errors[config]


def _form_request(number: int, form: str) -> QueuedRequest:
    request = GenerationRequest("", grammar=Grammar(GrammarKind.REGEX, form))
    return QueuedRequest(number, 0, request, [1], 10, 1, is_grammar_proven=False)


def _waiting(compiler: _Compiler, forms: str) -> tuple[GrammarQueue, list[QueuedRequest]]:
    trials = GrammarQueue(cast("Any", compiler))
    requests = [_form_request(number, form) for number, form in enumerate(forms)]
    for each in requests:
        trials.wait(each)
    return trials, requests


def _ended(trials: GrammarQueue) -> Any:
    while not trials.has_ended:
        assert select.select([trials.descriptor], [], [], WAIT_SECONDS)[0], "no trial has ended"
    return trials.take()


def _run(trials: GrammarQueue) -> list[tuple[int, str]]:
    outcomes = []
    while trials.waiting:
        trials.go_on(may_compile=True)
        asked, error = _ended(trials)
        outcomes.append((asked.id, "" if error is None else str(error)))
    return outcomes


def test_form_is_compiled_once_for_all_its_requests() -> None:
    compiler = _Compiler()
    trials, requests = _waiting(compiler, "abab")
    assert trials.waiting == len(requests)
    assert _run(trials) == [(0, ""), (1, ""), (2, ""), (3, "")]
    trials.wait(_form_request(4, "a"))
    assert _run(trials) == [(4, "")]
    assert compiler.compiled == ["a", "b"]
    assert all(each.is_grammar_proven for each in requests)


def test_form_that_openvino_refuses_fails_each_of_its_requests() -> None:
    compiler = _Compiler(a=RuntimeError("there is no such form"))
    trials, _ = _waiting(compiler, "aab")
    outcomes = _run(trials)
    assert [number for number, why in outcomes if "there is no such form" in why] == [0, 1]
    assert outcomes[2] == (2, "")
    assert compiler.compiled == ["a", "a", "b"]


def test_form_that_cannot_be_tried_is_left_to_the_batch() -> None:
    trials, (request,) = _waiting(_Compiler(a=FileNotFoundError("openvino_model.xml")), "a")
    assert _run(trials) == [(0, "")]
    assert not request.is_grammar_proven


@pytest.mark.parametrize("runs", [False, True])
def test_withdrawn_request_is_left_out_and_the_next_is_tried(*, runs: bool) -> None:
    compiler = _Compiler()
    trials, requests = _waiting(compiler, "abc")
    trials.go_on(may_compile=True)
    leaving = requests[0] if runs else requests[1]
    assert trials.withdraw(leaving)
    assert not trials.withdraw(leaving)
    assert trials.waiting == 2
    first = _ended(trials)
    assert (first is None) is runs
    assert [number for number, _ in _run(trials)] == ([1, 2] if runs else [2])
    assert compiler.compiled == (["a", "b", "c"] if runs else ["a", "c"])


def test_only_known_forms_pass_while_nothing_may_be_compiled() -> None:
    compiler = _Compiler()
    trials, _ = _waiting(compiler, "a")
    assert _run(trials) == [(0, "")]
    for number, form in enumerate("aab", 1):
        trials.wait(_form_request(number, form))
    for number in (1, 2):
        trials.go_on(may_compile=False)
        assert trials.has_ended
        passed, _ = _ended(trials)
        assert passed.id == number
    trials.go_on(may_compile=False)
    assert not trials.has_ended
    assert compiler.compiled == ["a"]
    assert _run(trials) == [(3, "")]


def test_missing_compiler_raises_lookup_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GrammarCompiler, "_make", Mock(side_effect=RuntimeError("there is no room on the disk")))
    none: Any = None
    with pytest.raises(LookupError, match="grammar check not available: there is no room on the disk"):
        GrammarCompiler(none, tmp_path).compile((none, none))


_BREAKS: Final = 999
_LONG: Final = 100
_STEPS_OF_LONG: Final = 3
_POISON: Final = GenerationRequest("", grammar=Grammar(GrammarKind.REGEX, "("))


class _Handle:
    def __init__(self, prompt: Any, config: Any) -> None:
        self.prompt = prompt
        self.breaks = _BREAKS in prompt or config.structured_output_config is not None
        self.left = _STEPS_OF_LONG if len(prompt) >= _LONG else 1
        self.length = len(prompt)
        self.unread: list[int] = []
        self.is_cancelled = False

    def can_read(self) -> bool:
        return bool(self.unread)

    def read(self) -> dict[int, Any]:
        tokens, self.unread = self.unread, []
        return {0: SimpleNamespace(generated_ids=tokens, generated_log_probs=[0.0] * len(tokens), finish_reason=None)}

    def get_status(self) -> GenerationStatus:
        return GenerationStatus.RUNNING

    def cancel(self) -> None:
        self.is_cancelled = True


class _Library:
    batched_tokens = 256
    blocks = 100
    block_tokens = 32
    proposes = False
    has_eagle3_draft = False
    min_tokens = 0

    def draft_tokens(self, _: Sampling) -> int:
        return 0

    def __init__(self, *, caches_prefixes: bool) -> None:
        self.caches_prefixes = caches_prefixes
        self.handles: list[_Handle] = []
        self.is_busy = False

    def defaults(self) -> Any:
        return GenerationConfig()

    def add(self, _: int, tokens: list[int], config: Any) -> _Handle:
        self.handles.append(_Handle(tokens, config))
        return self.handles[-1]

    def step(self) -> None:
        self.handles = [each for each in self.handles if not each.is_cancelled]
        if any(each.breaks for each in self.handles):
            raise RuntimeError("such a text there is not")
        for each in self.handles:
            each.left = max(0, each.left - 1)
            if not each.left:
                each.unread.append(each.length)
                each.length += 1

    def rebuild(self) -> None:
        self.handles.clear()


def _batch(*, caches_prefixes: bool = False) -> Batch:
    return Batch(cast("Pipeline", _Library(caches_prefixes=caches_prefixes)))


def _begin(batch: Batch, number: int, request: GenerationRequest, prompt: list[int]) -> QueuedRequest:
    asked = QueuedRequest(number, 0, request, prompt, 1_000, 1, is_grammar_proven=request.grammar is None)
    batch.begin(asked)
    return asked


def _tokens(batch: Batch, asked: QueuedRequest, steps: int) -> list[int]:
    return [token for _ in range(steps) for new in batch.step().news if new.asked is asked for token in new.tokens]


def _outcomes(batch: Batch, steps: int) -> tuple[list[QueuedRequest], dict[int, list[int]]]:
    failed: list[QueuedRequest] = []
    reported: dict[int, list[int]] = defaultdict(list)
    for _ in range(steps):
        outcome = batch.step()
        failed += [asked for asked, _ in outcome.failed]
        for new in outcome.news:
            reported[new.asked.id] += new.tokens
    return failed, reported


def test_text_restarted_twice_reports_each_token_once() -> None:
    batch = _batch()
    text = _begin(batch, 1, GenerationRequest("", Sampling(frequency_penalty=0.5)), [7] * 10)
    reported = _tokens(batch, text, 10)
    for number, steps in ((2, 4), (3, 15)):
        _begin(batch, number, _POISON, [8] * 10)
        assert [asked.id for asked, _ in batch.step().failed] == [number]
        reported += _tokens(batch, text, steps)
    assert reported == list(range(10, 25))
    assert batch.rebuilds == 2


def test_text_about_an_image_is_read_again_when_it_is_restarted() -> None:
    library = _Library(caches_prefixes=False)
    batch = Batch(cast("Pipeline", library))
    prompt = ImagePrompt("<ov_genai_image_0>", (Image(b"file", ""),))
    text = QueuedRequest(1, 0, GenerationRequest(""), [-1] * 16, 1_000, 1, image_prompt=prompt)
    batch.begin(text)
    reported = _tokens(batch, text, 10)
    _begin(batch, 2, _POISON, [8] * 10)
    assert [asked.id for asked, _ in batch.step().failed] == [2]
    assert [handle.prompt for handle in library.handles] == [prompt]
    reported += _tokens(batch, text, 15)
    assert reported == list(range(reported[0], reported[0] + 15))


def test_text_cancelled_before_its_restart_leaves_the_batch_at_once() -> None:
    batch = _batch(caches_prefixes=True)
    base = list(range(64))
    first = _begin(batch, 1, GenerationRequest(""), base)
    batch.step()
    batch.cancel(first)
    asked = [_begin(batch, number, GenerationRequest(""), [*base, *[number] * 60]) for number in (2, 3)]
    batch.step()
    _begin(batch, 4, _POISON, [8] * 10)
    assert [asked.id for asked, _ in batch.step().failed] == [4]
    assert batch.running == 2
    assert batch.cancel(asked[1]) is False
    assert batch.running == 1


@pytest.mark.parametrize("first", [False, True])
def test_only_the_new_text_that_breaks_the_step_fails(*, first: bool) -> None:
    batch = _batch()
    before = _begin(batch, 1, GenerationRequest(""), [7] * 10)
    assert _tokens(batch, before, 3) == [10, 11, 12]
    prompts = [[_BREAKS], [8] * 10] if first else [[8] * 10, [_BREAKS]]
    asked = [_begin(batch, number, GenerationRequest(""), prompt) for number, prompt in enumerate(prompts, 2)]
    good = asked[first]
    failed, reported = _outcomes(batch, 10)
    assert failed == [asked[not first]]
    assert reported[before.id] == list(range(13, 21))
    assert reported[good.id][:4] == [10, 11, 12, 13]
    assert batch.rebuilds == 2


def test_running_text_fails_if_the_step_fails_without_the_new_ones() -> None:
    library = _Library(caches_prefixes=False)
    batch = Batch(cast("Pipeline", library))
    old = _begin(batch, 1, GenerationRequest(""), [7] * 10)
    batch.step()
    library.handles[0].breaks = True
    asked = [_begin(batch, number, GenerationRequest(""), [8] * 10) for number in (2, 3)]
    assert batch.step().failed == []
    library.handles[0].breaks = True
    failed, reported = _outcomes(batch, 5)
    assert failed == [old]
    assert [reported[each.id] for each in asked] == [[10, 11, 12, 13], [10, 11, 12]]


@pytest.mark.parametrize(("seconds", "tokens"), [(0.001, 20), (0.001, 100), (10, 20), (10, 40), (10, 100)])
def test_long_prompt_and_newcomers_progress_at_any_speed(
    monkeypatch: pytest.MonkeyPatch, seconds: float, tokens: int
) -> None:
    monkeypatch.setitem(globals(), "_LONG", math.inf)
    clock = itertools.count(0, seconds)
    monkeypatch.setattr(batch_module, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    batch = _batch(caches_prefixes=True)
    for number in range(6):
        # The model's speed is learned; a slow one reads a block of 32 tokens per step.
        batch.cancel(_begin(batch, number, GenerationRequest(""), [number] * 64))
        batch.step()
    long = _begin(batch, 10, GenerationRequest(""), list(range(1_000, 1_640)))
    read, newcomers = set(), 0
    for number in range(11, 100):
        outcome = batch.step()
        read |= {new.asked.id for new in outcome.news}
        for new in outcome.news:
            batch.cancel(new.asked)
        newcomer = QueuedRequest(number, 0, GenerationRequest(""), [5_000 + number] * tokens, 1_000, 1)
        if batch.takes(newcomer):
            batch.begin(newcomer)
            newcomers += 1
    assert long.id in read
    assert newcomers > 40
    assert len(read) > 10


MOCK_SECONDS = 600


class _Owner:
    row, rows = 1, 2

    def __init__(self) -> None:
        self.is_leaving = False
        self.ended = trio.Event()
        self.begun: list[Any] = []

    async def call(self, _: int, __: str, value: Any) -> Any:
        await trio.lowlevel.checkpoint()
        if self.is_leaving:
            return [LEAVING, None]
        self.begun.append(value)
        return [ANSWERED, "accepted"]

    async def listen(self, _: int, __: str, heard: Callable[[Any], None]) -> None:
        if self.is_leaving:
            raise NotReady("it is being closed")
        heard([READY, {}])
        await self.ended.wait()

    async def wait_change(self) -> None:
        await trio.sleep(1)

    def wait_seconds(self, _: int) -> float:
        return 20


class _TimedLibrary(_Library):
    def __init__(self) -> None:
        super().__init__(caches_prefixes=True)
        self.now = 0.0
        self.step_seconds = 0.0

    def step(self) -> None:
        super().step()
        self.now += self.step_seconds


def test_short_prompts_raise_the_limit_that_slow_steps_have_lowered(monkeypatch: pytest.MonkeyPatch) -> None:
    library = _TimedLibrary()
    batch = Batch(cast("Pipeline", library))
    monkeypatch.setattr("ovmstrio.inference.engine.batch.time", SimpleNamespace(perf_counter=lambda: library.now))
    numbers = itertools.count(1)

    def takes_two(count: int, seconds: float) -> bool:
        """Run a prompt in a step, and return whether another one can join it."""
        number, library.step_seconds = next(numbers), seconds
        asked = _begin(batch, number, GenerationRequest(""), [number] * count)
        takes = batch.takes(replace(asked, prompt=[0] * 20))
        batch.step()
        batch.cancel(asked)
        return takes

    assert takes_two(20, 0.01)
    assert [takes_two(64, 10) for _ in range(4)] == [True, True, False, False]
    assert not takes_two(20, 10)
    assert not takes_two(20, 0.01)
    assert takes_two(20, 10)
    assert takes_two(20, 0.01)


async def test_request_waits_while_its_owner_is_replaced(autojump_clock: MockClock) -> None:
    owner, lost = _Owner(), list[str]()
    engine = RemoteEngine(cast("Any", owner), 0, "m k", lambda _: None, lost.append)
    answers: list[Any] = []
    answered = trio.Event()

    async def ask() -> None:
        answers.append(await engine.call(["add", 3, {"n": 1}]))
        answered.set()

    with trio.fail_after(MOCK_SECONDS):
        async with trio.open_nursery() as nursery:
            await nursery.start(engine.run)
            owner.is_leaving = True
            nursery.start_soon(ask)
            await trio.sleep(5)
            owner.ended.set()
            await trio.sleep(5)
            assert (answers, engine.unready_reason != "") == ([], True)
            owner.is_leaving, owner.ended = False, trio.Event()
            await answered.wait()
            nursery.cancel_scope.cancel()
    assert (answers, lost, len(owner.begun)) == (["accepted"], [], 1)


async def test_request_fails_if_its_owner_does_not_return_in_time(autojump_clock: MockClock) -> None:
    owner = _Owner()
    engine = RemoteEngine(cast("Any", owner), 0, "m k", lambda _: None, lambda _: None)
    async with trio.open_nursery() as nursery:
        await nursery.start(engine.run)
        owner.is_leaving = True
        owner.ended.set()
        await trio.testing.wait_all_tasks_blocked()
        began = trio.current_time()
        for ask in (engine.ready, partial(engine.call, ["add", 3, {"n": 1}])):
            with trio.fail_after(MOCK_SECONDS), pytest.raises(WorkerRestarting, match="send the request again"):
                await ask()
        assert trio.current_time() - began == 40
        nursery.cancel_scope.cancel()


class _Process:
    def __init__(self, *, has_room: bool = True) -> None:
        self.reported: list[Any] = []
        self._has_room = has_room

    async def call(self, _: Any) -> Any:
        if not self._has_room:
            await trio.sleep_forever()
        return ["accepted"]

    async def notify(self, value: Any) -> None:
        self.reported.append(value)


class _Shown(EngineServer):
    def __init__(self, process: _Process | None = None) -> None:
        self._process = process or _Process()
        sharing = cast("Any", _Owner())
        super().__init__(
            sharing,
            "m k",
            GENERATION_VERBS,
            options={},
            name="m",
            on_message=lambda _: None,
            on_exit=lambda _: None,
            program="none",
        )
        self._loaded.set()

    async def ready(self) -> WorkerProcess:
        return cast("WorkerProcess", self._process)

    async def cancel_abandoned(self, *, task_status: trio.TaskStatus[None]) -> None:
        self._abandoned, abandoned = trio.open_memory_channel[tuple[int, int]](math.inf)
        task_status.started()
        await self._cancel_abandoned(abandoned)

    def send_step(self, frame: Any) -> None:
        self._on_message(frame)


async def _updates(session: StreamedResult) -> list[str]:
    return [kind async for kind, _ in session]


async def test_owner_that_leaves_reports_requests_that_have_not_ended(autojump_clock: MockClock) -> None:
    for number, expected in ((2, [READY, LOST]), (None, [READY])):
        engine = _Shown()
        session = await engine.listen(0)
        if number is not None:
            assert await engine.call(0, ["add", number, {"n": 1}]) == [ANSWERED, ["accepted"]]
        with trio.fail_after(MOCK_SECONDS):
            await engine.leave(5)
            assert await _updates(session) == expected


async def test_requests_that_wait_for_room_end_with_their_worker() -> None:
    process = _Process(has_room=False)
    engine = _Shown(process)
    async with trio.open_nursery() as nursery:
        await nursery.start(engine.cancel_abandoned)
        session = await engine.listen(0)
        for number in (2, 4):
            nursery.start_soon(engine.call, 0, ["add", number, {"n": 1}])
        await trio.testing.wait_all_tasks_blocked()
        assert (engine.open, process.reported) == (2, [])
        session.close()
        with trio.fail_after(MOCK_SECONDS):
            await engine.idle()
        nursery.cancel_scope.cancel()
    assert sorted(process.reported) == [["cancel", 2], ["cancel", 4]]


async def test_request_whose_call_is_cancelled_is_cancelled_in_the_engine() -> None:
    process = _Process(has_room=False)
    engine = _Shown(process)
    async with trio.open_nursery() as nursery:
        await nursery.start(engine.cancel_abandoned)
        await engine.listen(0)
        with trio.CancelScope() as scope:
            nursery.start_soon(_cancel_when_blocked, scope)
            await engine.call(0, ["add", 2, {"n": 1}])
        with trio.fail_after(MOCK_SECONDS):
            await engine.idle()
        nursery.cancel_scope.cancel()
    assert process.reported == [["cancel", 2]]


async def _cancel_when_blocked(scope: trio.CancelScope) -> None:
    await trio.testing.wait_all_tasks_blocked()
    scope.cancel()


async def test_stream_of_a_new_worker_begins_without_requests_of_its_predecessor() -> None:
    process = _Process()
    engine = _Shown(process)
    async with trio.open_nursery() as nursery:
        await nursery.start(engine.cancel_abandoned)
        old = await engine.listen(0)
        assert await engine.call(0, ["add", 2, {"n": 1}]) == [ANSWERED, ["accepted"]]
        with trio.fail_after(MOCK_SECONDS):
            new = await engine.listen(0)
        assert (engine.open, process.reported) == (0, [["cancel", 2]])
        assert await engine.call(0, ["add", 2, {"n": 1}]) == [ANSWERED, ["accepted"]]
        old.close()
        await trio.testing.wait_all_tasks_blocked()
        assert (engine.open, process.reported) == (1, [["cancel", 2]])
        new.close()
        with trio.fail_after(MOCK_SECONDS):
            await engine.idle()
        nursery.cancel_scope.cancel()


async def test_worker_that_does_not_read_loses_its_requests_and_little_is_kept_for_it() -> None:
    process = _Process()
    engine = _Shown(process)
    text = "x" * 2**20
    async with trio.open_nursery() as nursery:
        await nursery.start(engine.cancel_abandoned)
        session = await engine.listen(0)
        assert await engine.call(0, ["add", 2, {"n": 1}]) == [ANSWERED, ["accepted"]]
        for _ in range(16):
            engine.send_step([[[2, 0, text, 1, None, None]], [], None])
        assert engine.open == 1
        for _ in range(2):
            engine.send_step([[[2, 0, text, 1, None, None]], [], None])
        with trio.fail_after(MOCK_SECONDS):
            await engine.idle()
            assert await _updates(session) == [LOST]
        assert process.reported == [["cancel", 2]]
        assert await engine.call(0, ["add", 4, {"n": 1}]) == [LEAVING, None]
        nursery.cancel_scope.cancel()


class _NoPeers:
    rows, row = 2, 0


class _NoWait:
    def seconds(self, _: int) -> float:
        return 0


class _Engine:
    def __init__(self, name: str) -> None:
        self._name = name

    async def call(self, _: int, __: Any) -> str:
        return self._name

    async def listen(self, _: int) -> str:
        return self._name

    async def leave(self, _: float) -> None:
        pass


def _engines() -> WorkerEngines:
    return WorkerEngines(cast("WorkerRpc", _NoPeers()), cast("OwnerTimeouts", _NoWait()))


async def test_worker_of_other_settings_gets_the_engine_of_the_owner(autojump_clock: MockClock) -> None:
    engines = _engines()
    old, new = cast("Any", _Engine("old")), cast("Any", _Engine("new"))
    with engines.exported("m 1", old), trio.fail_after(MOCK_SECONDS):
        with pytest.raises(NotReady):
            await engines.answer(CALL_ENGINE, ["m 2", 1, []])
        with pytest.raises(NotReady):
            await engines.answer(LISTEN_ENGINE, ["other 2", 1])
        assert await engines.answer(LISTEN_ENGINE, ["m 2", 1]) == "old"
        with engines.exported("m 2", new):
            assert await engines.answer(CALL_ENGINE, ["m 2", 1, []]) == "old"
            assert await engines.answer(LISTEN_ENGINE, ["m 2", 1]) == "new"
            assert await engines.answer(CALL_ENGINE, ["m 2", 1, []]) == "new"


async def test_failed_load_of_an_engine_is_reported_at_once(autojump_clock: MockClock) -> None:
    engines = _engines()
    engines.set_load_error("m 1", ModelFailure("no such weights"))
    with trio.fail_after(MOCK_SECONDS):
        began = trio.current_time()
        with pytest.raises(ModelFailure, match="no such weights"):
            await engines.answer(LISTEN_ENGINE, ["m 1", 1])
        assert trio.current_time() == began
        with engines.exported("m 1", cast("Any", _Engine("new"))):
            assert await engines.answer(LISTEN_ENGINE, ["m 1", 1]) == "new"
        with pytest.raises(NotReady):
            await engines.answer(LISTEN_ENGINE, ["m 1", 1])


@pytest.mark.parametrize(
    ("default", "asked", "expected"), [(None, None, NO_TOP_K), (None, -1, NO_TOP_K), (5, None, 5), (5, 7, 7)]
)
def test_top_k_is_off_unless_the_request_or_the_model_sets_it(
    default: int | None, asked: int | None, expected: int
) -> None:
    config = GenerationConfig() if default is None else GenerationConfig(top_k=default)
    assert configure_generation(config, Sampling(temperature=0.5, top_k=asked)).top_k == expected


@pytest.mark.parametrize(
    ("prompt", "asked", "expected"),
    [
        ("a", None, True),
        ("a", False, False),
        (Conversation(()), None, False),
        (Conversation(()), True, True),
    ],
)
def test_special_tokens_are_added_to_texts_unless_the_request_says_otherwise(
    prompt: Any, asked: bool | None, expected: bool
) -> None:
    tokenizer = _CountingTokenizer(1)
    PromptTokenizer(tokenizer, lambda _: "a", CONTEXT).tokenize_prompt(prompt, PromptOptions(adds_special_tokens=asked))
    assert tokenizer.options == {"add_special_tokens": expected}


@pytest.mark.parametrize("keeps_first", [False, True])
def test_of_a_truncated_prompt_only_the_end_that_is_kept_is_tokenized(*, keeps_first: bool) -> None:
    tokenizer = _CountingTokenizer(1)
    prompts = PromptTokenizer(tokenizer, str, CONTEXT)
    tokens = prompts.tokenize_prompt("a" * max_characters(CONTEXT), PromptOptions(None, 100, keeps_first))
    assert tokens == (list(range(100)) if keeps_first else list(range(3996, 4096)))
    assert tokenizer.characters == 4096
    assert prompts.tokenize_prompt((0,) * 50, PromptOptions(None, 20, keeps_first)) == [0] * 20
