"""The span of a batch, which is a part of its first member's call and linked to all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final

import trio

from ovmstrio.core.events import current_event
from ovmstrio.core.tracing import Span, current_span
from ovmstrio.work.batching.batch_calls import BatchedCall

__all__ = ["traced_batch"]


_UNTRACED: Final = nullcontext()


def traced_batch(calls: Sequence[BatchedCall[Any, Any]], size: int) -> AbstractContextManager[object]:
    """Run a batch in the block, in a task that any of its members, or none, has begun.

    Members that are recorded have a part that tells how long they waited, and is linked to the batch.
    """
    # Whoever began this task may be a call that has ended long ago.
    current_span.set(None)
    current_event.set(None)
    recorded = []
    unrecorded = None
    for call in calls:
        span = call.span
        if span is not None:
            if span.is_recorded:
                recorded.append((call, span))
            else:
                unrecorded = unrecorded or span
    if recorded:
        return _recorded_batch(recorded, len(calls), size)
    return _UNTRACED if unrecorded is None else unrecorded.as_current()


@contextmanager
def _recorded_batch(recorded: Sequence[tuple[BatchedCall[Any, Any], Span]], calls: int, size: int) -> Iterator[None]:
    members = [span for _, span in recorded]
    batch = members[0].begin("batch", {"ovmstrio.batch.size": size, "ovmstrio.batch.calls": calls}, links=members)
    now = trio.current_time()
    for call, span in recorded:
        _tell_waiting(span, batch, now - call.arrived)
    error: BaseException | None = None
    try:
        with batch.as_current():
            yield
    except BaseException as raised:
        error = raised
        raise
    finally:
        batch.end(error)


def _tell_waiting(span: Span, batch: Span, seconds: float) -> None:
    waited = span.begin("queue", {"ovmstrio.queue.of": "batch"}, seconds_ago=seconds)
    waited.link(batch)
    waited.end()
