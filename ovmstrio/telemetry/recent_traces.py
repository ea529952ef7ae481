"""Recent traces, kept in memory for the console."""

from __future__ import annotations

import threading
from collections import OrderedDict
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ovmstrio.core.tracing import Attributes
    from ovmstrio.telemetry.spans import RecordedSpan

_MOST_TRACES: Final = 200
_MOST_SPANS: Final = 512


@dataclass(frozen=True, slots=True)
class FinishedSpan:
    """A finished span.

    Attributes:
        span_id: 16 hexadecimal digits.
        parent_id: 16 hexadecimal digits; empty for a root span.
        kind: ``server``, ``client`` or ``internal``.
        began: nanoseconds since the epoch.
        ended: nanoseconds since the epoch.
        events: names, times in nanoseconds since the epoch, and attributes.
        links: trace and span ids.
        failure: error message, or empty.
    """

    span_id: str
    parent_id: str
    name: str
    kind: str
    began: int
    ended: int
    attributes: Attributes
    events: Sequence[tuple[str, int, Attributes]] = ()
    links: Sequence[tuple[str, str]] = ()
    failure: str = ""

    def document(self) -> dict[str, Any]:
        """Return the span as a JSON document; nanoseconds are strings."""
        return {
            "span_id": self.span_id,
            "parent_id": self.parent_id,
            "name": self.name,
            "kind": self.kind,
            "began": str(self.began),
            "ended": str(self.ended),
            "attributes": dict(self.attributes),
            "events": [
                {"name": name, "at": str(at), "attributes": dict(attributes)} for name, at, attributes in self.events
            ],
            "links": [{"trace_id": trace, "span_id": span} for trace, span in self.links],
            "failure": self.failure,
        }


@dataclass(slots=True)
class FinishedTrace:
    """Finished spans of one trace.

    Attributes:
        trace_id: 32 hexadecimal digits.
        spans: in the order of their ends, so that children precede parents.
        dropped: number of spans beyond the limit.
        root: the last call span; None until one has ended.
    """

    trace_id: str
    spans: list[FinishedSpan] = field(default_factory=list)
    dropped: int = 0
    root: FinishedSpan | None = None

    @property
    def began(self) -> int:
        """Start of the first span, nanoseconds since the epoch."""
        return min((span.began for span in self.spans), default=0)

    @property
    def ended(self) -> int:
        """End of the last span, nanoseconds since the epoch."""
        return max((span.ended for span in self.spans), default=0)

    def summary(self) -> dict[str, Any]:
        """Return the entry of a trace list."""
        root = self.root
        return {
            "trace_id": self.trace_id,
            "name": "" if root is None else root.name,
            "attributes": {} if root is None else dict(root.attributes),
            "failure": "" if root is None else root.failure,
            "began": str(self.began),
            "milliseconds": round((self.ended - self.began) / 1e6, 3),
            "spans": len(self.spans) + self.dropped,
        }

    def document(self) -> dict[str, Any]:
        """Return the complete trace as a JSON document."""
        return {**self.summary(), "dropped": self.dropped, "tree": [span.document() for span in self.spans]}


class RecentTraces:
    """Span sink that keeps the most recent traces.

    Args:
        max_spans: maximum number of spans per trace, in addition to its last call span.

    Attributes:
        was_watched: last value of :attr:`is_watched`, for frequent checks.
    """

    def __init__(self, max_traces: int = _MOST_TRACES, max_spans: int = _MOST_SPANS) -> None:
        self._most = max_traces
        self._most_spans = max_spans
        self._traces: OrderedDict[int, FinishedTrace] = OrderedDict()
        self._lock = threading.Lock()
        self._viewers = 0
        self._watched_until = 0.0
        self.was_watched = False

    @property
    def is_watched(self) -> bool:
        """True if traces are watched, so that calls are recorded even without export."""
        self.was_watched = self._viewers > 0 or monotonic() < self._watched_until
        return self.was_watched

    def watch_seconds(self, seconds: float) -> None:
        """Watch traces for a time; for viewers that cannot report their end."""
        self._watched_until = monotonic() + seconds
        self.was_watched = True

    @contextmanager
    def watching(self) -> Iterator[RecentTraces]:
        """Watch traces within the block."""
        self._viewers += 1
        self.was_watched = True
        try:
            yield self
        finally:
            self._viewers -= 1

    def span_ended(self, span: RecordedSpan) -> None:
        """Keep a span; thread-safe."""
        self.keep(span.trace, _kept_span(span))

    def keep(self, trace: int, span: FinishedSpan) -> None:
        """Keep a span of a trace; thread-safe."""
        with self._lock:
            kept = self._traces.get(trace)
            if kept is None:
                kept = self._traces[trace] = FinishedTrace(f"{trace:032x}")
                if len(self._traces) > self._most:
                    self._traces.popitem(last=False)
            is_call = span.kind == "server"
            if is_call:
                kept.root = span
            if len(kept.spans) >= self._most_spans + is_call:
                kept.dropped += 1
                if is_call:
                    # The last call span replaces the span before it.
                    kept.spans[-1] = span
                return
            kept.spans.append(span)

    def traces(self, limit: int = _MOST_TRACES) -> list[FinishedTrace]:
        """Return recent traces with a finished call, newest first."""
        with self._lock:
            found = [_copied(trace) for trace in reversed(self._traces.values()) if trace.root is not None]
        return found[:limit]

    def trace(self, trace_id: str) -> FinishedTrace | None:
        """Return a trace by hexadecimal id; None if unknown."""
        try:
            number = int(trace_id, 16)
        except ValueError:
            return None
        with self._lock:
            found = self._traces.get(number)
            return None if found is None else _copied(found)


def _copied(trace: FinishedTrace) -> FinishedTrace:
    return FinishedTrace(trace.trace_id, list(trace.spans), trace.dropped, trace.root)


def _kept_span(span: RecordedSpan) -> FinishedSpan:
    return FinishedSpan(
        span.span_id,
        f"{span.parent:016x}" if span.parent else "",
        span.name,
        span.kind,
        span.began,
        span.ended,
        span.attributes,
        span.events,
        [(f"{each.trace_id:032x}", f"{each.span_id:016x}") for each in span.links],
        span.failure,
    )
