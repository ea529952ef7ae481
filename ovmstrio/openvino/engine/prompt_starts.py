"""Which texts may begin to read their prompts beside others that do, where the library caches prefixes.

Two that the library gives the same block which is not full both write into it, and come out wrong.  Two with a
beginning that is not in the cache yet would both compute it: it costs less to let the second one wait for the first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ovmstrio.openvino.engine.cached_prefixes import CachedPrefixes
from ovmstrio.openvino.engine.open_blocks import OpenBlocks

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from ovmstrio.openvino.engine.pipeline import Pipeline
    from ovmstrio.openvino.engine.texts import RunningText

__all__ = ["PromptStarts"]

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
