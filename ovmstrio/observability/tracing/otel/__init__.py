"""Traces in OpenTelemetry's hands: exported over OTLP, and the current spans of code that users have instrumented.

Imported only where the environment asks for traces; only here OpenTelemetry is.
"""

from ovmstrio.observability.tracing.otel.export import Export
from ovmstrio.observability.tracing.otel.user_spans import UserSpans

__all__ = ["Export", "UserSpans"]
