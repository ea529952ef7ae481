"""The span of a text that is made: how long it waited, when its first token came, how many there were."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ovmstrio.core.tracing import Span

__all__ = ["GenerationSpan"]


class GenerationSpan:
    """A part of a call that is recorded.

    Its phases are parts of it: ``queue`` until there is room in the batch, ``prefill`` until the first token, and
    ``decode``.  Steps are events of it, where the caller asks for them.

    Args:
        caller: what it is a part of, which is told the figures that the conventions want of a request.
    """

    __slots__ = ("_caller", "_is_decoding", "_phase", "_shows_steps", "_span")

    def __init__(self, caller: Span) -> None:
        self._caller = caller
        self._span = caller.begin("generation")
        self._shows_steps = caller.shows_steps
        self._is_decoding = False
        self._phase = self._span.begin("queue", {"ovmstrio.queue.of": "engine"})

    def prompted(self, tokens: int, cached: int) -> None:
        """Note that the prompt was taken in, and how many tokens it has."""
        for span in (self._span, self._caller):
            span.set("gen_ai.usage.input_tokens", tokens)
            span.set("gen_ai.usage.cache_read.input_tokens", cached)
        self._enter("prefill")

    def came(self, index: int, tokens: int) -> None:
        """Note that a step has brought tokens of one of the texts."""
        if not tokens:
            return
        if self._shows_steps:
            self._span.event("step", {"ovmstrio.text": index, "ovmstrio.tokens": tokens})
        if not self._is_decoding:
            self._is_decoding = True
            self._enter("decode")

    def end(self, tokens: int, finish: str | None) -> None:
        """End it; ``finish`` is why the text ends, None if it was not finished."""
        self._phase.end()
        for span in (self._span, self._caller):
            span.set("gen_ai.usage.output_tokens", tokens)
            if finish is not None:
                span.set("gen_ai.response.finish_reasons", finish)
        if finish is None:
            self._span.set("ovmstrio.cancelled", True)
        self._span.end()

    def _enter(self, phase: str) -> None:
        self._phase.end()
        self._phase = self._span.begin(phase)
