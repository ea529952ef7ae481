from __future__ import annotations

import select
from collections import defaultdict
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, NoReturn, cast

import pytest
from openvino_genai.py_openvino_genai import GenerationStatus

from ovmstrio.core.generation import GenerationRequest, Grammar, GrammarKind, Sampling
from ovmstrio.openvino.engine.batch import Batch
from ovmstrio.openvino.engine.form_compiler import FormCompiler
from ovmstrio.openvino.engine.form_trials import FormTrials
from ovmstrio.openvino.engine.pipeline import Pipeline
from ovmstrio.openvino.engine.texts import AskedTexts

if TYPE_CHECKING:
    from pathlib import Path

_SECONDS: Final = 30


class _Compiler:
    """Takes all forms but those that it has an error for."""

    def __init__(self, **errors: Exception) -> None:
        self.errors = errors
        self.compiled: list[str] = []

    def ask(self, request: GenerationRequest) -> str:
        return "" if request.grammar is None else request.grammar.text

    def compile(self, config: Any) -> None:
        self.compiled.append(config)
        if config in self.errors:
            raise self.errors[config]


def _request(number: int, form: str) -> AskedTexts:
    request = GenerationRequest("", grammar=Grammar(GrammarKind.REGEX, form))
    return AskedTexts(number, 0, request, [1], 10, 1, is_proven=False)


def _ended(trials: FormTrials) -> Any:
    while not trials.has_ended:
        assert select.select([trials.descriptor], [], [], _SECONDS)[0], "no trial has ended"
    return trials.take()


def _run(trials: FormTrials) -> list[tuple[int, str]]:
    outcomes = []
    while trials.waiting:
        trials.go_on(may_compile=True)
        asked, error = _ended(trials)
        outcomes.append((asked.id, "" if error is None else str(error)))
    return outcomes


def test_form_is_compiled_once_for_all_its_requests() -> None:
    compiler = _Compiler()
    trials = FormTrials(compiler)
    requests = [_request(number, form) for number, form in enumerate("abab")]
    for each in requests:
        trials.wait(each)
    assert trials.waiting == len(requests)
    assert _run(trials) == [(0, ""), (1, ""), (2, ""), (3, "")]
    trials.wait(_request(4, "a"))
    assert _run(trials) == [(4, "")]
    assert compiler.compiled == ["a", "b"]
    assert all(each.is_proven for each in requests)


def test_form_that_openvino_refuses_fails_each_of_its_requests() -> None:
    compiler = _Compiler(a=RuntimeError("there is no such form"))
    trials = FormTrials(compiler)
    for number, form in enumerate("aab"):
        trials.wait(_request(number, form))
    outcomes = _run(trials)
    assert [number for number, why in outcomes if "there is no such form" in why] == [0, 1]
    assert outcomes[2] == (2, "")
    assert compiler.compiled == ["a", "a", "b"]


def test_form_that_cannot_be_tried_is_left_to_the_batch() -> None:
    trials = FormTrials(_Compiler(a=FileNotFoundError("openvino_model.xml")))
    asked = _request(1, "a")
    trials.wait(asked)
    assert _run(trials) == [(1, "")]
    assert not asked.is_proven


@pytest.mark.parametrize("runs", [False, True])
def test_withdrawn_request_is_left_out_and_the_next_is_tried(*, runs: bool) -> None:
    compiler = _Compiler()
    trials = FormTrials(compiler)
    requests = [_request(number, form) for number, form in enumerate("abc")]
    for each in requests:
        trials.wait(each)
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
    trials = FormTrials(compiler)
    trials.wait(_request(0, "a"))
    assert _run(trials) == [(0, "")]
    for number, form in enumerate("aab", 1):
        trials.wait(_request(number, form))
    for number in (1, 2):
        trials.go_on(may_compile=False)
        assert trials.has_ended
        passed, _ = _ended(trials)
        assert passed.id == number
    trials.go_on(may_compile=False)
    assert not trials.has_ended
    assert compiler.compiled == ["a"]
    assert _run(trials) == [(3, "")]


class _Unmade(FormCompiler):
    def _make(self) -> NoReturn:
        raise RuntimeError("there is no room on the disk")


def test_missing_compiler_raises_lookup_error(tmp_path: Path) -> None:
    none: Any = None
    with pytest.raises(LookupError, match="no form can be tried: there is no room on the disk"):
        _Unmade(none, tmp_path).compile(none)


_BREAKS: Final = 999
_LONG: Final = 100
_STEPS_OF_LONG: Final = 3
_POISON: Final = GenerationRequest("", grammar=Grammar(GrammarKind.REGEX, "("))


class _Handle:
    """A text of the library's, whose tokens are their places: 10, 11, 12 and so on behind a prompt of 10 tokens."""

    def __init__(self, prompt: list[int], config: Any) -> None:
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
    """A pipeline whose steps fail for as long as there is a text in them that has a form, or breaks them."""

    batched_tokens = 256
    blocks = 100
    block_tokens = 32

    def __init__(self, *, caches_prefixes: bool) -> None:
        self.caches_prefixes = caches_prefixes
        self.handles: list[_Handle] = []
        self.is_busy = False

    def defaults(self) -> Any:
        return SimpleNamespace(temperature=0.0, top_k=1, structured_output_config=None)

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


def _begin(batch: Batch, number: int, request: GenerationRequest, prompt: list[int]) -> AskedTexts:
    asked = AskedTexts(number, 0, request, prompt, 1_000, 1, is_proven=request.grammar is None)
    batch.begin(asked)
    return asked


def _tokens(batch: Batch, asked: AskedTexts, steps: int) -> list[int]:
    return [token for _ in range(steps) for new in batch.step().news if new.asked is asked for token in new.tokens]


def _outcomes(batch: Batch, steps: int) -> tuple[list[AskedTexts], dict[int, list[int]]]:
    failed: list[AskedTexts] = []
    told: dict[int, list[int]] = defaultdict(list)
    for _ in range(steps):
        outcome = batch.step()
        failed += [asked for asked, _ in outcome.failed]
        for new in outcome.news:
            told[new.asked.id] += new.tokens
    return failed, told


def test_text_restarted_twice_reports_each_token_once() -> None:
    batch = _batch()
    text = _begin(batch, 1, GenerationRequest("", Sampling(frequency_penalty=0.5)), [7] * 10)
    told = _tokens(batch, text, 10)
    for number, steps in ((2, 4), (3, 15)):
        _begin(batch, number, _POISON, [8] * 10)
        assert [asked.id for asked, _ in batch.step().failed] == [number]
        told += _tokens(batch, text, steps)
    assert told == list(range(10, 25))
    assert batch.rebuilds == 2


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
    failed, told = _outcomes(batch, 10)
    assert failed == [asked[not first]]
    assert told[before.id] == list(range(13, 21))
    assert told[good.id][:4] == [10, 11, 12, 13]
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
    failed, told = _outcomes(batch, 5)
    assert failed == [old]
    assert [told[each.id] for each in asked] == [[10, 11, 12, 13], [10, 11, 12]]
