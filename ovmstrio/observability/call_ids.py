"""The ids of the call that runs, in every line that is logged meanwhile, in threads and tasks of the call too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ovmstrio.core.events import current_event
from ovmstrio.core.unrecorded_spans import span_in_hand

if TYPE_CHECKING:
    from collections.abc import MutableMapping

__all__ = ["add_call_ids"]


def add_call_ids(_: object, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Add the ids of the request and, where it is traced, of its trace and span; a processor of structlog's."""
    call = current_event.get()
    if call is not None and call.request_id:
        event.setdefault("request_id", call.request_id)
    span = span_in_hand()
    if span is not None:
        event.setdefault("trace_id", span.trace_id)
        event.setdefault("span_id", span.span_id)
    return event
