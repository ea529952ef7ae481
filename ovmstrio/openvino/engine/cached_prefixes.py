"""What the library's cache of prefixes holds, as far as it can be known: the library tells nobody.

It keeps the keys and values of texts in blocks, each known by all tokens up to its end, and the last one, which is not
full, by those that it has.  What was used longest ago is given up first, from the beginning of a text on.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["CachedPrefixes", "block_keys"]


def block_keys(tokens: Sequence[int], block_tokens: int) -> Iterator[tuple[int, int]]:
    """Give the end of each block of a text, the last of which may not be full, and what it is known by."""
    key = 0
    for start in range(0, len(tokens), block_tokens):
        block = tokens[start : start + block_tokens]
        key = hash((key, *block))
        yield start + len(block), key


class CachedPrefixes:
    """The blocks that are there for prompts to come; those of a text are noted when it ends.

    Args:
        blocks: how many there are, in use or not; 0 for no cache.
        block_tokens: how many tokens each has.
    """

    def __init__(self, blocks: int, block_tokens: int) -> None:
        self._most = blocks
        self._block = block_tokens
        self._known: OrderedDict[int, None] = OrderedDict()

    def find(self, tokens: Sequence[int]) -> int:
        """Give how many tokens of a prompt that begins now are not computed again; the last one always is."""
        if not self._most:
            return 0
        found, before = 0, 0
        for end, key in block_keys(tokens, self._block):
            if key not in self._known:
                found += self._find_part(before, tokens[found : found + self._block])
                break
            self._known.move_to_end(key)
            found, before = end, key
        return min(found, len(tokens) - 1)

    def holds(self, tokens: Sequence[int]) -> bool:
        """Tell whether all blocks of a text are there, the last one included."""
        return all(key in self._known for _, key in block_keys(tokens, self._block))

    def _find_part(self, before: int, tokens: Sequence[int]) -> int:
        """Find a block that is not full, which is the new text's own from now on."""
        for number in range(1, min(len(tokens) + 1, self._block)):
            key = hash((before, *tokens[:number]))
            if key in self._known:
                del self._known[key]
                return number
        return 0

    def keep(self, tokens: Sequence[int], *, is_whole: bool = True) -> None:
        """Note that these have been computed; of a text that goes on (``is_whole`` is false) the full blocks."""
        if not self._most:
            return
        for end, key in block_keys(tokens, self._block):
            if (is_whole or not end % self._block) and key not in self._known:
                self._known[key] = None
                if len(self._known) > self._most:
                    self._known.popitem(last=False)

    def clear(self) -> None:
        """Forget everything, as the batch was made again."""
        self._known.clear()
