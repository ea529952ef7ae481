"""Answers of completions, whole and as events."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ovmstrio.api.openai.text_answers import EventsOfTexts, WholeTexts, answer_head

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ovmstrio.api.openai.text_endpoint import Asked, Usage
    from ovmstrio.core.generation import Finish, Piece, TokenLogprob

__all__ = ["CompletionEvents", "WholeCompletion"]


def _head(model: str) -> dict[str, Any]:
    return answer_head("cmpl", "text_completion", model)


class WholeCompletion(WholeTexts):
    """An answer that is given at once."""

    def document(self, usage: Usage) -> Mapping[str, Any]:
        """Give the answer."""
        choices = [
            _choice(
                index,
                "".join(text.text),
                _logprobs(text.logprobs, 0) if self._has_logprobs else None,
                text.finish,
            )
            for index, text in enumerate(self._texts)
        ]
        return {**_head(self._model), "choices": choices, "usage": usage.document()}


class CompletionEvents(EventsOfTexts):
    """An answer as events, each with what has come of one text.

    Args:
        model: as the body names it.
        asked: what the body asks for.
        write_error: writes a failure.
    """

    def __init__(self, model: str, asked: Asked, write_error: Callable[[Exception], bytes]) -> None:
        super().__init__(_head(model), asked, write_error)
        self._lengths: dict[int, int] = {}

    def write(self, index: int, piece: Piece, usage: Usage) -> bytes:
        """Write one more piece."""
        if not piece.text and not piece.finish and not piece.logprobs:
            return b""
        logprobs = None
        if self._has_logprobs and piece.logprobs:
            offset = self._lengths.get(index, 0)
            self._lengths[index] = offset + sum(len(token.text) for token in piece.logprobs)
            logprobs = _logprobs(piece.logprobs, offset)
        return self._event([_choice(index, piece.text, logprobs, piece.finish)], usage)


def _choice(index: int, text: str, logprobs: Any, finish: Finish | None) -> dict[str, Any]:
    return {
        "index": index,
        "text": text,
        "logprobs": logprobs,
        "finish_reason": None if finish is None else finish.value,
    }


def _logprobs(tokens: Sequence[TokenLogprob], offset: int) -> Mapping[str, Any]:
    """Tell tokens with their probabilities, and where each begins in the text; the first of a prompt has none."""
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token.text)
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [None if token.logprob is None else {token.text: token.logprob} for token in tokens],
        "text_offset": offsets,
    }
