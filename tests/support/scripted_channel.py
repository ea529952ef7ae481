"""The server's end of a program's channel, with messages that a test has written down."""

from __future__ import annotations

from collections import deque
from typing import Any

from ovmstrio.work.messages.message_packets import Message


class ScriptedChannel:
    """Has messages of a server, and takes what is said to it."""

    def __init__(self, *messages: list[Any]) -> None:
        self._messages = deque(Message(list(each)) for each in enumerate(messages, start=2))
        self.sent: dict[int, Any] = {}

    def receive(self) -> Message | None:
        """Give the next message; None behind the last one."""
        return self._messages.popleft() if self._messages else None

    def has_message(self) -> bool:
        """Tell whether there is another one."""
        return bool(self._messages)

    def send(self, value: Any) -> None:
        """Note what a message, by its number, is answered with."""
        number, said = value
        self.sent[number] = said
