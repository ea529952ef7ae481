"""Exceptions that handlers catch, or raise themselves."""

from __future__ import annotations

__all__ = ["CortexException", "UserException", "UserRuntimeException"]


class CortexException(Exception):
    """Root of them all; its text is the parts, joined by colons.

    Args:
        messages: the parts, the most general one first.
    """

    def __init__(self, *messages: str) -> None:
        super().__init__(": ".join(messages))

    def wrap(self, *messages: str) -> None:
        """Put more parts before the text."""
        self.args = (": ".join((*messages, str(self))),)


class UserException(CortexException):
    """What the user of the server, not the server, is to blame for."""

    def __init__(self, *messages: str) -> None:
        super().__init__("error", *messages)


class UserRuntimeException(UserException):
    """The same, found while a handler runs."""

    def __init__(self, *messages: str) -> None:
        super().__init__(*messages, "runtime exception")
