"""What the environment says of traces, in OpenTelemetry's own variables, read without OpenTelemetry."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import structlog

from ovmstrio.observability.tracing.sampling import SAMPLERS, Sampling

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["asks_for_traces", "exporter_names", "otlp_protocol", "sampling_of"]

log = structlog.get_logger(__name__)

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


def sampling_of(environ: Mapping[str, str]) -> Sampling:
    """Make the sampling that is asked for; what is not understood is warned about and has its default."""
    name = environ.get("OTEL_TRACES_SAMPLER", "").strip().lower() or "parentbased_always_on"
    given = environ.get("OTEL_TRACES_SAMPLER_ARG", "").strip()
    if name not in SAMPLERS:
        log.warning("OTEL_TRACES_SAMPLER is not known: all calls are sampled", found=name, expected=SAMPLERS)
        return Sampling()
    if "ratio" not in name:
        return Sampling(name)
    try:
        return Sampling(name, float(given or 1))
    except ValueError:
        log.warning("OTEL_TRACES_SAMPLER_ARG is no ratio: all calls are sampled", found=given)
        return Sampling(name)


def _is_enabled(environ: Mapping[str, str]) -> bool:
    return environ.get("OTEL_SDK_DISABLED", "").strip().lower() != "true"
