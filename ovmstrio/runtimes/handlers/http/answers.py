"""What a front end writes: a status, headers and a body, and what runs when that is done."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

__all__ = ["ByteStream", "Callback", "Headers", "HttpAnswer"]

Headers = tuple[tuple[str, str], ...]
"""Names and values in their order; names may repeat, and are in lower case."""

Callback = Callable[[], Any]
"""Runs after the answer; a plain function or an ``async def`` one."""


class ByteStream(Protocol):
    """A body that comes in pieces; whoever writes it must close it, however writing ends."""

    def __aiter__(self) -> Self:
        """Give itself."""
        ...

    async def __anext__(self) -> bytes:
        """Give the next piece.

        Raises:
            StopAsyncIteration: that was all.
            UserCodeError: the user code that makes it raised, which has been logged; the body cannot be finished.

        Cancellation: while there is none.
        """
        ...

    async def aclose(self) -> None:
        """Stop making more; may be called twice.

        Cancellation: shielded, for a bounded time.
        """
        ...


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """One answer.

    Attributes:
        status: of HTTP.
        headers: without ``content-length`` where ``body`` is a stream of unknown length.
        body: all of it, or a stream of pieces.
        after: callbacks, for :meth:`LoadedHandler.run_after` once the client has the body.
    """

    status: int
    headers: Headers = ()
    body: bytes | ByteStream = b""
    after: tuple[Callback, ...] = ()

    def followed_by(self, callback: Callback) -> HttpAnswer:
        """Give the same answer with one more callback."""
        return replace(self, after=(*self.after, callback))
