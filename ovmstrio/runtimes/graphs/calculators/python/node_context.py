"""What ``current_context()`` gives to user code of a graph on the event loop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import Context

from pyovms.context import CURRENT

__all__ = ["node_context"]


@contextmanager
def node_context(context: Context) -> Iterator[None]:
    """Let ``current_context()`` give, on the event loop, what it gives in ``context``."""
    current = context.get(CURRENT)
    if current is None:
        yield
        return
    token = CURRENT.set(current)
    try:
        yield
    finally:
        CURRENT.reset(token)
