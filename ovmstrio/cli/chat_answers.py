"""State of a conversation in ``ovms chat``: its messages, and each answer with its timing."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from ovmstrio.client.chat import ChatDelta, ChatUsage
    from ovmstrio.client.chat_client import ChatClient


@dataclass(slots=True)
class ChatAnswer:
    """An answer, possibly incomplete. Times are in seconds since the request."""

    text: str = ""
    reasoning: str = ""
    calls: str = ""
    finish: str = ""
    usage: ChatUsage | None = None
    pieces: int = 0
    first: float = 0.0
    last: float = 0.0
    started: float = field(default_factory=perf_counter)

    def add(self, piece: ChatDelta) -> None:
        """Add a delta to the answer."""
        self.text += piece.text
        self.reasoning += piece.reasoning
        self.calls += piece.calls
        self.finish = piece.finish or self.finish
        self.usage = piece.usage or self.usage
        if piece.text or piece.reasoning or piece.calls:
            self.pieces += 1
            self.last = perf_counter() - self.started
            self.first = self.first or self.last

    @property
    def tokens(self) -> int:
        """Number of tokens; the number of deltas if the server has not reported usage."""
        return self.pieces if self.usage is None else self.usage.completion_tokens

    @property
    def rate(self) -> float:
        """Tokens per second after the first token, so without prefill; 0 if unknown."""
        seconds = self.last - self.first
        return (self.tokens - 1) / seconds if seconds > 0 and self.tokens > 1 else 0.0

    def summary(self) -> str:
        """Return the number of tokens and the times, for people."""
        parts = [f"{self.tokens} token{'' if self.tokens == 1 else 's'}"]
        if self.rate:
            parts.append(f"{self.rate:.1f} tokens/s")
        if self.pieces:
            parts.append(f"first after {self.first * 1e3:.0f} ms")
        if self.usage is not None:
            cached = f", {self.usage.cached_tokens} cached" if self.usage.cached_tokens else ""
            parts.append(f"prompt of {self.usage.prompt_tokens}{cached}")
        if self.finish == "length":
            parts.append("cut off at the maximum length")
        return ", ".join(parts)

    def facts(self, model: str) -> dict[str, Any]:
        """Return the answer and its figures, for programs."""
        usage = self.usage
        return {
            "model": model,
            "text": self.text,
            "reasoning": self.reasoning,
            "calls": self.calls.strip(),
            "finish_reason": self.finish,
            "prompt_tokens": None if usage is None else usage.prompt_tokens,
            "completion_tokens": None if usage is None else usage.completion_tokens,
            "first_seconds": round(self.first, 4),
            "seconds": round(self.last, 4),
            "tokens_per_second": round(self.rate, 2),
        }


@dataclass(slots=True)
class ChatConversation:
    """A conversation with a model.

    Attributes:
        client: client of the server.
        model: name of the model.
        options: additional fields of each request.
        system: system message; empty for none.
        said: messages and answers since the last reset.
    """

    client: ChatClient
    model: str
    options: dict[str, Any]
    system: str = ""
    said: list[dict[str, str]] = field(default_factory=list)

    def ask(self, message: str, show: Callable[[ChatDelta], None]) -> ChatAnswer:
        """Send a message, and show the answer as it is streamed.

        An answer stopped by Ctrl-C stays in the conversation as far as streamed. A failed request leaves nothing.

        Raises:
            ServerError: the server refuses, fails or is unreachable.
            KeyboardInterrupt: Ctrl-C; the request is cancelled on the server, too.
        """
        answer = ChatAnswer()
        question = {"role": "user", "content": message}
        first = [{"role": "system", "content": self.system}] if self.system else []
        pieces = self.client.deltas(self.model, [*first, *self.said, question], self.options)
        try:
            for piece in pieces:
                answer.add(piece)
                show(piece)
        except KeyboardInterrupt:
            self._remember(question, answer)
            raise
        finally:
            pieces.close()
        self._remember(question, answer)
        return answer

    def reset(self) -> None:
        """Remove all messages except the system message."""
        self.said.clear()

    def _remember(self, question: dict[str, str], answer: ChatAnswer) -> None:
        if answer.text:
            self.said += [question, {"role": "assistant", "content": answer.text}]
