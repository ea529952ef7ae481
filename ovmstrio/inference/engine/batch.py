"""Continuous batch of running sequences, with recovery after a failed step, and admission by KV-cache blocks."""

from __future__ import annotations

import itertools
import sys
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from ovmstrio.core.errors import InvalidField, InvalidRequest, ModelFailure, ServerError
from ovmstrio.inference.engine.pipeline import library_error_message
from ovmstrio.inference.engine.prefill_scheduler import PrefillScheduler
from ovmstrio.inference.engine.sequences import (
    CacheFullError,
    QueuedRequest,
    RunningSequence,
    SequenceDivergedError,
    SequenceOutput,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ovmstrio.inference.engine.pipeline import Pipeline


@dataclass(slots=True)
class StepOutcome:
    """Result of a step; ``left`` are requests cancelled during prefill that have now left the batch."""

    news: list[SequenceOutput] = field(default_factory=list)
    failed: list[tuple[QueuedRequest, ServerError]] = field(default_factory=list)
    newly_proven: list[QueuedRequest] = field(default_factory=list)  # requests whose grammar is now known to work
    left: list[QueuedRequest] = field(default_factory=list)


class Batch:
    """Running sequences of a pipeline."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._prefill = PrefillScheduler(pipeline)
        self._numbers = itertools.count(1)
        self._texts: dict[int, RunningSequence] = {}
        self.rebuilds = 0  # number of times the pipeline was recreated
        self.suspensions = 0  # number of times a sequence was left out of a step because the KV cache was full

    @property
    def is_busy(self) -> bool:
        """Return whether a step has work, including the release of blocks of cancelled sequences."""
        return bool(self._texts) or self._pipeline.is_busy

    @property
    def running(self) -> int:
        """Number of running sequences."""
        return len(self._texts)

    @property
    def has_unproven_grammar(self) -> bool:
        """Return whether a sequence has a grammar that is not known to work."""
        return any(not text.asked.is_grammar_proven for text in self._texts.values())

    @property
    def is_compiling_grammar(self) -> bool:
        """Return whether a sequence with a grammar has not received its first token."""
        return any(
            text.asked.request.grammar is not None and (text.handle is None or text.is_reading)
            for text in self._texts.values()
        )

    def takes(self, queued: QueuedRequest) -> bool:
        """Return whether a request that begins now is in the next step; otherwise it must wait."""
        texts = self._texts.values()
        return all(text.handle is not None for text in texts) and self._prefill.may_start(queued.prompt, texts)

    @property
    def used(self) -> float:
        """Fraction of the KV cache that the sequences fill, ignoring shared blocks."""
        block = self._pipeline.block_tokens
        return min(1.0, sum(-(-text.length // block) for text in self._texts.values()) / self._pipeline.blocks)

    def begin(self, queued: QueuedRequest) -> None:
        """Add the sequences of a request, once prefill allows; raise InvalidRequest if the parameters are rejected."""
        first = RunningSequence(queued)
        texts = [
            first,
            *(RunningSequence(queued, index) for index in range(1, 1 if first.has_beams else queued.request.n)),
        ]
        queued.left = queued.request.n
        try:
            for text in texts:
                self._start(text)
        except (RuntimeError, TypeError, ValueError) as error:
            self.cancel(queued)
            raise InvalidRequest(f"generation parameters rejected: {library_error_message(error)}") from error

    def _start(self, text: RunningSequence) -> None:
        number = next(self._numbers)
        if all(each.handle is not None for each in self._texts.values()) and self._may_start(text):
            self._start_now(text, number)
        self._texts[number] = text

    def _may_start(self, text: RunningSequence) -> bool:
        """Return whether a sequence may start; a suspect of a failed step starts alone."""
        others = self._texts.values()
        if text.is_suspect and any(each.is_new for each in others):
            return False
        return self._prefill.may_start(text.pending_tokens, others)

    def _start_now(self, text: RunningSequence, number: int) -> None:
        text.start(self._pipeline, number)
        cached = self._prefill.begin(text.pending_tokens)
        if text.index == 0 and not text.is_restarted:
            text.asked.cached = cached

    def _start_queued(self, outcome: StepOutcome) -> None:
        for number, text in list(self._texts.items()):
            if text.handle is not None or number not in self._texts:
                continue
            if not self._may_start(text):
                return
            try:
                self._start_now(text, number)
            except (RuntimeError, TypeError, ValueError) as error:
                self._fail(
                    text.asked,
                    InvalidRequest(f"generation parameters rejected: {library_error_message(error)}"),
                    outcome,
                )
                self.cancel(text.asked)

    def cancel(self, queued: QueuedRequest) -> bool:
        """Remove the sequences of a request; return whether some must finish prefill, see :attr:`StepOutcome.left`."""
        self._drop(number for number, text in self._texts.items() if text.asked is queued)
        return any(text.asked is queued for text in self._texts.values())

    def end(self, queued: QueuedRequest, index: int) -> None:
        """Remove one sequence at the next step, if it has not ended."""
        self._drop(number for number, text in self._texts.items() if text.asked is queued and text.index == index)

    def _drop(self, numbers: Iterable[int]) -> None:
        for number in list(numbers):
            text = self._texts[number]
            # The library would reuse a partially computed block as a full one for another request of the same prompt.
            text.is_leaving = self._prefill.caches and text.is_reading and not text.is_new
            if not text.is_leaving:
                self._remove(number).cancel()

    def _remove(self, number: int) -> RunningSequence:
        text = self._texts.pop(number)
        if text.has_beams:
            self._prefill.record_beam_end(text.asked.prompt)
        else:
            self._prefill.end(text.computed)
        return text

    def step(self) -> StepOutcome:
        """Generate the next token of each sequence; raise RuntimeError if a failed pipeline cannot be recreated."""
        outcome = StepOutcome()
        reason = ""
        self._start_queued(outcome)
        try:
            self._pipeline.step()
        except RuntimeError as error:
            reason = library_error_message(error)
        stepped = [text for text in self._texts.values() if text.handle is not None]
        if not reason:
            self._follow_beams(stepped)
        self._read(outcome)
        if reason:
            self._recover(reason, outcome)
            return outcome
        failed = {id(queued) for queued, _ in outcome.failed}
        for text in stepped:
            text.is_new = text.is_suspect = False
            if not text.asked.is_grammar_proven and id(text.asked) not in failed:
                text.asked.is_grammar_proven = True
                outcome.newly_proven.append(text.asked)
        return outcome

    def _follow_beams(self, stepped: list[RunningSequence]) -> None:
        """Track prefill of beam sequences, of which the library reports nothing before they end.

        The library processes prompts in order of arrival, with the step's token budget that decoding leaves.
        """
        room = self._pipeline.batched_tokens
        readers = [text for text in stepped if text.is_reading]
        for text in stepped:
            if not text.is_reading:
                room -= text.asked.request.sampling.best_of
                text.is_settled = text.is_settled or text.has_beams
        for text in readers:
            if not text.has_beams or room <= 0:
                return
            room -= text.record_prefill(room)
            if not text.is_reading:
                self._prefill.go_on(text.asked.prompt)

    def _read(self, outcome: StepOutcome) -> None:
        over = [
            number for number, text in self._texts.items() if text.handle is not None and self._read_text(text, outcome)
        ]
        for text in [self._remove(number) for number in over]:
            if text.is_leaving:
                text.cancel()
                outcome.left.append(text.asked)
        for queued, _ in outcome.failed:
            self.cancel(queued)

    def _read_text(self, text: RunningSequence, outcome: StepOutcome) -> bool:
        try:
            news = text.read()
        except (SequenceDivergedError, CacheFullError) as error:
            if not text.is_leaving:
                self._fail(text.asked, ModelFailure(str(error)), outcome)
            return text.is_leaving
        self.suspensions += text.is_newly_suspended
        if text.is_first:
            self._prefill.go_on(text.computed)
        if text.is_leaving:
            return not text.is_reading
        outcome.news += news
        return bool(news) and news[-1].finish is not None

    def _fail(self, queued: QueuedRequest, error: ServerError, outcome: StepOutcome) -> None:
        if all(each is not queued for each, _ in outcome.failed):
            outcome.failed.append((queued, error))

    def _recover(self, reason: str, outcome: StepOutcome) -> None:
        """Recreate the pipeline and restart all sequences except the culprits; RuntimeError if that fails."""
        print(f"step failed, batch rebuilt: {reason}", file=sys.stderr)  # noqa: T201 - the server logs it
        self.rebuilds += 1
        texts = list(self._texts.values())
        newcomers = {id(text.asked): text.asked for text in texts if text.is_new and not text.is_restarted}
        culprits = self._culprits(texts, list(newcomers.values()), reason)
        for queued, error in culprits:
            self._fail(queued, error, outcome)
        blamed = [queued for queued, _ in outcome.failed]
        for text in texts:
            text.cancel()
        self._texts.clear()
        self._pipeline.rebuild()
        self._prefill.clear()
        for text in texts:
            if text.is_leaving:
                outcome.left.append(text.asked)
            elif all(queued is not text.asked for queued in blamed):
                text.is_suspect = text.is_suspect or (not culprits and id(text.asked) in newcomers)
                text.is_restarted = not text.is_suspect
                self._start(text)

    def _culprits(
        self, texts: list[RunningSequence], newcomers: list[QueuedRequest], reason: str
    ) -> list[tuple[QueuedRequest, ServerError]]:
        """Return the requests to blame: one with an unproven grammar, else the only new one, else all restarted ones.

        Of several new requests none is blamed before each has started alone.
        """
        unproven = [text.asked for text in texts if not text.asked.is_grammar_proven]
        if unproven:
            why = f"response_format: {reason}"
            return [(unproven[0], InvalidField(why, field="response_format", code="invalid_grammar"))]
        if newcomers:
            blamed = newcomers if len(newcomers) == 1 else []
            return [(queued, ModelFailure(f"the model failed on this request: {reason}")) for queued in blamed]
        return [
            (text.asked, ModelFailure(f"the model failed repeatedly: {reason}")) for text in texts if text.is_restarted
        ]


_INITIAL_ANSWER_TOKENS: Final = 512
_AVERAGE_WEIGHT: Final = 0.05
_MARGIN: Final = 1.5

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class BlockCapacity:
    """Capacity: blocks of ``block_tokens`` tokens (0 blocks for no limit) and concurrent sequences."""

    blocks: int
    block_tokens: int
    texts: int
    overcommit: float = 1.0
    shares_prompts: bool = True


@dataclass(frozen=True, slots=True)
class BlockDemand:
    """``texts`` sequences with a prompt and up to ``most`` tokens each; ``is_open`` without a user limit."""

    prompt: int
    most: int
    texts: int = 1
    is_open: bool = False


class BlockAdmission(Generic[T]):
    """FIFO admission by reserved KV-cache blocks.

    Without a user limit, an answer reserves a margin over the recent average; the library suspends sequences if needed.
    """

    def __init__(self, room: BlockCapacity, most_waiting: int) -> None:
        self._room = room
        self._most_waiting = most_waiting
        self._queue: deque[tuple[T, BlockDemand]] = deque()
        self._reserved: dict[int, tuple[int, int]] = {}
        self._average_tokens = float(_INITIAL_ANSWER_TOKENS)
        self.blocks = 0
        self.texts = 0

    @property
    def waiting(self) -> int:
        """Number of queued requests."""
        return len(self._queue)

    @property
    def is_full(self) -> bool:
        """Return whether a request that cannot run at once must be rejected."""
        return len(self._queue) >= self._most_waiting

    def blocks_of(self, need: BlockDemand) -> int:
        """Return the number of blocks to reserve for a request."""
        most = min(need.most, round(self._average_tokens * _MARGIN)) if need.is_open else need.most
        one = self._blocks(need.prompt + most)
        if need.texts == 1 or not self._room.shares_prompts:
            return one * need.texts
        return one + (need.texts - 1) * (self._blocks(most) + 1)

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._room.block_tokens)

    def fits_now(self, need: BlockDemand) -> bool:
        """Return whether there is room; a lone request always fits."""
        if not self._reserved:
            return True
        if self.texts + need.texts > self._room.texts:
            return False
        return not self._room.blocks or (
            self.blocks + self.blocks_of(need) <= self._room.blocks * self._room.overcommit
        )

    def wait(self, item: T, need: BlockDemand) -> None:
        """Append a request to the queue."""
        self._queue.append((item, need))

    def head(self) -> T | None:
        """Return the first queued request, if there is room for it."""
        return self._queue[0][0] if self._queue and self.fits_now(self._queue[0][1]) else None

    def enter(self, number: int) -> T:
        """Remove the first request from the queue and reserve its blocks until :meth:`leave`."""
        item, need = self._queue.popleft()
        blocks = self.blocks_of(need)
        self._reserved[number] = blocks, need.texts
        self.blocks += blocks
        self.texts += need.texts
        return item

    def withdraw(self, item: T) -> bool:
        """Remove a request from the queue; return whether it was there."""
        for place, (each, _) in enumerate(self._queue):
            if each is item:
                del self._queue[place]
                return True
        return False

    def leave(self, number: int, generated: int | None = None) -> None:
        """Release the blocks of a request; ``generated`` is its token count if it ran to its end."""
        blocks, texts = self._reserved.pop(number, (0, 0))
        self.blocks -= blocks
        self.texts -= texts
        if generated is not None:
            self._average_tokens += _AVERAGE_WEIGHT * (generated - self._average_tokens)
