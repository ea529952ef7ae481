"""Answers of chat, whole and as events."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from ovmstrio.api.openai.pieces import DONE, JoinedText, write_event

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ovmstrio.api.openai.text_endpoint import Asked, Usage
    from ovmstrio.core.generation import CallDelta, Finish, Piece, TokenLogprob

__all__ = ["ChatEvents", "WholeChat"]


class WholeChat:
    """A chat's answer that is given at once.

    Args:
        model: as the body names it.
        texts: how many there are.
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
        return {
            "id": f"chatcmpl-{uuid4().hex}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": self._model,
            "choices": [
                {
                    "index": index,
                    "message": text.message(),
                    "logprobs": _logprobs(text.logprobs) if self._has_logprobs else None,
                    "finish_reason": text.finish.value,
                }
                for index, text in enumerate(self._texts)
            ],
            "usage": usage.document(),
        }


class ChatEvents:
    """A chat's answer as events, each with what has come of one text.

    Args:
        model: as the body names it.
        asked: what the body asks for.
        write_error: writes a failure.
    """

    def __init__(self, model: str, asked: Asked, write_error: Callable[[Exception], bytes]) -> None:
        self._head = {
            "id": f"chatcmpl-{uuid4().hex}",
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": model,
        }
        self._asked = asked
        self._has_logprobs = asked.requests[0].logprobs
        self._write_error = write_error
        self._begun: set[int] = set()

    def begin(self) -> bytes:
        """Write nothing: a failure before the first token has a status."""
        return b""

    def write(self, index: int, piece: Piece, usage: Usage) -> bytes:
        """Write one more piece; the first one of a text says whose it is."""
        first = b""
        if index not in self._begun:
            self._begun.add(index)
            first = self._chunk(index, {"role": "assistant", "content": ""}, None, None, usage)
        delta = _delta(piece)
        if not delta and not piece.finish and not piece.logprobs:
            return first
        logprobs = _logprobs(piece.logprobs) if self._has_logprobs and piece.logprobs else None
        return first + self._chunk(index, delta, logprobs, piece.finish, usage)

    def end(self, usage: Usage) -> bytes:
        """Write the account, if it is asked for, and the end."""
        if not self._asked.tells_usage:
            return DONE
        return write_event({**self._head, "choices": [], "usage": usage.document()}) + DONE

    def fail(self, error: Exception) -> bytes:
        """Write a failure; what follows is the end of the stream."""
        return self._write_error(error)

    def _chunk(self, index: int, delta: Mapping[str, Any], logprobs: Any, finish: Finish | None, usage: Usage) -> bytes:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": None if finish is None else finish.value,
        }
        document: dict[str, Any] = {**self._head, "choices": [choice]}
        if self._asked.tells_usage:
            document["usage"] = usage.document() if self._asked.counts_on else None
        return write_event(document)


def _delta(piece: Piece) -> dict[str, Any]:
    delta: dict[str, Any] = {}
    if piece.text:
        delta["content"] = piece.text
    if piece.reasoning:
        delta["reasoning_content"] = piece.reasoning
    if piece.calls:
        delta["tool_calls"] = [_call_delta(call) for call in piece.calls]
    return delta


def _call_delta(call: CallDelta) -> dict[str, Any]:
    function: dict[str, Any] = {"arguments": call.arguments}
    if not call.id and not call.name:
        return {"index": call.index, "function": function}
    return {
        "index": call.index,
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, **function},
    }


def _logprobs(tokens: Sequence[TokenLogprob]) -> Mapping[str, Any]:
    """Tell tokens with the logarithms of their probabilities; of others that there might have been nothing is known."""
    content = [
        {
            "token": token.text,
            "logprob": token.logprob if token.logprob is not None else 0.0,
            "bytes": list(token.text.encode(errors="replace")),
            "top_logprobs": [],
        }
        for token in tokens
    ]
    return {"content": content, "refusal": None}
