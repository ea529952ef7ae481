"""Answers of completions, whole and as events."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from ovmstrio.api.openai.pieces import DONE, JoinedText, write_event

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ovmstrio.api.openai.text_endpoint import Asked, Usage
    from ovmstrio.core.generation import Finish, Piece, TokenLogprob

__all__ = ["CompletionEvents", "WholeCompletion"]


def _head(model: str) -> dict[str, Any]:
    return {
        "id": f"cmpl-{uuid4().hex}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": model,
    }


class WholeCompletion:
    """An answer that is given at once.

    Args:
        model: as the body names it.
        texts: how many there are, of all prompts.
        has_logprobs: whether tokens come with their probabilities.
    """

    def __init__(self, model: str, texts: int, *, has_logprobs: bool) -> None:
        self._model = model
        self._texts = [JoinedText() for _ in range(texts)]
        self._has_logprobs = has_logprobs

    def take(self, index: int, piece: Piece) -> None:
        """Take one more piece."""
        self._texts[index].take(piece)

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


class CompletionEvents:
    """An answer as events, each with what has come of one text.

    Args:
        model: as the body names it.
        asked: what the body asks for.
        write_error: writes a failure.
    """

    def __init__(self, model: str, asked: Asked, write_error: Callable[[Exception], bytes]) -> None:
        self._head = _head(model)
        self._asked = asked
        self._has_logprobs = asked.requests[0].logprobs
        self._write_error = write_error
        self._lengths: dict[int, int] = {}

    def begin(self) -> bytes:
        """Write nothing: a failure before the first token has a status."""
        return b""

    def write(self, index: int, piece: Piece, usage: Usage) -> bytes:
        """Write one more piece."""
        if not piece.text and not piece.finish and not piece.logprobs:
            return b""
        logprobs = None
        if self._has_logprobs and piece.logprobs:
            offset = self._lengths.get(index, 0)
            self._lengths[index] = offset + sum(len(token.text) for token in piece.logprobs)
            logprobs = _logprobs(piece.logprobs, offset)
        document: dict[str, Any] = {**self._head, "choices": [_choice(index, piece.text, logprobs, piece.finish)]}
        if self._asked.tells_usage:
            document["usage"] = usage.document() if self._asked.counts_on else None
        return write_event(document)

    def end(self, usage: Usage) -> bytes:
        """Write the account, if it is asked for, and the end."""
        if not self._asked.tells_usage:
            return DONE
        return write_event({**self._head, "choices": [], "usage": usage.document()}) + DONE

    def fail(self, error: Exception) -> bytes:
        """Write a failure; what follows is the end of the stream."""
        return self._write_error(error)


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
