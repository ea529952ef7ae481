"""Exceptions of handlers."""

from __future__ import annotations

__all__ = ["CortexException", "UserException", "UserRuntimeException"]


class CortexException(Exception):
    """Base exception; its text joins the messages with colons.

    Args:
        messages: parts, the most general one first.
    """

    def __init__(self, *messages: str) -> None:
        super().__init__(": ".join(messages))

    def wrap(self, *messages: str) -> None:
        """Prepend messages to the text."""
        self.args = (": ".join((*messages, str(self))),)


class UserException(CortexException):
    """Error caused by the user."""

    def __init__(self, *messages: str) -> None:
        super().__init__("error", *messages)


class UserRuntimeException(UserException):
    """Error caused by the user while a handler runs."""

    def __init__(self, *messages: str) -> None:
        super().__init__(*messages, "runtime exception")
