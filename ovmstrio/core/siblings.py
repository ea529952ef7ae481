"""The other processes of a server that several are."""

from __future__ import annotations

from typing import Any, Protocol

__all__ = ["Siblings"]


class Siblings(Protocol):
    """The other processes of a server."""

    async def ask_all(self, question: str, *arguments: Any, limit_seconds: float = 60) -> list[Any]:
        """Ask all of them that can be reached, and give their answers, which are plain data.

        Raises:
            ServerError: what one of them raised, or did not answer in time; the message tells which one.

        Cancellation: at once.
        """
        ...
