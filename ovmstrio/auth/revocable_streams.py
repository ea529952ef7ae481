"""Open streams, cancelled when the credentials of their callers are revoked.

::

    front end: with while_known(headers, certificate): ...     one entry within the block
    gate, after credentials were reloaded ──> end(error) of streams with revoked or expired credentials

Messages cost nothing: callers are checked only when credentials change or expire.
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


class RevocableStream:
    """One open stream.

    Args:
        headers: of the request, with lower-case names.

    Attributes:
        error: reason of the cancellation, or None.
        known_as: last identification of the caller.
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
        """Cancel the stream; the first error counts."""
        if self.error is None:
            self.error = error
            self.scope.cancel()


class RevocableStreams:
    """Open streams of one server."""

    def __init__(self) -> None:
        self._open: set[RevocableStream] = set()

    def __len__(self) -> int:
        """Return the number of streams."""
        return len(self._open)

    def __iter__(self) -> Iterator[RevocableStream]:
        """Iterate over a snapshot."""
        return iter(tuple(self._open))

    def add(self, request: RevocableStream) -> None:
        """Add a stream."""
        self._open.add(request)

    def remove(self, request: RevocableStream) -> None:
        """Remove a finished stream."""
        self._open.discard(request)


current_revocable_streams: Final[ContextVar[RevocableStreams | None]] = ContextVar(
    "current_revocable_streams", default=None
)
"""Open streams of the running task's server; None without authentication."""


def register_stream(
    headers: Iterable[tuple[str, str]], certificate: Mapping[str, Any] | None
) -> tuple[RevocableStream, Callable[[], None]] | None:
    """Register the running task's request; None without authentication.

    Returns:
        The entry and a function that must be called once at the end of the request.
    """
    every, caller = current_revocable_streams.get(), current_caller.get()
    if every is None or caller is None:
        return None
    request = RevocableStream(caller, headers, certificate)
    every.add(request)
    return request, partial(every.remove, request)


@contextmanager
def cancel_on_revocation(headers: Iterable[tuple[str, str]], certificate: Mapping[str, Any] | None) -> Iterator[None]:
    """Run the block until the caller's credentials are revoked.

    Raises:
        Unauthenticated: the credentials were revoked.
        MissingScope: a permission was removed.

    Cancellation: the block is cancelled on revocation, and the error is raised instead.
    """
    begun = register_stream(headers, certificate)
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
