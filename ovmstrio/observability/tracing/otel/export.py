"""Where spans go: the exporters that the environment names, behind OpenTelemetry's batches, for a server's life."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import structlog
from opentelemetry import trace
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter

from ovmstrio.core.otel_variables import exporter_names, otlp_protocol
from ovmstrio.observability.tracing.otel.readable import kept_span, readable_span

if TYPE_CHECKING:
    from collections.abc import Mapping

    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter

    from ovmstrio.observability.tracing.recent import RecentTraces
    from ovmstrio.observability.tracing.spans import RecordedSpan

__all__ = ["Export"]

log = structlog.get_logger(__name__)

_UNNAMED: Final = "unknown_service"
_SERVICE: Final = "ovms"
_PROTOCOLS: Final = ("http/protobuf", "grpc")


class Export:
    """A sink of spans that exports them; it has threads from when it is made until it is closed.

    Spans that code of users makes by OpenTelemetry go the same way, unless its program has set that up itself.

    Args:
        environ: names the exporters; they read it, too.
        recent: keeps spans of users' code among the others.
    """

    def __init__(self, environ: Mapping[str, str], recent: RecentTraces) -> None:
        made = Resource.create()
        named = str(made.attributes.get(SERVICE_NAME, _UNNAMED))
        self._resource = made.merge(Resource({SERVICE_NAME: _SERVICE})) if named.startswith(_UNNAMED) else made
        exporters = [exporter for name in exporter_names(environ) for exporter in _exporters(name, environ)]
        self._batches: tuple[SpanProcessor, ...] = tuple(map(BatchSpanProcessor, exporters))
        _relay_to((*self._batches, _Keeping(recent)), self._resource)

    def span_ended(self, span: RecordedSpan) -> None:
        """Take a span of the server's."""
        ended = readable_span(span, self._resource)
        for batches in self._batches:
            batches.on_end(ended)

    def close(self) -> None:
        """Export what waits, and end the threads; blocking, as long as the exporters try."""
        _RELAY.targets = ()
        for batches in self._batches:
            batches.shutdown()


class _Relay(SpanProcessor):
    """What the program's one provider gives spans to, whichever server runs."""

    targets: tuple[SpanProcessor, ...] = ()

    def on_start(self, span: Any, parent_context: Context | None = None) -> None:
        for target in self.targets:
            target.on_start(span, parent_context)

    def on_end(self, span: ReadableSpan) -> None:
        for target in self.targets:
            target.on_end(span)


_RELAY: Final = _Relay()


class _Keeping(SpanProcessor):
    """Has recent traces keep what code of users has recorded."""

    def __init__(self, recent: RecentTraces) -> None:
        self._recent = recent

    def on_end(self, span: ReadableSpan) -> None:
        found = kept_span(span)
        if found is not None:
            self._recent.keep(*found)


def _relay_to(targets: tuple[SpanProcessor, ...], resource: Resource) -> None:
    """Have spans of users' code go to these, if the program has no provider but the server's."""
    _RELAY.targets = targets
    if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(_RELAY)
        trace.set_tracer_provider(provider)


def _exporters(name: str, environ: Mapping[str, str]) -> list[SpanExporter]:
    """Make an exporter by its name; none, with a warning, for what is not known."""
    if name == "console":
        return [ConsoleSpanExporter()]
    if name != "otlp":
        log.warning("OTEL_TRACES_EXPORTER names what is not there", found=name, expected=["otlp", "console", "none"])
        return []
    protocol = otlp_protocol(environ)
    if protocol not in _PROTOCOLS:
        log.warning("OTEL_EXPORTER_OTLP_PROTOCOL is not spoken: http/protobuf is", found=protocol, expected=_PROTOCOLS)
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter  # noqa: PLC0415 - brings gRPC

        return [OTLPSpanExporter()]
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # noqa: PLC0415 - one of the two is needed
        OTLPSpanExporter as HttpSpanExporter,
    )

    return [HttpSpanExporter()]
