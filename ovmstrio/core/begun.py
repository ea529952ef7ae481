"""Where a request reaches code of users, told to whoever may have it made again as long as it has not.

So is told what may not happen twice for other reasons: a step of a sequence, and a call of another server.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

__all__ = ["BeginTold", "telling_begin", "told_of_begin", "user_code_begins"]

BeginTold = Callable[[], None]
"""Is told, in any thread, that code of users is about to run for a request; maybe more than once."""

_told: Final[ContextVar[BeginTold | None]] = ContextVar("who is told that user code begins", default=None)


def user_code_begins() -> None:
    """Say that the code that follows is a user's, and runs for the request of this context."""
    told = _told.get()
    if told is not None:
        told()


def told_of_begin() -> BeginTold | None:
    """Give who is told in this context, for requests that others make code run for."""
    return _told.get()


@contextmanager
def telling_begin(*told: BeginTold | None) -> Iterator[None]:
    """Have all of these told of what begins within the block, also in tasks and threads that are started there."""
    those = [each for each in told if each is not None]
    token = _told.set(_all_of(those) if those else None)
    try:
        yield
    finally:
        _told.reset(token)


def _all_of(those: Iterable[BeginTold]) -> BeginTold:
    first, *rest = those
    if not rest:
        return first

    def tell() -> None:
        first()
        for each in rest:
            each()

    return tell
