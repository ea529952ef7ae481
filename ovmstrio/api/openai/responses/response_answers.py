"""Answers of the Responses API, whole and as events."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import orjson

from ovmstrio.api.openai.pieces import DONE
from ovmstrio.api.openai.responses.output_items import Event, OutputItems
from ovmstrio.core.errors import ServerError
from ovmstrio.core.generation import Finish

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ovmstrio.api.openai.text_endpoint import Asked, Usage
    from ovmstrio.core.generation import Conversation, Piece

__all__ = ["ResponseEvents", "WholeResponse"]


class _Response:
    """What is told of an answer beside its items: who gave it, and what it was asked with."""

    def __init__(self, model: str, document: Mapping[str, Any], asked: Asked) -> None:
        request = asked.requests[0]
        prompt: Conversation = request.prompt  # type: ignore[assignment]  # the endpoint makes no other
        self._head = {
            "id": f"resp_{uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "instructions": document.get("instructions"),
            "max_output_tokens": request.sampling.max_tokens,
            "metadata": document.get("metadata") or {},
            "parallel_tool_calls": document.get("parallel_tool_calls", True),
            "previous_response_id": None,
            "reasoning": document.get("reasoning") or {"effort": None, "summary": None},
            "store": False,
            "temperature": request.sampling.temperature,
            "text": document.get("text") or {"format": {"type": "text"}},
            "tool_choice": _choice(prompt),
            "tools": [_tool(tool) for tool in prompt.tools],
            "top_p": request.sampling.top_p,
            "truncation": "disabled",
            "background": False,
        }

    def document(
        self, status: str, items: Iterable[Mapping[str, Any]], usage: Usage | None, error: Exception | None = None
    ) -> dict[str, Any]:
        """Give it in a state."""
        why = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            **self._head,
            "status": status,
            "error": None if error is None else _error(error),
            "incomplete_details": why,
            "output": list(items),
            "usage": None if usage is None else _usage(usage),
        }


class WholeResponse:
    """An answer that is given at once."""

    def __init__(self, model: str, document: Mapping[str, Any], asked: Asked) -> None:
        self._response = _Response(model, document, asked)
        self._items = OutputItems()
        self._status = "completed"

    def take(self, index: int, piece: Piece) -> None:
        """Take one more piece."""
        del index
        for _ in self._items.take(piece):
            pass
        self._status = _status(piece, self._status)

    def document(self, usage: Usage) -> Mapping[str, Any]:
        """Give the answer."""
        for _ in self._items.end(self._status):
            pass
        return self._response.document(self._status, self._items.documents(), usage)


class ResponseEvents:
    """An answer as events, each with its type and number."""

    def __init__(self, model: str, document: Mapping[str, Any], asked: Asked) -> None:
        self._response = _Response(model, document, asked)
        self._items = OutputItems()
        self._status = "completed"
        self._number = 0
        self._has_begun = False

    def begin(self) -> bytes:
        """Tell that the answer is under way."""
        self._has_begun = True
        document = {"response": self._response.document("in_progress", (), None)}
        return self._written((Event("created", document), Event("in_progress", document)))

    def write(self, index: int, piece: Piece, usage: Usage) -> bytes:
        """Write one more piece."""
        del index, usage
        self._status = _status(piece, self._status)
        return self._written(self._items.take(piece))

    def end(self, usage: Usage) -> bytes:
        """Write the end of what is open, and of all."""
        ended = self._written(self._items.end(self._status))
        whole = self._response.document(self._status, self._items.documents(), usage)
        return ended + self._written((Event(self._status, {"response": whole}),)) + DONE

    def fail(self, error: Exception) -> bytes:
        """Write a failure, with what there is of the answer."""
        document = self._response.document("failed", self._items.documents("incomplete"), None, error)
        return self._written((Event("failed", {"response": document}),)) + DONE

    def _written(self, events: Iterable[Event]) -> bytes:
        written = []
        for kind, data in events:
            document = {"type": f"response.{kind}", "sequence_number": self._number, **data}
            self._number += 1
            written.append(b"event: response.%b\ndata: %b\n\n" % (kind.encode(), orjson.dumps(document)))
        return b"".join(written)


def _status(piece: Piece, status: str) -> str:
    return "incomplete" if piece.finish is Finish.LENGTH else status


def _usage(usage: Usage) -> Mapping[str, Any]:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached},
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.prompt + usage.completion,
    }


def _error(error: Exception) -> Mapping[str, Any]:
    told = error.message if isinstance(error, ServerError) else "internal error; the server's log has the details"
    return {"code": "server_error", "message": told}


def _choice(prompt: Conversation) -> Any:
    return {"type": "function", "name": prompt.tool_name} if prompt.tool_name else prompt.tool_choice


def _tool(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Give a tool as this API has it, on one level."""
    return {"type": "function", "description": None, "strict": False, **tool["function"]}
