"""Identity of calls in worker processes: ids for log records, and a span, which is OpenTelemetry's current span.

Exporters are configured from the environment, as in the server, when the first traced call comes. Without
OpenTelemetry, or with an incompatible one (reported once), the code runs without a span.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import Context, copy_context
from functools import partial
from importlib import import_module
from typing import Any, Final

from ovmstrio.isolation.side_messages import CALL_IDS
from ovmstrio.telemetry.trace_context import exporter_names, is_export_configured, otlp_protocol

REQUEST_ID: Final = "x-request-id"
"""Header with the request id of a call."""

_TRACEPARENT: Final = "traceparent"
_FLUSH_TIMEOUT_MS: Final = 2000
_MAX_REASON_CHARACTERS: Final = 1024
_lock: Final = threading.Lock()
_providers: Final[list[Any]] = []
_problems: Final[list[Exception]] = []
"""The reason why no spans are exported: packages in the user's environment may be incompatible."""


def start_call_span(
    variables: Context | None, method: str, headers: dict[str, str]
) -> tuple[Context | None, Callable[[Any], None]]:
    """Set the ids of a call and start its span in a context.

    Return the context to run the call in, and a function that ends the span and must be called with the answer.
    """
    variables = copy_context() if variables is None else variables
    variables.run(CALL_IDS.set, _ids(headers))
    started = _start(method, headers)
    if started is None:
        return variables, _no_span
    span, attach = started
    variables.run(attach)

    def end(answer: Any) -> None:
        _end(span, str(answer[1]) if answer and answer[0] == "raised" else "")

    return variables, end


@contextmanager
def propagated_span(name: str, headers: Mapping[str, str]) -> Iterator[Callable[[str], object]]:
    """Run the block with the ids of a call, in a span; yields a function that takes the reason of a failure."""
    token = CALL_IDS.set(_ids(headers))
    try:
        started = _start(name, headers)
        if started is None:
            yield _no_span
            return
        span, attach = started
        detach, reasons = attach(), [""]
        try:
            yield reasons.append
        finally:
            detach()
            _end(span, reasons[-1])
    finally:
        CALL_IDS.reset(token)


def _ids(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the ids of a call as the server's log has them."""
    ids = {"request_id": headers[REQUEST_ID]} if headers.get(REQUEST_ID) else {}
    if _TRACEPARENT in headers:
        _, ids["trace_id"], ids["span_id"], *_ = headers[_TRACEPARENT].split("-")
    return ids


def _start(name: str, headers: Mapping[str, str]) -> tuple[Any, Callable[[], Callable[[], object]]] | None:
    """Start a span; return it with a function that makes it current and returns the undo function, or None."""
    if _problems or _TRACEPARENT not in headers:
        return None
    try:
        return _start_span(name, headers)
    except ImportError:
        return None
    except Exception as error:  # noqa: BLE001 - tracing errors must not fail the call
        with _lock:
            if not _problems:
                _problems.append(error)
                sys.stderr.write(f"OpenTelemetry is unusable, no spans are exported from this process: {error!r}\n")
        return None


def _start_span(name: str, headers: Mapping[str, str]) -> tuple[Any, Callable[[], Callable[[], object]]]:
    """Start a span; raises ``ImportError`` without OpenTelemetry, anything if its packages are incompatible."""
    from opentelemetry import context, trace  # noqa: PLC0415 - optional, and needed for traced calls only
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator  # noqa: PLC0415 - optional

    _configure_provider(trace)
    above = TraceContextTextMapPropagator().extract(headers, context.Context())
    span = trace.get_tracer("ovmstrio").start_span(name, above)
    within = trace.set_span_in_context(span, above)

    def attach() -> Callable[[], object]:
        return partial(context.detach, context.attach(within))

    return span, attach


def _end(span: Any, reason: str) -> None:
    if reason:
        from opentelemetry.trace import Status, StatusCode  # noqa: PLC0415 - optional

        span.set_status(Status(StatusCode.ERROR, reason[:_MAX_REASON_CHARACTERS]))
    span.end()


def flush_spans() -> None:
    """Export pending spans before the process ends; takes at most 2 seconds per provider."""
    for provider in _providers:
        provider.force_flush(_FLUSH_TIMEOUT_MS)


def _no_span(_: Any) -> None:
    pass


def _configure_provider(trace: Any) -> None:
    """Configure exporters from the environment, unless user code has set a tracer provider."""
    with _lock:
        if _providers or not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
            return
        try:
            from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415 - optional
            from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415 - optional
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
    if not is_export_configured(os.environ) or "otlp" not in exporter_names(os.environ):
        return []
    protocol = "grpc" if otlp_protocol(os.environ) == "grpc" else "http"
    try:
        module = import_module(f"opentelemetry.exporter.otlp.proto.{protocol}.trace_exporter")
    except ImportError:
        return []
    return [module.OTLPSpanExporter()]
