"""Requests that go on for long, such as streams, which end when it is not known any more who makes them.

::

    a door: with while_known(headers, certificate): ...   one entry for as long as the block lasts
    the gate, whenever files of callers have been looked at ──> end(error) of those whose key is gone or over

A message of a stream costs nothing: who makes a request is asked for when callers change, or a key ends.
"""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import trio

from ovmstrio.core.callers import Caller, current_caller
from ovmstrio.core.errors import ServerError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

__all__ = ["LongRequest", "LongRequests", "begin_long", "long_requests", "while_known"]


class LongRequest:
    """One request that goes on.

    Args:
        caller: who makes it.
        headers: that it came with, in small letters.
        certificate: of the client, verified.

    Attributes:
        error: what has ended it; None while it goes on.
        known_as: what whoever looks has found last.
        scope: what is cancelled then.
    """

    __slots__ = ("caller", "certificate", "error", "headers", "known_as", "scope")

    def __init__(
        self, caller: Caller, headers: Iterable[tuple[str, str]], certificate: Mapping[str, Any] | None
    ) -> None:
        self.caller = caller
        self.headers = headers
        self.certificate = certificate
        self.error: ServerError | None = None
        self.known_as: object = None
        self.scope = trio.CancelScope()

    def end(self, error: ServerError) -> None:
        """End it; the first error counts."""
        if self.error is None:
            self.error = error
            self.scope.cancel()


class LongRequests:
    """Those of one server that go on now."""

    def __init__(self) -> None:
        self._open: set[LongRequest] = set()

    def __len__(self) -> int:
        """Count them."""
        return len(self._open)

    def __iter__(self) -> Iterator[LongRequest]:
        """Go through those that there are now, of which some may end meanwhile."""
        return iter(tuple(self._open))

    def add(self, request: LongRequest) -> None:
        """Know one more."""
        self._open.add(request)

    def remove(self, request: LongRequest) -> None:
        """Forget one that has ended."""
        self._open.discard(request)


long_requests: Final[ContextVar[LongRequests | None]] = ContextVar("long_requests", default=None)
"""Those of the server that the running task is of; None where nobody has to be known."""


def begin_long(
    headers: Iterable[tuple[str, str]], certificate: Mapping[str, Any] | None
) -> tuple[LongRequest, Callable[[], None]] | None:
    """Know the running task's request as one that goes on; None where nobody has to be known.

    Args:
        headers: of the request, in small letters.
        certificate: of the client, verified.

    Ownership: what is given must be called once, when the request has ended.
    """
    every, caller = long_requests.get(), current_caller.get()
    if every is None or caller is None:
        return None
    request = LongRequest(caller, headers, certificate)
    every.add(request)
    return request, partial(every.remove, request)


@contextmanager
def while_known(headers: Iterable[tuple[str, str]], certificate: Mapping[str, Any] | None) -> Iterator[None]:
    """Run the block for as long as it is known who makes the running task's request.

    Args as those of :func:`begin_long`.

    Raises:
        Unauthenticated: it was cancelled, as it is not known any more who makes it.
        MissingScope: likewise, as that caller may do less than when it began.

    Cancellation: the block is cancelled then, and the error takes the place of its end.
    """
    begun = begin_long(headers, certificate)
    if begun is None:
        yield
        return
    request, end = begun
    try:
        with request.scope:
            yield
    finally:
        end()
    if request.scope.cancelled_caught and request.error is not None:
        raise request.error
