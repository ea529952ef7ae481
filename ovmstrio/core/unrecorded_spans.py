"""Spans of calls that nobody records, which are made only when somebody asks for their ids.

Most calls neither log a line nor call others, and then nothing is made for them at all.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Final

from ovmstrio.core.events import CallEvent, current_event
from ovmstrio.core.tracing import Span, current_span

__all__ = ["span_in_hand", "span_of", "unrecorded_spans"]

unrecorded_spans: Final[ContextVar[Callable[[], Span] | None]] = ContextVar("unrecorded_spans", default=None)
"""Makes the span of a call that is not recorded; None where calls are not traced."""


def span_of(event: CallEvent) -> Span | None:
    """Give the span of a call, made now if it had none yet; None where calls are not traced."""
    if event.span is None:
        make = unrecorded_spans.get()
        if make is not None:
            event.span = make()
    return event.span


def span_in_hand() -> Span | None:
    """Give the span of what runs now, for its ids; None outside of calls, and where calls are not traced."""
    span = current_span.get()
    if span is not None:
        return span
    event = current_event.get()
    return None if event is None else span_of(event)
