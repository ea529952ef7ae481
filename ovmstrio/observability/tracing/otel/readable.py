"""Spans of the server's as OpenTelemetry's exporters want them, and those of users' code as recent traces have them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from ovmstrio.core.texts import cut
from ovmstrio.observability.tracing.recent import KeptSpan
from ovmstrio.observability.tracing.spans import LONGEST_TEXT

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource

    from ovmstrio.observability.tracing.spans import RecordedSpan

__all__ = ["context_of", "kept_span", "plain", "readable_span"]

_SAMPLED: Final = TraceFlags(TraceFlags.SAMPLED)
_UNSAMPLED: Final = TraceFlags(TraceFlags.DEFAULT)
_KINDS: Final = {"internal": SpanKind.INTERNAL, "server": SpanKind.SERVER, "client": SpanKind.CLIENT}
_SCOPE: Final = InstrumentationScope("ovmstrio")


def context_of(
    trace: int, span: int, state: str = "", *, is_remote: bool = False, is_sampled: bool = True
) -> SpanContext:
    """Give the ids of a span as OpenTelemetry has them."""
    kept = TraceState.from_header([state]) if state else None
    return SpanContext(trace, span, is_remote, _SAMPLED if is_sampled else _UNSAMPLED, kept)


def readable_span(span: RecordedSpan, resource: Resource) -> ReadableSpan:
    """Give a span that has ended as exporters take it."""
    trace, state = span.trace, span.state
    parent = context_of(trace, span.parent, state, is_remote=span.has_remote_parent) if span.parent else None
    return ReadableSpan(
        name=span.name,
        context=context_of(trace, span.number, state),
        parent=parent,
        resource=resource,
        attributes=span.attributes,
        events=[Event(event.name, dict(event.attributes), event.at) for event in span.events],
        links=[Link(context_of(link.trace_id, link.span_id)) for link in span.links],
        kind=_KINDS[span.kind],
        status=Status(StatusCode.ERROR, span.failure) if span.failure else Status(StatusCode.UNSET),
        start_time=span.began,
        end_time=span.ended,
        instrumentation_scope=_SCOPE,
    )


def kept_span(span: ReadableSpan) -> tuple[int, KeptSpan] | None:
    """Give the trace and the span of what code of users has recorded; None for what has no ids."""
    context = span.context
    if context is None:
        return None
    status = span.status
    kind = span.kind.name.lower()
    return context.trace_id, KeptSpan(
        f"{context.span_id:016x}",
        "" if span.parent is None else f"{span.parent.span_id:016x}",
        span.name,
        kind if kind == "client" else "internal",
        span.start_time or 0,
        span.end_time or 0,
        {name: plain(value) for name, value in (span.attributes or {}).items()},
        [(event.name, event.timestamp or 0, {k: plain(v) for k, v in (event.attributes or {}).items()})
         for event in span.events],
        [(f"{link.context.trace_id:032x}", f"{link.context.span_id:016x}") for link in span.links],
        cut(status.description or "error", LONGEST_TEXT) if status.status_code is StatusCode.ERROR else "",
    )  # fmt: skip


def plain(value: object) -> str | bool | int | float:
    """Give a value of users' code as it is kept: a number, or a text that is cut."""
    if isinstance(value, bool | int | float):
        return value
    return cut(value if isinstance(value, str) else str(value), LONGEST_TEXT)
