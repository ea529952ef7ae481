"""One conversation of ``ovms chat``: what was said, what is asked, and what comes of each answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from ovmstrio.client.chat import ChatClient, ChatDelta, ChatUsage


@dataclass(slots=True)
class ChatAnswer:
    """An answer as far as it has come; times are seconds since it was asked for."""

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
        """Take what has come."""
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
        """How many tokens it has; as many as pieces came, where the server has not said."""
        return self.pieces if self.usage is None else self.usage.completion_tokens

    @property
    def rate(self) -> float:
        """How many tokens came in a second, without the first, for which the prompt was computed; 0 if unknown."""
        seconds = self.last - self.first
        return (self.tokens - 1) / seconds if seconds > 0 and self.tokens > 1 else 0.0

    def summary(self) -> str:
        """Say how long it took."""
        parts = [f"{self.tokens} token{'' if self.tokens == 1 else 's'}"]
        if self.rate:
            parts.append(f"{self.rate:.1f} tokens/s")
        if self.pieces:
            parts.append(f"first after {self.first * 1e3:.0f} ms")
        if self.usage is not None:
            cached = f", {self.usage.cached_tokens} of them known" if self.usage.cached_tokens else ""
            parts.append(f"prompt of {self.usage.prompt_tokens}{cached}")
        if self.finish == "length":
            parts.append("cut off at its longest")
        return ", ".join(parts)

    def facts(self, model: str) -> dict[str, Any]:
        """Give it for programs."""
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
    """What was said to a model.

    Attributes:
        client: the server.
        model: the name.
        options: further fields of each request.
        system: what comes before everything; empty for nothing.
        said: messages and answers since the last reset.
    """

    client: ChatClient
    model: str
    options: dict[str, Any]
    system: str = ""
    said: list[dict[str, str]] = field(default_factory=list)

    def ask(self, message: str, show: Callable[[ChatDelta], None]) -> ChatAnswer:
        """Say something, and have the answer shown as it comes.

        What Ctrl-C stops is remembered as far as it has come; what fails was never said.

        Raises:
            ServerError: the server refuses or fails, or nobody answers.
            KeyboardInterrupt: Ctrl-C; the answer has ended on the server, too.
        """
        answer = ChatAnswer()
        asked = {"role": "user", "content": message}
        first = [{"role": "system", "content": self.system}] if self.system else []
        pieces = self.client.stream(self.model, [*first, *self.said, asked], self.options)
        try:
            for piece in pieces:
                answer.add(piece)
                show(piece)
        except KeyboardInterrupt:
            self._remember(asked, answer)
            raise
        finally:
            pieces.close()
        self._remember(asked, answer)
        return answer

    def reset(self) -> None:
        """Forget what was said; the system message stays."""
        self.said.clear()

    def _remember(self, asked: dict[str, str], answer: ChatAnswer) -> None:
        if answer.text:
            self.said += [asked, {"role": "assistant", "content": answer.text}]
