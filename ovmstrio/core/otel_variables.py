"""What OpenTelemetry's own variables say of traces, read without it: in the server and in worker processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

__all__ = ["asks_for_traces", "exporter_names", "otlp_protocol"]

_ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_DEFAULT_PROTOCOL: Final = "http/protobuf"
_NONE: Final = "none"
_OTLP: Final = "otlp"


def asks_for_traces(environ: Mapping[str, str]) -> bool:
    """Tell whether traces are to be exported: an exporter is named, or OTLP has an address."""
    return _is_enabled(environ) and bool(exporter_names(environ))


def exporter_names(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Name the exporters that are asked for; none unless a variable asks for some."""
    named = environ.get("OTEL_TRACES_EXPORTER", "").strip()
    if not named:
        return (_OTLP,) if any(environ.get(name, "").strip() for name in _ENDPOINTS) else ()
    names = tuple(part.strip().lower() for part in named.split(","))
    return tuple(name for name in names if name and name != _NONE)


def otlp_protocol(environ: Mapping[str, str]) -> str:
    """Tell over what OTLP goes: ``grpc`` or ``http/protobuf``."""
    return next((environ[name].strip() for name in _PROTOCOLS if environ.get(name, "").strip()), _DEFAULT_PROTOCOL)


def _is_enabled(environ: Mapping[str, str]) -> bool:
    return environ.get("OTEL_SDK_DISABLED", "").strip().lower() != "true"
