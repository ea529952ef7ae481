"""Text deltas: joining into messages and encoding as server-sent events."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import orjson

from ovmstrio.core.generation import Finish

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ovmstrio.core.generation import GenerationChunk, TokenLogprob

DONE: Final = b"data: [DONE]\n\n"


def encode_event(document: Mapping[str, Any]) -> bytes:
    """Encode a document as an unnamed event."""
    return b"data: %b\n\n" % orjson.dumps(document)


def logprob_document(token: TokenLogprob) -> dict[str, Any]:
    """Return a token's log probability; alternatives are unknown."""
    return {
        "token": token.text,
        "logprob": token.logprob if token.logprob is not None else 0.0,
        "bytes": list(token.text.encode(errors="replace")),
        "top_logprobs": [],
    }


@dataclass(slots=True)
class ChoiceText:
    """Everything generated for one choice."""

    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: dict[int, dict[str, Any]] = field(default_factory=dict)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: Finish = Finish.STOP

    def take(self, piece: GenerationChunk) -> None:
        """Append a delta."""
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
        """Return the chat message; a message with tool calls and no text has null content."""
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
