"""Prefill scheduling around the prefix cache of OpenVINO GenAI.

Two sequences that get the same partial block both write into it and produce wrong output. Two sequences with the same
uncached prefix would both compute it, so the second waits for the first.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from ovmstrio.inference.engine.pipeline import Pipeline
    from ovmstrio.inference.engine.sequences import RunningSequence


def block_keys(tokens: Sequence[int], block_tokens: int) -> Iterator[tuple[int, int]]:
    """Yield the end and the chained hash of each block of a sequence; the last block may be partial."""
    key = 0
    for start in range(0, len(tokens), block_tokens):
        block = tokens[start : start + block_tokens]
        key = hash((key, *block))
        yield start + len(block), key


class PrefixCacheModel:
    """Estimate of the prefix cache: blocks available to later prompts; ``blocks`` is the capacity, 0 for no cache."""

    def __init__(self, blocks: int, block_tokens: int) -> None:
        self._most = blocks
        self._block = block_tokens
        self._known: OrderedDict[int, None] = OrderedDict()

    def find(self, tokens: Sequence[int]) -> int:
        """Return the number of cached tokens of a new prompt; the last token is always computed."""
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
        """Return whether all blocks of a sequence are cached, the last one included."""
        return all(key in self._known for _, key in block_keys(tokens, self._block))

    def _find_part(self, before: int, tokens: Sequence[int]) -> int:
        """Find a partial block, which then belongs to the new sequence."""
        for number in range(1, min(len(tokens) + 1, self._block)):
            key = hash((before, *tokens[:number]))
            if key in self._known:
                del self._known[key]
                return number
        return 0

    def keep(self, tokens: Sequence[int], *, is_whole: bool = True) -> None:
        """Add computed blocks; of a running sequence (``is_whole`` is false) the full ones only."""
        if not self._most:
            return
        for end, key in block_keys(tokens, self._block):
            if (is_whole or not end % self._block) and key not in self._known:
                self._known[key] = None
                if len(self._known) > self._most:
                    self._known.popitem(last=False)

    def clear(self) -> None:
        """Forget everything, after a rebuild of the batch."""
        self._known.clear()


class PartialBlocks:
    """Ends of finished sequences; ``most`` limits how many are remembered."""

    def __init__(self, most: int, block_tokens: int) -> None:
        self._most = most
        self._block = block_tokens
        self._ends: OrderedDict[tuple[int, tuple[int, ...]], None] = OrderedDict()
        self._heads: Counter[int] = Counter()

    def note(self, tokens: Sequence[int]) -> None:
        """Record the end of a sequence, unless it is a block boundary."""
        full = len(tokens) - len(tokens) % self._block
        if full == len(tokens):
            return
        *_, (_, head) = (0, 0), *block_keys(tokens[:full], self._block)
        end = head, tuple(tokens[full:])
        if end not in self._ends:
            self._heads[head] += 1
        self._ends[end] = None
        self._ends.move_to_end(end)
        if len(self._ends) > self._most:
            (head, _), _ = self._ends.popitem(last=False)
            self._heads[head] -= 1
            if not self._heads[head]:
                del self._heads[head]

    def find(self, tokens: Sequence[int]) -> Iterator[int]:
        """Yield the positions in a prompt at which an earlier sequence ended."""
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
        """Forget everything, after a rebuild of the batch."""
        self._ends.clear()
        self._heads.clear()


# Ends remembered beyond the number of blocks, as blocks are not evicted in the order in which sequences end.
_EXTRA_ENDS: Final = 512


class PrefillScheduler:
    """Decides which prompts may be in prefill at the same time."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.caches = pipeline.caches_prefixes
        self._block = pipeline.block_tokens
        self._prefixes = PrefixCacheModel(pipeline.blocks if self.caches else 0, self._block)
        self._ends = PartialBlocks(pipeline.blocks + _EXTRA_ENDS, self._block)

    def may_start(self, tokens: Sequence[int], running: Collection[RunningSequence]) -> bool:
        """Return whether prefill of a prompt may start in the next step."""
        if not self.caches:
            return True
        reading = self._most_shared(tokens, (text for text in running if text.is_reading))
        if not self._prefixes.holds(tokens[: reading - reading % self._block]):
            return False
        begin = tokens[: self._most_shared(tokens, (text for text in running if not text.is_settled))]
        return not any(self._ends.find(begin)) and not any(text.ends_within(begin, self._block) for text in running)

    def _most_shared(self, tokens: Sequence[int], texts: Iterable[RunningSequence]) -> int:
        return max(
            (_common(tokens, each.pending_tokens, self._block) for each in texts if each.handle is not None), default=0
        )

    def begin(self, tokens: Sequence[int]) -> int:
        """Return the number of cached tokens of a prompt that starts now, as far as known."""
        return self._prefixes.find(tokens)

    def go_on(self, tokens: Sequence[int]) -> None:
        """Record the computed tokens of a running sequence."""
        self._prefixes.keep(tokens, is_whole=False)

    def end(self, tokens: Sequence[int]) -> None:
        """Record the computed tokens of a sequence that has left the batch."""
        if self.caches:
            self._prefixes.keep(tokens)
            self._ends.note(tokens)

    def record_beam_end(self, prompt: Sequence[int]) -> None:
        """Record the end of a beam search, whose beams share the prompt (or all but its last token)."""
        if self.caches:
            self._ends.note(prompt if len(prompt) % self._block else prompt[:-1])

    def clear(self) -> None:
        """Forget everything, after a rebuild of the batch."""
        self._prefixes.clear()
        self._ends.clear()


def _common(one: Sequence[int], other: Sequence[int], step: int) -> int:
    most = min(len(one), len(other))
    for start in range(0, most, step):
        if one[start : start + step] != other[start : start + step]:
            ends = zip(one[start:most], other[start:most], strict=True)
            return start + next((place for place, (left, right) in enumerate(ends) if left != right), most - start)
    return most
