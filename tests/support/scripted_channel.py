"""Server's end of a program's channel with scripted messages."""

from __future__ import annotations

from collections import deque
from typing import Any

from ovmstrio.isolation.messages import Message


class ScriptedChannel:
    """Channel with scripted messages of a server, numbered from 2, that records the answers."""

    def __init__(self, *messages: list[Any], has_end: bool = False) -> None:
        self._messages = deque[Message | None](Message(list(each)) for each in enumerate(messages, start=2))
        if has_end:
            self._messages.append(None)
        self.sent: dict[int, Any] = {}

    def receive(self) -> Message | None:
        return self._messages.popleft() if self._messages else None

    def has_message(self) -> bool:
        return bool(self._messages)

    def send(self, value: Any) -> None:
        number, message = value
        self.sent[number] = message
