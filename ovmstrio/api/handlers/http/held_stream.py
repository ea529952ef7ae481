"""Streams that hold a request until they are closed."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Self

import trio

from ovmstrio.core.errors import ServerError
from ovmstrio.core.texts import text_of
from ovmstrio.runtimes.handlers.batches import in_log
from ovmstrio.runtimes.handlers.http.responses import HTTPError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ovmstrio.core.http import ByteStream
    from ovmstrio.core.long_requests import LongRequest

__all__ = ["HeldStream"]


class HeldStream:
    """A stream that holds something until it is closed, and whose failures are those of a connection.

    Args:
        body: the stream.
        give_back: gives back what it holds; None if that is nothing.
        request_id: of the request that it answers, for the log.
        known: that request while it goes on, and what ends it; None where nobody has to be known.
    """

    def __init__(
        self,
        body: ByteStream,
        give_back: Callable[[], None] | None = None,
        request_id: str = "",
        known: tuple[LongRequest, Callable[[], None]] | None = None,
    ) -> None:
        self._body = body
        self._request_id = request_id
        self._give_back = give_back
        self._known = known

    def __aiter__(self) -> Self:
        """Give itself."""
        return self

    async def __anext__(self) -> bytes:
        """Give the next piece.

        Raises:
            trio.BrokenResourceError: the handler failed, or it is not known any more who asks.

        Cancellation: as the handler's stream.
        """
        if self._known is None:
            return await self._next()
        request = self._known[0]
        if request.error is None:
            # The handler may be waiting for what comes next when it is not known any more who asks.
            with trio.CancelScope() as request.scope:
                return await self._next()
        raise trio.BrokenResourceError(f"an answer breaks off: {request.error}")

    async def _next(self) -> bytes:
        try:
            with self._in_log():
                return await anext(self._body)
        except (ServerError, HTTPError) as error:
            # The status has been sent; all that can be said is that this is not the whole.
            raise trio.BrokenResourceError(f"the handler failed within its answer: {text_of(error)}") from error

    async def aclose(self) -> None:
        """Stop the stream.

        Cancellation: as the handler's stream.
        """
        give_back, self._give_back = self._give_back, None
        known, self._known = self._known, None
        if known is not None:
            known[1]()
        try:
            with self._in_log():
                await self._body.aclose()
        finally:
            if give_back is not None:
                give_back()

    def _in_log(self) -> AbstractContextManager[Any]:
        return in_log(self._request_id) if self._request_id else nullcontext()
