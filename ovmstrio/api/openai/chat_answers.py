"""Answers of chat, whole and as events."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ovmstrio.api.openai.text_answers import EventsOfTexts, WholeTexts, answer_head

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ovmstrio.api.openai.text_endpoint import Asked, Usage
    from ovmstrio.core.generation import CallDelta, Finish, Piece, TokenLogprob

__all__ = ["ChatEvents", "WholeChat"]


class WholeChat(WholeTexts):
    """A chat's answer that is given at once."""

    def document(self, usage: Usage) -> Mapping[str, Any]:
        """Give the answer."""
        return {
            **answer_head("chatcmpl", "chat.completion", self._model),
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


class ChatEvents(EventsOfTexts):
    """A chat's answer as events, each with what has come of one text.

    Args:
        model: as the body names it.
        asked: what the body asks for.
        write_error: writes a failure.
    """

    def __init__(self, model: str, asked: Asked, write_error: Callable[[Exception], bytes]) -> None:
        super().__init__(answer_head("chatcmpl", "chat.completion.chunk", model), asked, write_error)
        self._begun: set[int] = set()

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

    def _chunk(self, index: int, delta: Mapping[str, Any], logprobs: Any, finish: Finish | None, usage: Usage) -> bytes:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": None if finish is None else finish.value,
        }
        return self._event([choice], usage)


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
