"""Pieces of generated text, put together again, and the events that they are written into."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import orjson

from ovmstrio.core.generation import Finish

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ovmstrio.core.generation import Piece, TokenLogprob

__all__ = ["DONE", "JoinedText", "write_event"]

DONE: Final = b"data: [DONE]\n\n"


def write_event(document: Mapping[str, Any]) -> bytes:
    """Write a document as an event without a name."""
    return b"data: %b\n\n" % orjson.dumps(document)


@dataclass(slots=True)
class JoinedText:
    """All that has come of one text."""

    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: dict[int, dict[str, Any]] = field(default_factory=dict)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: Finish = Finish.STOP

    def take(self, piece: Piece) -> None:
        """Take one more piece."""
        self.text.append(piece.text)
        self.reasoning.append(piece.reasoning)
        self.logprobs.extend(piece.logprobs)
        for delta in piece.calls:
            call = self.calls.setdefault(delta.index, {"id": "", "name": "", "arguments": []})
            call["id"] = call["id"] or delta.id
            call["name"] = call["name"] or delta.name
            call["arguments"].append(delta.arguments)
        self.finish = piece.finish or self.finish

    def message(self) -> dict[str, Any]:
        """Give it as a message; one that calls tools and says nothing has no content."""
        text, reasoning = "".join(self.text), "".join(self.reasoning)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": text or (None if self.calls else ""),
            "refusal": None,
        }
        if reasoning:
            message["reasoning_content"] = reasoning
        if self.calls:
            message["tool_calls"] = [
                {
                    "id": call["id"],
                    "type": "function",
                    "function": {"name": call["name"], "arguments": "".join(call["arguments"])},
                }
                for _, call in sorted(self.calls.items())
            ]
        return message
