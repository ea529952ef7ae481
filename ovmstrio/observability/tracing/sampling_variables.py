"""Which calls the environment wants sampled, in OpenTelemetry's own variables, read without OpenTelemetry."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import structlog

from ovmstrio.observability.tracing.sampling import SAMPLERS, TraceSampling

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["sampling_of", "warn_of_propagators"]

log = structlog.get_logger(__name__)

_SPOKEN: Final = ("tracecontext", "baggage")
"""The default of ``OTEL_PROPAGATORS``; baggage is left to code of users, to which its header comes as any other."""


def sampling_of(environ: Mapping[str, str]) -> TraceSampling:
    """Make the sampling that is asked for; what is not understood is warned about and has its default."""
    name = environ.get("OTEL_TRACES_SAMPLER", "").strip().lower() or "parentbased_always_on"
    given = environ.get("OTEL_TRACES_SAMPLER_ARG", "").strip()
    if name not in SAMPLERS:
        log.warning("OTEL_TRACES_SAMPLER is not known: all calls are sampled", found=name, expected=SAMPLERS)
        return TraceSampling()
    if "ratio" not in name:
        return TraceSampling(name)
    try:
        return TraceSampling(name, float(given or 1))
    except ValueError:
        log.warning("OTEL_TRACES_SAMPLER_ARG is no ratio: all calls are sampled", found=given)
        return TraceSampling(name)


def warn_of_propagators(environ: Mapping[str, str]) -> None:
    """Warn of ways to tell of traces that are asked for, and are not spoken: W3C's is."""
    names = [name.strip().lower() for name in environ.get("OTEL_PROPAGATORS", "").split(",")]
    unknown = [name for name in names if name and name not in _SPOKEN]
    if unknown or (any(names) and _SPOKEN[0] not in names):
        log.warning("OTEL_PROPAGATORS: traceparent and tracestate are spoken, and nothing else", found=names)
