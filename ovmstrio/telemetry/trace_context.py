"""Trace context of W3C and the environment variables of OpenTelemetry."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, NamedTuple

_PARENT: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


_SAMPLED: Final = 1


_FIRST_VERSION: Final = "00"


_NO_VERSION: Final = "ff"


_LONGEST_STATE: Final = 512


class TraceParent(NamedTuple):
    """Parent span of a request.

    Attributes:
        trace_id: 128-bit number.
        span_id: 64-bit number.
        is_sampled: sampling flag of the parent.
        state: ``tracestate``, propagated unchanged.
    """

    trace_id: int
    span_id: int
    is_sampled: bool
    state: str = ""


def parse_traceparent(header: str, state: str = "") -> TraceParent | None:
    """Parse ``traceparent`` and ``tracestate``; None if invalid."""
    match = _PARENT.fullmatch(header.strip())
    if match is None:
        return None
    version, trace, span, flags, further = match.groups()
    trace_id, span_id = int(trace, 16), int(span, 16)
    if not (trace_id and span_id) or version == _NO_VERSION or (version == _FIRST_VERSION and further):
        return None
    # Propagated in headers: only printable ASCII is safe.
    kept = state if len(state) <= _LONGEST_STATE and state.isascii() and state.isprintable() else ""
    return TraceParent(trace_id, span_id, bool(int(flags, 16) & _SAMPLED), kept)


def format_traceparent(trace_id: int, span_id: int, *, is_sampled: bool) -> str:
    """Format a ``traceparent`` header."""
    return f"00-{trace_id:032x}-{span_id:016x}-{int(is_sampled):02x}"


_ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


_PROTOCOLS: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


_DEFAULT_PROTOCOL: Final = "http/protobuf"


_NONE: Final = "none"


_OTLP: Final = "otlp"


def is_export_configured(environ: Mapping[str, str]) -> bool:
    """Return whether trace export is configured, by exporter name or OTLP endpoint."""
    return _is_enabled(environ) and bool(exporter_names(environ))


def exporter_names(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the configured exporters."""
    named = environ.get("OTEL_TRACES_EXPORTER", "").strip()
    if not named:
        return (_OTLP,) if any(environ.get(name, "").strip() for name in _ENDPOINTS) else ()
    names = tuple(part.strip().lower() for part in named.split(","))
    return tuple(name for name in names if name and name != _NONE)


def otlp_protocol(environ: Mapping[str, str]) -> str:
    """Return the OTLP protocol: ``grpc`` or ``http/protobuf``."""
    return next((environ[name].strip() for name in _PROTOCOLS if environ.get(name, "").strip()), _DEFAULT_PROTOCOL)


def _is_enabled(environ: Mapping[str, str]) -> bool:
    return environ.get("OTEL_SDK_DISABLED", "").strip().lower() != "true"
