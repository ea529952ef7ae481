"""Where a service finds that it can no longer answer, or can again, told to whoever says whether the server is ready.

::

    worker process ends ──> readiness_may_have_changed() ──> registry: is it another? ──> Watch, readiness file
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

__all__ = ["readiness_may_have_changed", "readiness_reconsidered"]

_reconsider: Final[ContextVar[Callable[[], None] | None]] = ContextVar(
    "who says whether the server is ready", default=None
)


def readiness_may_have_changed() -> None:
    """Say that something that keeps a service from answering has come or gone; on the event loop, and cheap."""
    reconsider = _reconsider.get()
    if reconsider is not None:
        reconsider()


@contextmanager
def readiness_reconsidered(reconsider: Callable[[], None]) -> Iterator[None]:
    """Have a function called for that, in all tasks started within the block; it must neither block nor raise."""
    token = _reconsider.set(reconsider)
    try:
        yield
    finally:
        _reconsider.reset(token)
