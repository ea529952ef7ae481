"""Items of an answer, which grow piece by piece, and the events that tell how.

::

    Piece ─> OutputItems.take ─> one open item: reasoning, message or call ─> events of its begin, growth and end
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import uuid4

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ovmstrio.core.generation import Piece, TokenLogprob

__all__ = ["Event", "OutputItems"]


class Event(NamedTuple):
    """One event: its type behind ``response.``, and what it has beside the number of its place."""

    kind: str
    data: Mapping[str, Any]


class _Item(ABC):
    """An item that is being written."""

    def __init__(self, prefix: str, place: int) -> None:
        self.id = f"{prefix}_{uuid4().hex}"
        self.place = place
        self.parts: list[str] = []

    @property
    def text(self) -> str:
        """All that has come of it."""
        return "".join(self.parts)

    @property
    def at(self) -> dict[str, Any]:
        """Say which item an event is about."""
        return {"item_id": self.id, "output_index": self.place}

    def begin(self) -> Iterator[Event]:
        """Tell that it is there."""
        yield Event("output_item.added", {"output_index": self.place, "item": self.document("in_progress")})
        yield from self.begin_part()

    def end(self, status: str) -> Iterator[Event]:
        """Tell that it is whole."""
        yield from self.end_part()
        yield Event("output_item.done", {"output_index": self.place, "item": self.document(status)})

    def begin_part(self) -> Iterator[Event]:
        """Tell that its text begins."""
        return iter(())

    @abstractmethod
    def grow(self, text: str) -> Event:
        """Tell more of its text."""

    @abstractmethod
    def end_part(self) -> Iterator[Event]:
        """Tell that its text is whole."""

    @abstractmethod
    def document(self, status: str) -> Mapping[str, Any]:
        """Give it as it is now."""


class _Reasoning(_Item):
    """What a model thinks before it answers."""

    def __init__(self, place: int) -> None:
        super().__init__("rs", place)

    @property
    def _in_summary(self) -> dict[str, Any]:
        return {**self.at, "summary_index": 0}

    def _part(self) -> Mapping[str, Any]:
        return {"type": "summary_text", "text": self.text}

    def begin_part(self) -> Iterator[Event]:
        yield Event("reasoning_summary_part.added", {**self._in_summary, "part": self._part()})

    def grow(self, text: str) -> Event:
        self.parts.append(text)
        return Event("reasoning_summary_text.delta", {**self._in_summary, "delta": text})

    def end_part(self) -> Iterator[Event]:
        yield Event("reasoning_summary_text.done", {**self._in_summary, "text": self.text})
        yield Event("reasoning_summary_part.done", {**self._in_summary, "part": self._part()})

    def document(self, status: str) -> Mapping[str, Any]:
        return {
            "id": self.id,
            "type": "reasoning",
            "status": status,
            "summary": [self._part()] if self.parts else [],
        }


class _Message(_Item):
    """What a model says."""

    def __init__(self, place: int) -> None:
        super().__init__("msg", place)
        self.logprobs: list[Mapping[str, Any]] = []
        self._has_begun = False

    @property
    def _in_content(self) -> dict[str, Any]:
        return {**self.at, "content_index": 0}

    def _part(self) -> Mapping[str, Any]:
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": self.logprobs}

    def begin_part(self) -> Iterator[Event]:
        self._has_begun = True
        yield Event("content_part.added", {**self._in_content, "part": self._part()})

    def grow(self, text: str, logprobs: Sequence[TokenLogprob] = ()) -> Event:
        self.parts.append(text)
        told = [_logprob(token) for token in logprobs]
        self.logprobs += told
        return Event("output_text.delta", {**self._in_content, "delta": text, "logprobs": told})

    def end_part(self) -> Iterator[Event]:
        yield Event("output_text.done", {**self._in_content, "text": self.text, "logprobs": self.logprobs})
        yield Event("content_part.done", {**self._in_content, "part": self._part()})

    def document(self, status: str) -> Mapping[str, Any]:
        content = [self._part()] if self._has_begun else []
        return {"id": self.id, "type": "message", "status": status, "role": "assistant", "content": content}


class _Call(_Item):
    """A call of a tool."""

    def __init__(self, place: int, index: int, call_id: str, name: str) -> None:
        super().__init__("fc", place)
        self.index = index
        self._call_id = call_id or f"call_{uuid4().hex}"
        self._name = name

    def grow(self, text: str) -> Event:
        self.parts.append(text)
        return Event("function_call_arguments.delta", {**self.at, "delta": text})

    def end_part(self) -> Iterator[Event]:
        yield Event("function_call_arguments.done", {**self.at, "name": self._name, "arguments": self.text})

    def document(self, status: str) -> Mapping[str, Any]:
        return {
            "id": self.id,
            "type": "function_call",
            "status": status,
            "call_id": self._call_id,
            "name": self._name,
            "arguments": self.text,
        }


class OutputItems:
    """The items of one answer, of which at most the last one is open."""

    def __init__(self) -> None:
        self._ended: list[Mapping[str, Any]] = []
        self._open: _Item | None = None

    def documents(self, status: str = "in_progress") -> list[Mapping[str, Any]]:
        """Give them as they are now, the last one as in this state if it is open."""
        return [*self._ended, *([] if self._open is None else [self._open.document(status)])]

    def take(self, piece: Piece) -> Iterator[Event]:
        """Take one more piece, and tell what has become of it."""
        if piece.reasoning:
            if not isinstance(self._open, _Reasoning):
                yield from self._turn_to(_Reasoning(self._next_place))
            yield self._grown(piece.reasoning)
        if piece.text or (piece.logprobs and not piece.calls and not piece.reasoning):
            if not isinstance(self._open, _Message):
                yield from self._turn_to(_Message(self._next_place))
            message = self._open
            assert isinstance(message, _Message)  # noqa: S101 - it was opened here
            yield message.grow(piece.text, piece.logprobs)
        for delta in piece.calls:
            if not isinstance(self._open, _Call) or self._open.index != delta.index:
                yield from self._turn_to(_Call(self._next_place, delta.index, delta.id, delta.name))
            if delta.arguments:
                yield self._grown(delta.arguments)

    def end(self, status: str) -> Iterator[Event]:
        """Tell that there is no more; an answer of nothing is an empty message."""
        if self._open is None and not self._ended:
            yield from self._turn_to(_Message(0))
        yield from self._end_open(status)

    @property
    def _next_place(self) -> int:
        return len(self._ended) + (self._open is not None)

    def _grown(self, text: str) -> Event:
        assert self._open is not None  # noqa: S101 - it was opened by the caller
        return self._open.grow(text)

    def _turn_to(self, item: _Item) -> Iterator[Event]:
        yield from self._end_open("completed")
        self._open = item
        yield from item.begin()

    def _end_open(self, status: str) -> Iterator[Event]:
        item, self._open = self._open, None
        if item is not None:
            yield from item.end(status)
            self._ended.append(item.document(status))


def _logprob(token: TokenLogprob) -> Mapping[str, Any]:
    return {
        "token": token.text,
        "logprob": token.logprob if token.logprob is not None else 0.0,
        "bytes": list(token.text.encode(errors="replace")),
        "top_logprobs": [],
    }
