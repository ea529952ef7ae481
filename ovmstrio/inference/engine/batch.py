"""All texts that are being made: stepped together, and made again without the one that breaks a step."""

from __future__ import annotations

import itertools
import sys
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from ovmstrio.core.errors import InvalidField, InvalidRequest, ModelFailure, ServerError
from ovmstrio.inference.engine.pipeline import reason_of
from ovmstrio.inference.engine.prefill_scheduler import PromptStarts
from ovmstrio.inference.engine.sequences import AskedTexts, DifferentTextError, NewTokens, NoRoomError, RunningText

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ovmstrio.inference.engine.pipeline import Pipeline

__all__ = ["Batch", "BlockAdmission", "BlockNeed", "BlockRoom", "StepOutcome"]

# ----------------------------------------------------------------------
# All texts that are being made: stepped together, and made again without the one that breaks a step
# ----------------------------------------------------------------------


@dataclass(slots=True)
class StepOutcome:
    """What a step has brought.

    Attributes:
        news: tokens.
        failed: requests that failed.
        proven: requests of which it is now known that they run.
        left: requests that were cancelled while they read their prompts, and are out of the batch now.
    """

    news: list[NewTokens] = field(default_factory=list)
    failed: list[tuple[AskedTexts, ServerError]] = field(default_factory=list)
    proven: list[AskedTexts] = field(default_factory=list)
    left: list[AskedTexts] = field(default_factory=list)


class Batch:
    """The texts of a pipeline.

    Args:
        pipeline: makes them.

    Attributes:
        rebuilds: how often the pipeline had to be made again.
        suspensions: how often a text was left out of a step, for lack of room in the cache.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._starts = PromptStarts(pipeline)
        self._numbers = itertools.count(1)
        self._texts: dict[int, RunningText] = {}
        self.rebuilds = 0
        self.suspensions = 0

    @property
    def is_busy(self) -> bool:
        """Whether a step has something to do, be it only to give back the blocks of what was cancelled."""
        return bool(self._texts) or self._pipeline.is_busy

    @property
    def running(self) -> int:
        """How many texts are being made."""
        return len(self._texts)

    @property
    def has_unproven(self) -> bool:
        """Whether there is a text in it whose form the library may not take."""
        return any(not text.asked.is_proven for text in self._texts.values())

    @property
    def is_forming(self) -> bool:
        """Whether there is a text in it that has a form, and yet to get its first token."""
        return any(
            text.asked.request.grammar is not None and (text.handle is None or text.is_reading)
            for text in self._texts.values()
        )

    def takes(self, asked: AskedTexts) -> bool:
        """Tell whether a request that begins now is in the next step; otherwise it waits for those before it."""
        texts = self._texts.values()
        return all(text.handle is not None for text in texts) and self._starts.may_start(asked.prompt, texts)

    @property
    def used(self) -> float:
        """Which part of the cache the texts fill, as far as they share nothing."""
        block = self._pipeline.block_tokens
        return min(1.0, sum(-(-text.length // block) for text in self._texts.values()) / self._pipeline.blocks)

    def begin(self, asked: AskedTexts) -> None:
        """Have the texts of a request made from the next step on, or from when it is their turn to start.

        Raises:
            InvalidRequest: the library does not take what is asked.
        """
        first = RunningText(asked)
        texts = [first, *(RunningText(asked, index) for index in range(1, 1 if first.has_beams else asked.request.n))]
        asked.left = asked.request.n
        try:
            for text in texts:
                self._start(text)
        except (RuntimeError, TypeError, ValueError) as error:
            self.cancel(asked)
            raise InvalidRequest(f"the model cannot make such a text: {reason_of(error)}") from error

    def _start(self, text: RunningText) -> None:
        number = next(self._numbers)
        if all(each.handle is not None for each in self._texts.values()) and self._may_start(text):
            self._start_now(text, number)
        self._texts[number] = text

    def _may_start(self, text: RunningText) -> bool:
        """Tell whether it is a text's turn to start; one that may have broken a step starts alone."""
        others = self._texts.values()
        if text.is_suspect and any(each.is_new for each in others):
            return False
        return self._starts.may_start(text.read_first, others)

    def _start_now(self, text: RunningText, number: int) -> None:
        text.start(self._pipeline, number)
        cached = self._starts.begin(text.read_first)
        if text.index == 0 and not text.was_restarted:
            text.asked.cached = cached

    def _start_waiting(self, outcome: StepOutcome) -> None:
        """Start the texts that wait for their turn, as far as it has come."""
        for number, text in list(self._texts.items()):
            if text.handle is not None or number not in self._texts:
                continue
            if not self._may_start(text):
                return
            try:
                self._start_now(text, number)
            except (RuntimeError, TypeError, ValueError) as error:
                self._fail(
                    text.asked, InvalidRequest(f"the model cannot make such a text: {reason_of(error)}"), outcome
                )
                self.cancel(text.asked)

    def cancel(self, asked: AskedTexts) -> bool:
        """Have the texts of a request leave the batch at the next step, or when they have read their prompts.

        Returns:
            Whether some of them read on; :attr:`StepOutcome.left` tells when they have left.
        """
        self._drop(number for number, text in self._texts.items() if text.asked is asked)
        return any(text.asked is asked for text in self._texts.values())

    def end(self, asked: AskedTexts, index: int) -> None:
        """Have one text leave the batch at the next step, if it has not ended by itself."""
        self._drop(number for number, text in self._texts.items() if text.asked is asked and text.index == index)

    def _drop(self, numbers: Iterable[int]) -> None:
        for number in list(numbers):
            text = self._texts[number]
            # The library takes a block that has been computed in part for a full one, for whoever has the same prompt.
            text.is_leaving = self._starts.caches and text.is_reading and not text.is_new
            if not text.is_leaving:
                self._remove(number).cancel()

    def _remove(self, number: int) -> RunningText:
        text = self._texts.pop(number)
        if text.has_beams:
            self._starts.end_of_beams(text.asked.prompt)
        else:
            self._starts.end(text.computed)
        return text

    def step(self) -> StepOutcome:
        """Make the next token of each text.

        Raises:
            RuntimeError: the step failed, and the pipeline could not be made again.
        """
        outcome = StepOutcome()
        reason = ""
        self._start_waiting(outcome)
        try:
            self._pipeline.step()
        except RuntimeError as error:
            reason = reason_of(error)
        stepped = [text for text in self._texts.values() if text.handle is not None]
        if not reason:
            self._follow_beams(stepped)
        self._read(outcome)
        if reason:
            self._recover(reason, outcome)
            return outcome
        failed = {id(asked) for asked, _ in outcome.failed}
        for text in stepped:
            text.is_new = text.is_suspect = False
            if not text.asked.is_proven and id(text.asked) not in failed:
                text.asked.is_proven = True
                outcome.proven.append(text.asked)
        return outcome

    def _follow_beams(self, stepped: list[RunningText]) -> None:
        """Find out which beams have read their prompts, of which the library says nothing before they end.

        It reads prompts in the order in which they have come, with what those that write leave of a step.
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
            room -= text.read_on(room)
            if not text.is_reading:
                self._starts.go_on(text.asked.prompt)

    def _read(self, outcome: StepOutcome) -> None:
        over = [
            number for number, text in self._texts.items() if text.handle is not None and self._read_text(text, outcome)
        ]
        for text in [self._remove(number) for number in over]:
            if text.is_leaving:
                text.cancel()
                outcome.left.append(text.asked)
        for asked, _ in outcome.failed:
            self.cancel(asked)

    def _read_text(self, text: RunningText, outcome: StepOutcome) -> bool:
        """Take what has come of a text; tells whether nothing more will."""
        try:
            news = text.read()
        except (DifferentTextError, NoRoomError) as error:
            if not text.is_leaving:
                self._fail(text.asked, ModelFailure(str(error)), outcome)
            return text.is_leaving
        self.suspensions += text.was_suspended
        if text.is_first:
            self._starts.go_on(text.computed)
        if text.is_leaving:
            return not text.is_reading
        outcome.news += news
        return bool(news) and news[-1].finish is not None

    def _fail(self, asked: AskedTexts, error: ServerError, outcome: StepOutcome) -> None:
        if all(each is not asked for each, _ in outcome.failed):
            outcome.failed.append((asked, error))

    # After a step that failed

    def _recover(self, reason: str, outcome: StepOutcome) -> None:
        """Make the pipeline again, and go on with all texts but those to blame.

        Raises:
            RuntimeError: it could not be made.
        """
        print(f"a step failed and the batch is made again: {reason}", file=sys.stderr)  # noqa: T201 - the server logs it
        self.rebuilds += 1
        texts = list(self._texts.values())
        newcomers = {id(text.asked): text.asked for text in texts if text.is_new and not text.was_restarted}
        culprits = self._culprits(texts, list(newcomers.values()), reason)
        for asked, error in culprits:
            self._fail(asked, error, outcome)
        blamed = [asked for asked, _ in outcome.failed]
        for text in texts:
            text.cancel()
        self._texts.clear()
        self._pipeline.rebuild()
        self._starts.clear()
        for text in texts:
            if text.is_leaving:
                outcome.left.append(text.asked)
            elif all(asked is not text.asked for asked in blamed):
                text.is_suspect = text.is_suspect or (not culprits and id(text.asked) in newcomers)
                text.was_restarted = not text.is_suspect
                self._start(text)

    def _culprits(
        self, texts: list[RunningText], newcomers: list[AskedTexts], reason: str
    ) -> list[tuple[AskedTexts, ServerError]]:
        """Tell who is to blame: whoever came with a form that was new, or else as the only one; or all, at last.

        Of several that have come together nobody is, before they have started one by one.
        """
        unproven = [text.asked for text in texts if not text.asked.is_proven]
        if unproven:
            return [
                (unproven[0], InvalidField(f"the form of the answer cannot be used: {reason}", field="response_format"))
            ]
        if newcomers:
            blamed = newcomers if len(newcomers) == 1 else []
            return [(asked, ModelFailure(f"the model failed on this request: {reason}")) for asked in blamed]
        return [
            (text.asked, ModelFailure(f"the model failed again and again: {reason}"))
            for text in texts
            if text.was_restarted
        ]


# ----------------------------------------------------------------------
# Which requests are in the batch and which wait: by room in the cache of keys and values, first come, first served
# ----------------------------------------------------------------------

_FIRST_GUESS: Final = 512
_LEARNS: Final = 0.05
_MARGIN: Final = 1.5
"""By how much answers may be longer than usual."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class BlockRoom:
    """What there is: blocks of so many tokens, 0 blocks for any number, and texts side by side."""

    blocks: int
    block_tokens: int
    texts: int
    overcommit: float = 1.0
    shares_prompts: bool = True

    @property
    def tokens(self) -> int:
        """How many tokens one text may have."""
        return self.blocks * self.block_tokens


@dataclass(frozen=True, slots=True)
class BlockNeed:
    """What a request needs: texts with a prompt each, and up to ``most`` more tokens, ``is_open`` if nobody said."""

    prompt: int
    most: int
    texts: int = 1
    is_open: bool = False


class BlockAdmission(Generic[T]):
    """Counts what is promised to requests; plain values, nothing waits here.

    Answers whose length nobody has limited get room for what answers had lately, and not for all that they may have:
    the library suspends some of the batch where that was too little.

    Args:
        room: what there is.
        most_waiting: how many requests may wait.
    """

    def __init__(self, room: BlockRoom, most_waiting: int) -> None:
        self._room = room
        self._most_waiting = most_waiting
        self._queue: deque[tuple[T, BlockNeed]] = deque()
        self._promised: dict[int, tuple[int, int]] = {}
        self._usual = float(_FIRST_GUESS)
        self.blocks = 0
        self.texts = 0

    @property
    def waiting(self) -> int:
        """How many requests wait."""
        return len(self._queue)

    @property
    def is_full(self) -> bool:
        """Whether a request that cannot be run at once is to be refused."""
        return len(self._queue) >= self._most_waiting

    def blocks_of(self, need: BlockNeed) -> int:
        """Tell how many blocks are promised to a request."""
        most = min(need.most, round(self._usual * _MARGIN)) if need.is_open else need.most
        one = self._blocks(need.prompt + most)
        if need.texts == 1 or not self._room.shares_prompts:
            return one * need.texts
        return one + (need.texts - 1) * (self._blocks(most) + 1)

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._room.block_tokens)

    def fits_now(self, need: BlockNeed) -> bool:
        """Tell whether there is room; a request that is alone always has it."""
        if not self._promised:
            return True
        if self.texts + need.texts > self._room.texts:
            return False
        return not self._room.blocks or (
            self.blocks + self.blocks_of(need) <= self._room.blocks * self._room.overcommit
        )

    def wait(self, item: T, need: BlockNeed) -> None:
        """Put a request at the end of the queue."""
        self._queue.append((item, need))

    def head(self) -> T | None:
        """Give the request whose turn it is, if there is room for it."""
        return self._queue[0][0] if self._queue and self.fits_now(self._queue[0][1]) else None

    def enter(self, number: int) -> T:
        """Take the first request out of the queue; what it needs is its own until :meth:`leave` of the same number."""
        item, need = self._queue.popleft()
        blocks = self.blocks_of(need)
        self._promised[number] = blocks, need.texts
        self.blocks += blocks
        self.texts += need.texts
        return item

    def withdraw(self, item: T) -> bool:
        """Take a request out of the queue wherever it is, and tell whether it was there."""
        for place, (each, _) in enumerate(self._queue):
            if each is item:
                del self._queue[place]
                return True
        return False

    def leave(self, number: int, generated: int | None = None) -> None:
        """Note that a request is out of the batch, with so many tokens if it came to its end."""
        blocks, texts = self._promised.pop(number, (0, 0))
        self.blocks -= blocks
        self.texts -= texts
        if generated is not None:
            self._usual += _LEARNS * (generated - self._usual)
