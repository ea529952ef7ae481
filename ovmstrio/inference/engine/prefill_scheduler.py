"""Which texts may begin to read their prompts beside others that do, where the library caches prefixes.

Two that the library gives the same block which is not full both write into it, and come out wrong.  Two with a
beginning that is not in the cache yet would both compute it: it costs less to let the second one wait for the first.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from ovmstrio.inference.engine.pipeline import Pipeline
    from ovmstrio.inference.engine.sequences import RunningText

__all__ = ["CachedPrefixes", "OpenBlocks", "PromptStarts", "block_keys"]

# ----------------------------------------------------------------------
# What the library's cache of prefixes holds, as far as it can be known: the library tells nobody
# ----------------------------------------------------------------------


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


# ----------------------------------------------------------------------
# Blocks of keys and values that are not full, each of which the library may lend to every text that begins with it
# ----------------------------------------------------------------------


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


# ----------------------------------------------------------------------
# Which texts may begin to read their prompts beside others that do, where the library caches prefixes
# ----------------------------------------------------------------------

_MOST_RUNNING: Final = 512
"""Ends beyond the number of blocks that are remembered: blocks are not given up in the order in which texts end."""


class PromptStarts:
    """What the library has cached, and which prompts it may therefore be given together.

    Args:
        pipeline: makes the texts.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self.caches = pipeline.caches_prefixes
        self._block = pipeline.block_tokens
        self._prefixes = CachedPrefixes(pipeline.blocks if self.caches else 0, self._block)
        self._ends = OpenBlocks(pipeline.blocks + _MOST_RUNNING, self._block)

    def may_start(self, tokens: Sequence[int], running: Collection[RunningText]) -> bool:
        """Tell whether a prompt may be read from the next step on, beside all texts that run."""
        if not self.caches:
            return True
        reading = self._most_shared(tokens, (text for text in running if text.is_reading))
        if not self._prefixes.holds(tokens[: reading - reading % self._block]):
            return False
        begin = tokens[: self._most_shared(tokens, (text for text in running if not text.is_settled))]
        return not any(self._ends.find(begin)) and not any(text.ends_within(begin, self._block) for text in running)

    def _most_shared(self, tokens: Sequence[int], texts: Iterable[RunningText]) -> int:
        """Tell how many tokens a prompt has in common with one of these texts at most."""
        return max(
            (_common(tokens, each.read_first, self._block) for each in texts if each.handle is not None), default=0
        )

    def begin(self, tokens: Sequence[int]) -> int:
        """Give how many tokens of a prompt that begins now are not computed again, as far as that is known."""
        return self._prefixes.find(tokens)

    def go_on(self, tokens: Sequence[int]) -> None:
        """Note what has been computed of a text that goes on."""
        self._prefixes.keep(tokens, is_whole=False)

    def end(self, tokens: Sequence[int]) -> None:
        """Note what has been computed of a text that has left the batch."""
        if self.caches:
            self._prefixes.keep(tokens)
            self._ends.note(tokens)

    def end_of_beams(self, prompt: Sequence[int]) -> None:
        """Note that texts have been made of beams, which end in many places that the library does not tell.

        All of them begin with the prompt, and with what of it comes before its last token in any case.
        """
        if self.caches:
            self._ends.note(prompt if len(prompt) % self._block else prompt[:-1])

    def clear(self) -> None:
        """Forget everything, as the batch was made again."""
        self._prefixes.clear()
        self._ends.clear()


def _common(one: Sequence[int], other: Sequence[int], step: int) -> int:
    """Count the tokens that two texts begin with alike."""
    most = min(len(one), len(other))
    for start in range(0, most, step):
        if one[start : start + step] != other[start : start + step]:
            ends = zip(one[start:most], other[start:most], strict=True)
            return start + next((place for place, (mine, its) in enumerate(ends) if mine != its), most - start)
    return most
