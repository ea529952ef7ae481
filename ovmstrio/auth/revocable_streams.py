"""Open streams, cancelled when the credentials of their callers are revoked.

::

    front end: with cancel_on_revocation(peer, headers): ...     one entry within the block
    gate, after credentials were reloaded ──> end(error) of streams with revoked or expired credentials

Messages cost nothing: callers are checked only when credentials change or expire.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import trio

from ovmstrio.core.callers import Caller, current_caller
from ovmstrio.core.errors import ServerError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from ovmstrio.core.connection import Peer


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


def register_stream(
    peer: Peer, headers: Iterable[tuple[str, str]]
) -> tuple[RevocableStream, Callable[[], None]] | None:
    """Register the running task's request; None without authentication.

    Returns:
        The entry and a function that must be called once at the end of the request.
    """
    streams, caller = peer.revocable_streams, current_caller.get()
    if streams is None or caller is None:
        return None
    request = RevocableStream(caller, headers, peer.certificate)
    streams.add(request)
    return request, partial(streams.discard, request)


@contextmanager
def cancel_on_revocation(peer: Peer, headers: Iterable[tuple[str, str]]) -> Iterator[None]:
    """Run the block until the caller's credentials are revoked.

    Raises:
        Unauthenticated: the credentials were revoked.
        MissingScope: a permission was removed.

    Cancellation: the block is cancelled on revocation, and the error is raised instead.
    """
    begun = register_stream(peer, headers)
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
