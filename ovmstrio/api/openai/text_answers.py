"""What answers of chat and of completions have in common: their heads, and the frames of their events."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from ovmstrio.api.openai.pieces import DONE, JoinedText, write_event

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ovmstrio.api.openai.text_endpoint import Asked, Usage
    from ovmstrio.core.generation import Piece

__all__ = ["EventsOfTexts", "WholeTexts", "answer_head"]


def answer_head(prefix: str, kind: str, model: str) -> dict[str, Any]:
    """Begin an answer: a new name, when it was made (seconds since 1970), and the model as the body names it."""
    return {"id": f"{prefix}-{uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}


class WholeTexts:
    """Texts that are given at once.

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


class EventsOfTexts:
    """An answer as events, each with what has come of one text.

    Args:
        head: what every event says.
        asked: what the body asks for.
        write_error: writes a failure.
    """

    def __init__(self, head: Mapping[str, Any], asked: Asked, write_error: Callable[[Exception], bytes]) -> None:
        self._head = head
        self._asked = asked
        self._has_logprobs = asked.requests[0].logprobs
        self._write_error = write_error

    def begin(self) -> bytes:
        """Write nothing: a failure before the first token has a status."""
        return b""

    def end(self, usage: Usage) -> bytes:
        """Write the account, if it is asked for, and the end."""
        if not self._asked.tells_usage:
            return DONE
        return write_event({**self._head, "choices": [], "usage": usage.document()}) + DONE

    def fail(self, error: Exception) -> bytes:
        """Write a failure; what follows is the end of the stream."""
        return self._write_error(error)

    def _event(self, choices: Sequence[Mapping[str, Any]], usage: Usage) -> bytes:
        document: dict[str, Any] = {**self._head, "choices": choices}
        if self._asked.tells_usage:
            document["usage"] = usage.document() if self._asked.counts_on else None
        return write_event(document)
