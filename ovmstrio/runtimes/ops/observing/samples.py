"""Which samples the current task or thread works on, so that every log line can name them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = ["current_ids", "working_on"]

_IDS: ContextVar[tuple[tuple[int, int], ...]] = ContextVar("samples", default=())


@contextmanager
def working_on(*samples: tuple[int, int]) -> Iterator[None]:
    """Name samples by data id and log id in all that is logged meanwhile; trio's threads take it over by themselves."""
    token = _IDS.set(samples)
    try:
        yield
    finally:
        _IDS.reset(token)


def current_ids() -> str:
    """Give the ids as a log line has them, such as ``(data_id=1 log_id=0)``; empty outside requests."""
    return _text(_IDS.get())


def _text(samples: Sequence[tuple[int, int]]) -> str:
    return " ".join(f"(data_id={data_id} log_id={log_id})" for data_id, log_id in samples)
