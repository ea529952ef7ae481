"""The trace of a call in a worker process: code of users sees a span of it as OpenTelemetry's current one.

The process has what exports spans from its environment, as the server has, and only if a call that is traced comes.  An
interpreter without OpenTelemetry runs the code as it is, as does one where that is broken, which is told once.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import copy_context
from functools import partial
from importlib import import_module
from typing import Any, Final

from ovmstrio.isolation.hosted import Invocation
from ovmstrio.telemetry.spans import asks_for_traces, exporter_names, otlp_protocol

__all__ = ["flush_spans", "follow_trace", "following_trace"]

_LONGEST_FLUSH_MS: Final = 2000
_LONGEST_REASON: Final = 1024
_lock: Final = threading.Lock()
_providers: Final[list[Any]] = []
_problems: Final[list[Exception]] = []
"""Why nothing is exported that should be: packages of the user's own environment may not go together."""


def follow_trace(invocation: Invocation, method: str, headers: dict[str, str]) -> Callable[[Any], None]:
    """Have an invocation run in a span of a trace; what is given ends that, and must be called with the answer."""
    begun = _begin(method, headers)
    if begun is None:
        return _forget
    span, attach = begun
    variables = copy_context() if invocation.variables is None else invocation.variables
    variables.run(attach)
    invocation.variables = variables

    def end(answer: Any) -> None:
        _end(span, str(answer[1]) if answer and answer[0] == "raised" else "")

    return end


@contextmanager
def following_trace(name: str, headers: Mapping[str, str]) -> Iterator[Callable[[str], object]]:
    """Have the block run in a span of a trace; what is given takes the reason, if what is done in the block fails."""
    begun = _begin(name, headers)
    if begun is None:
        yield _forget
        return
    span, attach = begun
    detach, reasons = attach(), [""]
    try:
        yield reasons.append
    finally:
        detach()
        _end(span, reasons[-1])


def _begin(name: str, headers: Mapping[str, str]) -> tuple[Any, Callable[[], Callable[[], object]]] | None:
    """Begin a span, and give what makes it the current one, which gives what takes that back; None without any."""
    if _problems:
        return None
    try:
        return _begin_span(name, headers)
    except ImportError:
        return None
    except Exception as error:  # noqa: BLE001 - a call is worth more than its span
        with _lock:
            if not _problems:
                _problems.append(error)
                sys.stderr.write(f"OpenTelemetry cannot be used, and there are no spans of this process: {error!r}\n")
        return None


def _begin_span(name: str, headers: Mapping[str, str]) -> tuple[Any, Callable[[], Callable[[], object]]]:
    """Begin a span, as above.

    Raises:
        ImportError: OpenTelemetry is not there.
        Exception: whatever its packages raise that do not go together.
    """
    from opentelemetry import context, trace  # noqa: PLC0415 - may be missing, and is only for calls that are traced
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator  # noqa: PLC0415 - as above

    _provide(trace)
    above = TraceContextTextMapPropagator().extract(headers, context.Context())
    span = trace.get_tracer("ovmstrio").start_span(name, above)
    within = trace.set_span_in_context(span, above)

    def attach() -> Callable[[], object]:
        return partial(context.detach, context.attach(within))

    return span, attach


def _end(span: Any, reason: str) -> None:
    if reason:
        from opentelemetry.trace import Status, StatusCode  # noqa: PLC0415 - there is a span, and so it is there

        span.set_status(Status(StatusCode.ERROR, reason[:_LONGEST_REASON]))
    span.end()


def flush_spans() -> None:
    """Export what waits, before the process ends; bounded."""
    for provider in _providers:
        provider.force_flush(_LONGEST_FLUSH_MS)


def _forget(_: Any) -> None:
    """Do nothing, where there is no span."""


def _provide(trace: Any) -> None:
    """Have spans be exported as the environment says, unless the code of users sees to that."""
    with _lock:
        if _providers or not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
            return
        try:
            from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415 - as above
            from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415 - as above
        except ImportError:
            return
        exporters = _exporters()
        if not exporters:
            return
        provider = TracerProvider(shutdown_on_exit=False)
        for exporter in exporters:
            provider.add_span_processor(BatchSpanProcessor(exporter))
        _providers.append(provider)
        trace.set_tracer_provider(provider)


def _exporters() -> list[Any]:
    """Make what exports over OTLP, if the environment asks for that."""
    if not asks_for_traces(os.environ) or "otlp" not in exporter_names(os.environ):
        return []
    protocol = "grpc" if otlp_protocol(os.environ) == "grpc" else "http"
    try:
        module = import_module(f"opentelemetry.exporter.otlp.proto.{protocol}.trace_exporter")
    except ImportError:
        return []
    return [module.OTLPSpanExporter()]
