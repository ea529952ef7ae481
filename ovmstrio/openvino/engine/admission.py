"""Which requests are in the batch and which wait: by room in the cache of keys and values, first come, first served."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

__all__ = ["BlockAdmission", "BlockNeed", "BlockRoom"]

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
