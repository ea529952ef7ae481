"""How tests talk to OpenAI's API: bodies, events, and what the service behind it was asked."""

from __future__ import annotations

import json
from typing import Any

from tests.support.text_generators import CHAT, ScriptedGenerator
from tests.unit.api.rest.servers import Serving

__all__ = ["chat_body", "events_of", "generator_of", "post_of"]


def chat_body(text: Any = "one two", **more: Any) -> dict[str, Any]:
    """Make the body of a chat of one message."""
    return {"model": CHAT, "messages": [{"role": "user", "content": text}], **more}


def generator_of(serving: Serving) -> ScriptedGenerator:
    """Give the service that makes text."""
    service: Any = serving.registry.peek(CHAT)
    assert isinstance(service, ScriptedGenerator)
    return service


def events_of(text: str) -> list[Any]:
    """Read the data of events; the end is its own word."""
    found = []
    for block in text.split("\n\n")[:-1]:
        data = block.rpartition("data: ")[2]
        found.append(data if data == "[DONE]" else json.loads(data))
    return found


def post_of(path: str, body: dict[str, Any], *extra: str) -> bytes:
    """Make a whole request."""
    data = json.dumps(body).encode()
    head = [f"POST {path} HTTP/1.1", "Host: h", f"Content-Length: {len(data)}", *extra]
    return "\r\n".join([*head, "", ""]).encode() + data
