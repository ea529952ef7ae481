"""How long a model that user code was given stays: until the call ends in which it asked for it.

User code gets exactly what ``load_model`` returned, so that nothing about the object can tell when it is done with
it.  What can be told is when the call of the handler ends.  Where there is no call, as in a constructor, nothing is
kept but the object itself, for as long as somebody refers to it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

__all__ = ["CallLeases", "current_call", "lease_models"]


class CallLeases:
    """What one call of a handler holds; its threads may ask for models at the same time."""

    __slots__ = ("_held", "_is_over", "_lock")

    def __init__(self) -> None:
        self._held: dict[Hashable, Callable[[Any], None]] = {}
        self._lock = threading.Lock()
        self._is_over = False

    def hold(self, held: Hashable, release: Callable[[Any], None]) -> bool:
        """Keep what was leased until the call ends, when it is given back from any thread.

        False if it is kept already, or the call has ended meanwhile.
        """
        with self._lock:
            if self._is_over or held in self._held:
                return False
            self._held[held] = release
            return True

    def release_all(self) -> None:
        """Give everything back, as the call has ended."""
        with self._lock:
            self._is_over = True
            held, self._held = self._held, {}
        for each, release in held.items():
            release(each)


_current: ContextVar[CallLeases | None] = ContextVar("leases of models in this call", default=None)


def current_call() -> CallLeases | None:
    """Give what holds the models of the call that this runs in, if it runs in one."""
    return _current.get()


@contextmanager
def lease_models() -> Iterator[None]:
    """Keep the models that are asked for inside, also by threads with a copy of this context, until the block ends.

    Every call of a handler runs inside of one, to the end of its stream or callback.
    """
    leases = CallLeases()
    token = _current.set(leases)
    try:
        yield
    finally:
        _current.reset(token)
        leases.release_all()
