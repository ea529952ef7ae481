"""Span export with OpenTelemetry, and spans of user code."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Any, Final

import structlog
from opentelemetry import context as contexts
from opentelemetry import trace
from opentelemetry.sdk.resources import HOST_NAME, PROCESS_PID, SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import Event, ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    TraceState,
)

from ovmstrio.telemetry.process_metrics import build_labels
from ovmstrio.telemetry.recent_traces import FinishedSpan
from ovmstrio.telemetry.spans import MAX_SPAN_EVENTS, RecordedSpan, SpanLink, attribute_text
from ovmstrio.telemetry.trace_context import exporter_names, otlp_protocol
from ovmstrio.util.truncation import text_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from opentelemetry.context import Context
    from opentelemetry.sdk.trace.export import SpanExporter

    from ovmstrio.core.tracing import Span
    from ovmstrio.telemetry.recent_traces import RecentTraces

# Span conversion

_SAMPLED: Final = TraceFlags(TraceFlags.SAMPLED)
_UNSAMPLED: Final = TraceFlags(TraceFlags.DEFAULT)
_KINDS: Final = {"internal": SpanKind.INTERNAL, "server": SpanKind.SERVER, "client": SpanKind.CLIENT}
_SCOPE: Final = InstrumentationScope("ovmstrio")
_MIN_INT: Final = -(2**63)
_MAX_INT: Final = 2**63 - 1


def span_context(
    trace: int, span: int, state: str = "", *, is_remote: bool = False, is_sampled: bool = True
) -> SpanContext:
    """Return the OpenTelemetry context of span ids."""
    kept = TraceState.from_header([state]) if state else None
    return SpanContext(trace, span, is_remote, _SAMPLED if is_sampled else _UNSAMPLED, kept)


def to_readable_span(span: RecordedSpan, resource: Resource) -> ReadableSpan:
    """Convert a finished span for exporters."""
    trace, state = span.trace, span.state
    parent = span_context(trace, span.parent, state, is_remote=span.has_remote_parent) if span.parent else None
    return ReadableSpan(
        name=span.name,
        context=span_context(trace, span.number, state),
        parent=parent,
        resource=resource,
        attributes=span.attributes,
        events=[Event(event.name, dict(event.attributes), event.at) for event in span.events],
        links=[Link(span_context(link.trace_id, link.span_id)) for link in span.links],
        kind=_KINDS[span.kind],
        status=Status(StatusCode.ERROR, span.failure) if span.failure else Status(StatusCode.UNSET),
        start_time=span.began,
        end_time=span.ended,
        instrumentation_scope=_SCOPE,
    )


def to_finished_span(span: ReadableSpan) -> tuple[int, FinishedSpan] | None:
    """Convert a span of user code to its trace id and kept span; None without ids."""
    context = span.context
    if context is None:
        return None
    status = span.status
    kind = span.kind.name.lower()
    return context.trace_id, FinishedSpan(
        f"{context.span_id:016x}",
        "" if span.parent is None else f"{span.parent.span_id:016x}",
        span.name,
        kind if kind == "client" else "internal",
        span.start_time or 0,
        span.end_time or 0,
        {name: plain_attribute(value) for name, value in (span.attributes or {}).items()},
        [(event.name, event.timestamp or 0, {k: plain_attribute(v) for k, v in (event.attributes or {}).items()})
         for event in span.events],
        [(f"{link.context.trace_id:032x}", f"{link.context.span_id:016x}") for link in span.links],
        attribute_text(status.description or "error") if status.status_code is StatusCode.ERROR else "",
    )  # fmt: skip


def plain_attribute(value: object) -> str | bool | int | float:
    """Return an attribute of user code as a number or truncated text; an integer of more than 64 bits is a text."""
    if isinstance(value, float) or (isinstance(value, int) and _MIN_INT <= value <= _MAX_INT):
        return value
    return attribute_text(value if isinstance(value, str) else str(value))


# Export

log = structlog.get_logger(__name__)

_UNNAMED: Final = "unknown_service"
_SERVICE: Final = "ovms"
_PROTOCOLS: Final = ("http/protobuf", "grpc")


def server_resource() -> Resource:
    """Return the resource of this process; attributes of the environment take precedence."""
    own: dict[str, str | int] = {
        SERVICE_VERSION: build_labels()[0],
        HOST_NAME: socket.gethostname(),
        PROCESS_PID: os.getpid(),
    }
    made = Resource({**own}).merge(Resource.create())
    named = str(made.attributes.get(SERVICE_NAME, _UNNAMED))
    return made.merge(Resource({SERVICE_NAME: _SERVICE})) if named.startswith(_UNNAMED) else made


class SpanExport:
    """Span sink that exports with OpenTelemetry's batch processors; its threads run until :meth:`close`.

    Spans of user code are exported too, unless the program has set its own tracer provider.
    """

    def __init__(self, environ: Mapping[str, str], recent: RecentTraces) -> None:
        self._resource = server_resource()
        exporters = [exporter for name in exporter_names(environ) for exporter in _exporters(name, environ)]
        self._batches: tuple[SpanProcessor, ...] = tuple(map(BatchSpanProcessor, exporters))
        _set_relay_targets((*self._batches, _RecentTracesProcessor(recent)), self._resource)

    def span_ended(self, span: RecordedSpan) -> None:
        """Export a span."""
        ended = to_readable_span(span, self._resource)
        for batches in self._batches:
            batches.on_end(ended)

    def close(self) -> None:
        """Flush the exporters and stop their threads; blocking."""
        _RELAY.targets = ()
        for batches in self._batches:
            batches.shutdown()


class _Relay(SpanProcessor):
    """Span processor of the process-wide provider; forwards to the running server."""

    targets: tuple[SpanProcessor, ...] = ()

    def on_start(self, span: Any, parent_context: Context | None = None) -> None:
        for target in self.targets:
            target.on_start(span, parent_context)

    def on_end(self, span: ReadableSpan) -> None:
        for target in self.targets:
            target.on_end(span)


_RELAY: Final = _Relay()


class _RecentTracesProcessor(SpanProcessor):
    def __init__(self, recent: RecentTraces) -> None:
        self._recent = recent

    def on_end(self, span: ReadableSpan) -> None:
        found = to_finished_span(span)
        if found is not None:
            self._recent.keep(*found)


def _set_relay_targets(targets: tuple[SpanProcessor, ...], resource: Resource) -> None:
    """Forward spans of user code, unless the program has set its own tracer provider."""
    _RELAY.targets = targets
    if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(_RELAY)
        trace.set_tracer_provider(provider)


def _exporters(name: str, environ: Mapping[str, str]) -> list[SpanExporter]:
    if name == "console":
        return [ConsoleSpanExporter()]
    if name != "otlp":
        log.warning("unknown exporter in OTEL_TRACES_EXPORTER", found=name, expected=["otlp", "console", "none"])
        return []
    protocol = otlp_protocol(environ)
    if protocol not in _PROTOCOLS:
        log.warning("unsupported OTEL_EXPORTER_OTLP_PROTOCOL, using http/protobuf", found=protocol, expected=_PROTOCOLS)
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter  # noqa: PLC0415 - brings gRPC

        return [OTLPSpanExporter()]
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # noqa: PLC0415 - one of the two is needed
        OTLPSpanExporter as HttpSpanExporter,
    )

    return [HttpSpanExporter()]


# Current span for user code


class UserSpans:
    """Bridge that sets OpenTelemetry's current span."""

    def enter(self, span: Span) -> object:
        """Make a span current and return the previous context."""
        before = contexts.get_current()
        if isinstance(span, RecordedSpan):
            view: trace.Span = _UserSpan(span)
        else:
            ids = span_context(int(span.trace_id, 16), int(span.span_id, 16), is_sampled=False)
            view = NonRecordingSpan(ids)
        contexts.attach(trace.set_span_in_context(view, before))
        return before

    def leave(self, before: object) -> None:
        """Restore a context; None for an empty one."""
        contexts.attach(before if isinstance(before, contexts.Context) else contexts.Context())


class _UserSpan(trace.Span):
    """OpenTelemetry view of a server span; user code may add to it but not end it."""

    def __init__(self, span: RecordedSpan) -> None:
        self._span = span

    def end(self, end_time: int | None = None) -> None:
        """Do nothing: the server ends the span."""

    def get_span_context(self) -> trace.SpanContext:
        return span_context(self._span.trace, self._span.number, self._span.state)

    def set_attributes(self, attributes: Mapping[str, Any]) -> None:
        for name, value in attributes.items():
            self.set_attribute(name, value)

    def set_attribute(self, key: str, value: Any) -> None:
        self._span.set(key, plain_attribute(value))

    def add_event(self, name: str, attributes: Mapping[str, Any] | None = None, timestamp: int | None = None) -> None:
        """Add an event at the current time; ``timestamp`` is ignored."""
        del timestamp
        self._span.event(name, {key: plain_attribute(value) for key, value in (attributes or {}).items()})

    def add_link(self, context: trace.SpanContext, attributes: Mapping[str, Any] | None = None) -> None:
        del attributes
        if len(self._span.links) < MAX_SPAN_EVENTS:
            self._span.links.append(SpanLink(context.trace_id, context.span_id))

    def update_name(self, name: str) -> None:
        self._span.name = attribute_text(name)

    def is_recording(self) -> bool:
        return not self._span.ended

    def set_status(self, status: Status | StatusCode, description: str | None = None) -> None:
        """Set the error status; other statuses are left to the server."""
        code, text = (status.status_code, status.description) if isinstance(status, Status) else (status, description)
        if code is StatusCode.ERROR:
            self._span.failure = attribute_text(text or "error")

    def record_exception(
        self,
        exception: BaseException,
        attributes: Mapping[str, Any] | None = None,
        timestamp: int | None = None,
        escaped: bool = False,  # noqa: FBT002 - as OpenTelemetry has it
    ) -> None:
        del timestamp, escaped
        facts = {"exception.type": type(exception).__qualname__, "exception.message": text_of(exception)}
        self.add_event("exception", {**facts, **(attributes or {})})
