"""Spans of the server's as code of users sees them: OpenTelemetry's current span, whose parts its own spans become."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from opentelemetry import context as contexts
from opentelemetry import trace
from opentelemetry.trace import NonRecordingSpan, Status, StatusCode

from ovmstrio.core.texts import cut, text_of
from ovmstrio.observability.tracing.otel.readable import context_of, plain
from ovmstrio.observability.tracing.spans import LONGEST_TEXT, MOST_EVENTS, RecordedSpan, SpanLink

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ovmstrio.core.tracing import Span

__all__ = ["UserSpans"]


class UserSpans:
    """Makes spans OpenTelemetry's current ones."""

    def enter(self, span: Span) -> object:
        """Make a span the current one; gives the context before."""
        before = contexts.get_current()
        if isinstance(span, RecordedSpan):
            seen: trace.Span = _SeenSpan(span)
        else:
            ids = context_of(int(span.trace_id, 16), int(span.span_id, 16), is_sampled=False)
            seen = NonRecordingSpan(ids)
        contexts.attach(trace.set_span_in_context(seen, before))
        return before

    def leave(self, before: object) -> None:
        """Make the context before the current one again; with None there is none."""
        contexts.attach(before if isinstance(before, contexts.Context) else contexts.Context())


class _SeenSpan(trace.Span):
    """A span of the server's, which code of users may add to, and which the server ends."""

    def __init__(self, span: RecordedSpan) -> None:
        self._span = span

    def end(self, end_time: int | None = None) -> None:
        """Leave that to the server."""

    def get_span_context(self) -> trace.SpanContext:
        """Give its ids."""
        return context_of(self._span.trace, self._span.number, self._span.state)

    def set_attributes(self, attributes: Mapping[str, Any]) -> None:
        """Tell more of it."""
        for name, value in attributes.items():
            self.set_attribute(name, value)

    def set_attribute(self, key: str, value: Any) -> None:
        """Tell one more thing of it."""
        self._span.set(key, plain(value))

    def add_event(self, name: str, attributes: Mapping[str, Any] | None = None, timestamp: int | None = None) -> None:
        """Tell of something that happens now; a time of its own is not kept."""
        del timestamp
        self._span.event(name, {key: plain(value) for key, value in (attributes or {}).items()})

    def add_link(self, context: trace.SpanContext, attributes: Mapping[str, Any] | None = None) -> None:
        """Tell that another span has to do with it."""
        del attributes
        if len(self._span.links) < MOST_EVENTS:
            self._span.links.append(SpanLink(context.trace_id, context.span_id))

    def update_name(self, name: str) -> None:
        """Name it otherwise."""
        self._span.name = name

    def is_recording(self) -> bool:
        """Whether it has not ended."""
        return not self._span.ended

    def set_status(self, status: Status | StatusCode, description: str | None = None) -> None:
        """Say that it has failed; that it has not is for the server to say."""
        code, said = (status.status_code, status.description) if isinstance(status, Status) else (status, description)
        if code is StatusCode.ERROR:
            self._span.failure = cut(said or "error", LONGEST_TEXT)

    def record_exception(
        self,
        exception: BaseException,
        attributes: Mapping[str, Any] | None = None,
        timestamp: int | None = None,
        escaped: bool = False,  # noqa: FBT002 - as OpenTelemetry has it
    ) -> None:
        """Tell of an error that was dealt with, or not."""
        del timestamp, escaped
        told = {"exception.type": type(exception).__qualname__, "exception.message": text_of(exception)}
        self.add_event("exception", {**told, **(attributes or {})})
