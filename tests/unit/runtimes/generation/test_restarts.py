"""What becomes of the texts of a batch whose step fails, with a library that fails when it is told to."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any, Final, cast

import pytest
from openvino_genai.py_openvino_genai import GenerationStatus

from ovmstrio.core.generation import GenerationRequest, Grammar, GrammarKind, Sampling
from ovmstrio.openvino.engine.batch import Batch
from ovmstrio.openvino.engine.pipeline import Pipeline
from ovmstrio.openvino.engine.texts import AskedTexts

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


def _told(batch: Batch, asked: AskedTexts, steps: int) -> list[int]:
    return [token for _ in range(steps) for new in batch.step().news if new.asked is asked for token in new.tokens]


def _made(batch: Batch, steps: int) -> tuple[list[AskedTexts], dict[int, list[int]]]:
    """Give who has failed in some steps, and the tokens of the others."""
    failed: list[AskedTexts] = []
    told: dict[int, list[int]] = defaultdict(list)
    for _ in range(steps):
        outcome = batch.step()
        failed += [asked for asked, _ in outcome.failed]
        for new in outcome.news:
            told[new.asked.id] += new.tokens
    return failed, told


def test_a_text_that_is_begun_again_twice_is_told_once() -> None:
    """Also where the second time comes before it is where it was at the first."""
    batch = _batch()
    text = _begin(batch, 1, GenerationRequest("", Sampling(frequency_penalty=0.5)), [7] * 10)
    told = _told(batch, text, 10)
    for number, steps in ((2, 4), (3, 15)):
        _begin(batch, number, _POISON, [8] * 10)
        assert [asked.id for asked, _ in batch.step().failed] == [number]
        told += _told(batch, text, steps)
    assert told == list(range(10, 25))
    assert batch.rebuilds == 2


def test_one_that_is_given_up_while_it_waits_to_be_begun_again_reads_nothing() -> None:
    """It is out of the batch at once, though it read its prompt when the step failed."""
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
def test_of_several_that_have_come_together_only_the_one_fails_that_breaks_the_step(*, first: bool) -> None:
    """They start one by one then, and those that wrote before go on from where they were."""
    batch = _batch()
    before = _begin(batch, 1, GenerationRequest(""), [7] * 10)
    assert _told(batch, before, 3) == [10, 11, 12]
    prompts = [[_BREAKS], [8] * 10] if first else [[8] * 10, [_BREAKS]]
    asked = [_begin(batch, number, GenerationRequest(""), prompt) for number, prompt in enumerate(prompts, 2)]
    good = asked[first]
    failed, told = _made(batch, 10)
    assert failed == [asked[not first]]
    assert told[before.id] == list(range(13, 21))
    assert told[good.id][:4] == [10, 11, 12, 13]
    assert batch.rebuilds == 2


def test_texts_that_run_are_to_blame_where_a_step_fails_without_those_that_came_together() -> None:
    """Those that have come since are made nevertheless."""
    library = _Library(caches_prefixes=False)
    batch = Batch(cast("Pipeline", library))
    old = _begin(batch, 1, GenerationRequest(""), [7] * 10)
    batch.step()
    library.handles[0].breaks = True
    asked = [_begin(batch, number, GenerationRequest(""), [8] * 10) for number in (2, 3)]
    assert batch.step().failed == []
    library.handles[0].breaks = True
    failed, told = _made(batch, 5)
    assert failed == [old]
    assert [told[each.id] for each in asked] == [[10, 11, 12, 13], [10, 11, 12]]
