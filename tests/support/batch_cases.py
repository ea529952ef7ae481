"""Comparison of texts generated in one batch with a prefix cache and alone without; prints the results as JSON."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from ovmstrio.core.generation import GenerationRequest, Sampling
from ovmstrio.inference.engine.batch import Batch, QueuedRequest
from ovmstrio.inference.engine.pipeline import Pipeline, PipelineOptions

_REQUEST: Final = GenerationRequest("", Sampling(temperature=0, ignore_eos=True), logprobs=True)
_TOKENS: Final = 40
_FIRST_WORD: Final = 3
_WORDS: Final = 250
_ROUNDS: Final = 4
"""Without ``PromptStarts``, four rounds of :func:`that_begin_alike` have four wrong texts."""


class Texts:
    """Texts of one batch, compared with the texts of ``alone``, an idle batch without a prefix cache."""

    def __init__(self, options: PipelineOptions, alone: Batch) -> None:
        self.batch = Batch(Pipeline(options))
        self._alone = alone
        self._dice = random.Random(1)
        self._logprobs: dict[int, list[float]] = {}
        self._made: dict[int, list[int]] = {}

    def words(self, count: int) -> list[int]:
        return [self._dice.randrange(_FIRST_WORD, _WORDS) for _ in range(count)]

    def begin(self, prompt: list[int], tokens: int = _TOKENS, *, beams: int = 1) -> QueuedRequest:
        request = replace(_REQUEST, sampling=replace(_REQUEST.sampling, best_of=beams))
        asked = QueuedRequest(len(self._logprobs), 0, request, prompt, tokens, 1)
        self._logprobs[asked.id], self._made[asked.id] = [], []
        self.batch.begin(asked)
        return asked

    def step(self, steps: int = 1) -> None:
        for _ in range(steps):
            for new in self.batch.step().news:
                self._logprobs[new.asked.id] += new.logprobs
                self._made[new.asked.id] += new.tokens

    def finish(self) -> None:
        while self.batch.is_busy:
            self.step()

    def made(self, asked: QueuedRequest) -> list[int]:
        return self._made[asked.id]

    def come(self, asked: QueuedRequest) -> int:
        return len(self._logprobs[asked.id])

    def wrong(self, *texts: QueuedRequest) -> int:
        return sum(self._differs(self._logprobs[asked.id], self._made_alone(asked)) for asked in texts)

    def _differs(self, found: list[float], alone: list[float]) -> bool:
        return len(found) != len(alone) or any(abs(a - b) > 0.02 for a, b in zip(found, alone, strict=True))

    def _made_alone(self, asked: QueuedRequest) -> list[float]:
        logprobs: list[float] = []
        self._alone.begin(replace(asked, left=0, generated=0))
        while self._alone.is_busy:
            for new in self._alone.step().news:
                logprobs += new.logprobs
        return logprobs


def that_begin_alike(texts: Texts) -> int:
    """Ask for up to eight before each step, whose prompts are beginnings of each other."""
    dice, wrong = random.Random(1), 0
    base = texts.words(90)
    for _ in range(_ROUNDS):
        texts.begin(base[: dice.randrange(1, 60)], tokens=1)
        texts.finish()
        asked = []
        for _ in range(10):
            prompts = [
                base[: dice.randrange(1, 90)] + texts.words(dice.randrange(20)) for _ in range(dice.randrange(8))
            ]
            asked += [texts.begin(prompt) for prompt in prompts]
            texts.step()
        texts.finish()
        wrong += texts.wrong(*asked)
    return wrong


def behind_a_long_prompt(texts: Texts) -> int:
    """Continue an ended text with two requests, one per step, while another prompt takes the whole read budget."""
    wrong = 0
    for _ in range(5):
        base = texts.words(40)
        texts.begin(base, tokens=1)
        texts.finish()
        asked = [texts.begin(texts.words(900))]
        for _ in range(2):
            texts.step()
            asked.append(texts.begin(base + texts.words(6)))
        texts.finish()
        wrong += texts.wrong(*asked)
    return wrong


def of_a_prompt_given_up(texts: Texts) -> int:
    """Cancel a request whose prompt was partly read, while others run, and send it again."""
    wrong = 0
    for _ in range(2):
        asked = [texts.begin(texts.words(10), tokens=60) for _ in range(16)]
        texts.step(2)
        prompt = texts.words(600)
        left = texts.begin(prompt)
        texts.step()
        texts.batch.cancel(left)
        texts.step()
        asked.append(texts.begin(prompt))
        texts.finish()
        wrong += texts.wrong(*asked)
    return wrong


def given_up(texts: Texts) -> list[int]:
    """Cancel a request in prefill and one in decoding; count the batch at once, and the steps until it is idle."""
    writes = texts.begin(texts.words(10))
    texts.step(2)
    reads = texts.begin(texts.words(1500))
    texts.step()
    texts.batch.cancel(writes)
    texts.batch.cancel(reads)
    running, steps = texts.batch.running, 0
    while texts.batch.is_busy:
        texts.step()
        steps += 1
    return [running, steps, texts.come(reads)]


def in_chunks(texts: Texts) -> int:
    """Send long prompts one after the other, with a common beginning, while others run."""
    base = texts.words(1000)
    asked = [texts.begin(texts.words(10), tokens=60) for _ in range(7)]
    for length in (700, 1000, 450, 64, 900):
        asked.append(texts.begin(base[:length] + texts.words(20)))
        texts.step(2)
    texts.finish()
    return texts.wrong(*asked)


def overtaken(texts: Texts) -> list[int]:
    """Send short prompts while a long one is processed; return its tokens at that time and at the end, and theirs."""
    long = texts.begin(texts.words(1500), tokens=4)
    texts.step(2)
    short = [texts.begin(texts.words(20), tokens=2) for _ in range(3)]
    texts.step()
    counts = [texts.come(long), *map(texts.come, short)]
    texts.finish()
    return [*counts, texts.come(long), texts.wrong(long, *short)]


def that_go_on_from_beams(texts: Texts) -> int:
    """Start several requests at once with the output of beams, or with a prefix of it, as their prompt."""
    dice, wrong = random.Random(1), 0
    for length in (20, 31, 32, 33, 45, 64, 90, 300):
        beams = texts.begin(texts.words(length), tokens=dice.randrange(5, 30), beams=4)
        texts.finish()
        made = texts.made(beams)
        ends = [dice.choice([1, 2, len(made) - 1, len(made)]) for _ in range(4)]
        asked = [texts.begin(beams.prompt + made[:end] + texts.words(dice.randrange(1, 12))) for end in ends]
        texts.finish()
        wrong += texts.wrong(*asked)
    return wrong


def that_begin_like_beams(texts: Texts) -> int:
    """Ask for them while the beams are made, and count those that wait for the end of these, too."""
    wrong = 0
    for length in (45, 300, 600):
        asked = [texts.begin(texts.words(50))]
        beams = texts.begin(texts.words(length), tokens=60, beams=4)
        for cut in (0, 3, 0):
            texts.step()
            asked.append(texts.begin(beams.prompt[: length - cut]))
        texts.step(30)
        wrong += sum(not texts.come(each) for each in asked)
        texts.finish()
        wrong += texts.wrong(beams, *asked)
    return wrong


def that_start_together(texts: Texts) -> list[int]:
    """Count the tokens after a step: of strangers, of those with a beginning that is not cached, and once it is."""
    strangers = [texts.begin(texts.words(20)) for _ in range(4)]
    texts.step()
    counts = [sum(map(texts.come, strangers))]
    texts.finish()
    base = texts.words(64)
    for _ in range(2):
        alike = [texts.begin(base + texts.words(5)) for _ in range(4)]
        texts.step()
        counts.append(sum(map(texts.come, alike)))
        texts.finish()
    return counts


def that_are_equal(texts: Texts) -> int:
    """Send equal prompts together and while others of them run, and prompts that go on from them."""
    dice, asked = random.Random(2), []
    base = texts.words(400)
    for length in (5, 31, 32, 33, 45, 64, 70, 200, 333):
        prompt = base[:length] + texts.words(dice.choice([0, 3, 20]))
        made = [texts.begin(prompt, tokens=dice.choice([1, 2, 3, 10, 40])) for _ in range(dice.randrange(2, 7))]
        texts.step(dice.randrange(5))
        made += [texts.begin(prompt), *(texts.begin(prompt + texts.made(made[-1])[:9]) for _ in range(3))]
        texts.step(dice.randrange(5))
        asked += made
    texts.finish()
    return texts.wrong(*asked)


def equal_starts(texts: Texts) -> list[int]:
    """Send 16 equal prompts at once; return the number of steps until all have a token, by length of the prompt."""
    found = []
    for length in (10, 45, 100):
        asked = [texts.begin(prompt) for prompt in [texts.words(length)] * 16]
        steps = 0
        while not all(map(texts.come, asked)):
            texts.step()
            steps += 1
        texts.finish()
        found.append(steps)
    return found


_CASES: Final[dict[str, Callable[[Texts], object]]] = {
    case.__name__: case
    for case in (
        that_begin_alike,
        behind_a_long_prompt,
        of_a_prompt_given_up,
        that_go_on_from_beams,
        that_begin_like_beams,
        in_chunks,
        that_are_equal,
        equal_starts,
        overtaken,
        given_up,
        that_start_together,
    )
}  # fmt: skip


def _run_all(folder: str) -> dict[str, object]:
    options = PipelineOptions(folder, "CPU", {"INFERENCE_PRECISION_HINT": "f32"}, cache_bytes=50 * 2**20)
    alone = Batch(Pipeline(replace(options, caches_prefixes=False)))
    return {name: case(Texts(options, alone)) for name, case in _CASES.items()}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_run_all(sys.argv[1])))
