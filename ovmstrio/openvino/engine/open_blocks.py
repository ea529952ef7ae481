"""Blocks of keys and values that are not full, each of which the library may lend to every text that begins with it.

Texts that read their prompts at the same time must not share one: each of them writes into it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import TYPE_CHECKING

from ovmstrio.openvino.engine.cached_prefixes import block_keys

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["OpenBlocks"]


class OpenBlocks:
    """Where texts have ended that were in the batch.

    Args:
        most: how many ends are remembered, those of the last texts.
        block_tokens: how many tokens a full block has.
    """

    def __init__(self, most: int, block_tokens: int) -> None:
        self._most = most
        self._block = block_tokens
        self._ends: OrderedDict[tuple[int, tuple[int, ...]], None] = OrderedDict()
        self._heads: Counter[int] = Counter()

    def note(self, tokens: Sequence[int]) -> None:
        """Note the end of a text; one at the end of a block is nothing."""
        whole = len(tokens) - len(tokens) % self._block
        if whole == len(tokens):
            return
        *_, (_, head) = (0, 0), *block_keys(tokens[:whole], self._block)
        end = head, tuple(tokens[whole:])
        if end not in self._ends:
            self._heads[head] += 1
        self._ends[end] = None
        self._ends.move_to_end(end)
        if len(self._ends) > self._most:
            self._forget(*self._ends.popitem(last=False)[0])

    def _forget(self, head: int, _: tuple[int, ...]) -> None:
        self._heads[head] -= 1
        if not self._heads[head]:
            del self._heads[head]

    def find(self, tokens: Sequence[int]) -> Iterator[int]:
        """Give after how many tokens of a prompt a text has ended, for each that has."""
        start, head = 0, 0
        for stop, key in block_keys(tokens, self._block):
            if head in self._heads:
                for after in range(start + 1, min(stop + 1, start + self._block)):
                    end = head, tuple(tokens[start:after])
                    if end in self._ends:
                        self._ends.move_to_end(end)
                        yield after
            start, head = stop, key

    def clear(self) -> None:
        """Forget everything, as the batch was made again."""
        self._ends.clear()
        self._heads.clear()
