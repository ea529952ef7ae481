"""Spans of calls, created from call events, with OpenTelemetry attributes."""

from __future__ import annotations

import math
from contextlib import contextmanager
from functools import cache, partial
from random import random
from time import perf_counter
from typing import TYPE_CHECKING, Final

from ovmstrio.core.connection import Loopback, Remote
from ovmstrio.core.errors import GRPC_STATUSES
from ovmstrio.core.events import CANCELLED, OK, QUERY_METHODS, CallObserver, current_request
from ovmstrio.core.tracing import current_span
from ovmstrio.telemetry.log_rate_limit import RateLimit
from ovmstrio.telemetry.spans import RecordedSpan, UnrecordedSpan
from ovmstrio.telemetry.trace_context import parse_traceparent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ovmstrio.core.events import CallEvent, WireRequest
    from ovmstrio.core.tracing import Attributes
    from ovmstrio.telemetry.recent_traces import RecentTraces
    from ovmstrio.telemetry.spans import SpanSink, TraceSampler, UserContext
    from ovmstrio.telemetry.trace_context import TraceParent

# Span names and attributes

_GRPC_SERVER_ERRORS: Final = frozenset(
    GRPC_STATUSES.index(name)
    for name in ("UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS")
)
_HTTP_SERVER_ERROR: Final = 500
_SCHEMES: Final = ("http", "https")
_GENERATIVE: Final = frozenset({"V3", "Anthropic", "Ollama"})
_OPERATIONS: Final = {
    "/chat/completions": "chat",
    "/responses": "chat",
    "/completions": "text_completion",
    "/embeddings": "embeddings",
    "/messages": "chat",
    "/api/chat": "chat",
    "/api/generate": "text_completion",
    "/api/embed": "embeddings",
}
"""Operation names of the conventions, by the end of the request path."""


def span_name(event: CallEvent) -> str:
    """Return the span name of a call: RPC method, text-model operation, or HTTP method and route."""
    request = event.request
    if request is None:
        return f"{event.method} {event.name}"
    operation = _operation(event)
    if operation:
        return f"{operation} {event.name}"
    if request.protocol == "gRPC":
        return request.target.lstrip("/")
    return f"{request.method} {_route(event, request)}"


def set_start_attributes(event: CallEvent, set_attribute: Callable[[str, str | bool | float], None]) -> None:
    """Set the attributes known at the start of a call."""
    set_attribute("ovmstrio.service.name", event.name)
    set_attribute("ovmstrio.service.version", event.version)
    set_attribute("ovmstrio.service.kind", event.kind)
    set_attribute("ovmstrio.api", event.api_interface.api)
    set_attribute("ovmstrio.method", event.method)
    if event.request_id:
        set_attribute("ovmstrio.request.id", event.request_id)
    if (request := event.request) is not None:
        _describe_request(event, request, set_attribute)
    if operation := _operation(event):
        set_attribute("gen_ai.operation.name", operation)
        set_attribute("gen_ai.provider.name", "ovmstrio")
        set_attribute("gen_ai.request.model", event.name)
        set_attribute("gen_ai.response.model", event.name)


def set_end_attributes(event: CallEvent, set_attribute: Callable[[str, str | bool | float], None]) -> None:
    """Set the attributes known at the end of a call."""
    set_attribute("ovmstrio.code", event.code)
    if event.caller:
        set_attribute("enduser.id", event.caller)
    if event.queue_seconds:
        set_attribute("ovmstrio.queue.seconds", event.queue_seconds)
    request = event.request
    sent, received = event.sent, event.received
    if request is not None and request.status >= 0:
        if request.protocol == "gRPC":
            set_attribute("rpc.response.status_code", GRPC_STATUSES[request.status])
        else:
            set_attribute("http.response.status_code", request.status)
        sent, received = sent or request.sent, received or request.received
    is_http = request is not None and request.protocol == "HTTP"
    set_attribute("http.request.body.size" if is_http else "rpc.request.size", received)
    set_attribute("http.response.body.size" if is_http else "rpc.response.size", sent)


def is_failing_status(request: WireRequest) -> bool:
    """Return whether the response status is a server error by the conventions."""
    if request.protocol == "gRPC":
        return request.status in _GRPC_SERVER_ERRORS
    return request.status >= _HTTP_SERVER_ERROR


def _describe_request(
    event: CallEvent, request: WireRequest, set_attribute: Callable[[str, str | bool | float], None]
) -> None:
    if request.protocol == "gRPC":
        set_attribute("rpc.system.name", "grpc")
        set_attribute("rpc.method", request.target.lstrip("/"))
    else:
        set_attribute("http.request.method", request.method)
        set_attribute("http.route", request.route or _route(event, request))
        set_attribute("url.path", request.target.partition("?")[0])
        set_attribute("url.scheme", _scheme(request))
        set_attribute("network.protocol.version", "1.1")
    set_attribute("network.protocol.name", "http")
    client = request.client
    if isinstance(client, Loopback | Remote):
        set_attribute("client.address", client.host)
    if agent := request.header("user-agent"):
        set_attribute("user_agent.original", agent)


def _scheme(request: WireRequest) -> str:
    """Return the client's URL scheme; TLS may end at a proxy."""
    forwarded_scheme = request.header("x-forwarded-proto")
    return forwarded_scheme if forwarded_scheme in _SCHEMES else "https" if request.peer.is_encrypted else "http"


def _operation(event: CallEvent) -> str:
    if event.api_interface.api not in _GENERATIVE or event.request is None:
        return ""
    path = event.request.target.partition("?")[0].rstrip("/")
    return next((name for end, name in _OPERATIONS.items() if path.endswith(end)), "")


def _route(event: CallEvent, request: WireRequest) -> str:
    """Return the route with low cardinality: services that route themselves have only their mount point."""
    if event.api_interface.api in ("Handlers", "PaddleServing"):
        return f"/{event.name}"
    return request.target.partition("?")[0]


# Call observer

_OK_STATUSES: Final = frozenset({0, 200})
"""Successful gRPC and HTTP statuses."""
_SPANS: Final = (UnrecordedSpan, RecordedSpan)


class CallTracing(CallObserver):
    """Observer that creates a span for each call.

    A call that is not sampled is recorded at its end if it failed.  Its ids are created on demand.

    Args:
        is_failure: returns whether an error is a server error.
        server_sinks: receive spans of the server's own requests.
        user: bridge to the instrumentation of user code, or None.
        has_user_code: returns whether services of a kind run user code; called once per kind.
        failures_per_second: largest number of unsampled failed calls that are recorded.
        observes_requests: whether :meth:`request_ended` is called, so that a span lasts as long as its request.
    """

    def __init__(
        self,
        sampling: TraceSampler,
        sinks: Sequence[SpanSink],
        *,
        is_failure: Callable[[BaseException], bool],
        server_sinks: Sequence[SpanSink] = (),
        user: UserContext | None = None,
        has_user_code: Callable[[str], bool] = bool,
        observes_requests: bool = True,
        failures_per_second: float = math.inf,
    ) -> None:
        self._sampling = sampling
        self._share = sampling.share
        self._sinks = tuple(sinks)
        self._server_sinks = tuple(server_sinks)
        self._is_failure = is_failure
        self._user = user
        self._user_of = cache(lambda kind: user if has_user_code(kind) else None)
        self._observes_requests = observes_requests
        self._failures = RateLimit(failures_per_second)
        # Bound once: calls that are not recorded allocate nothing.
        self._unrecorded_span = partial(_unrecorded_span, sampling)

    def call_started(self, event: CallEvent) -> None:
        """Start the span of a call; calls that are not recorded have none, unless user code or a parent needs ids."""
        request = event.request
        if request is None and self._observes_requests and current_request.get() is not None:
            # The front end has asked :meth:`samples` and got False.
            parent, is_recorded = None, False
        else:
            parent, is_recorded = self._decide(request)
        if is_recorded:
            self._record(event, parent)
            return
        user = self._user_of(event.kind)
        if user is None and parent is None:
            event.make_span = self._unrecorded_span
            return
        trace = self._sampling.new_id(is_recorded=False) if parent is None else parent.trace_id
        self._set_current(event, UnrecordedSpan(trace, parent, user))

    def _decide(self, request: WireRequest | None) -> tuple[TraceParent | None, bool]:
        if request is not None:
            header = request.header("traceparent") if request.traceparent is None else request.traceparent
            parent = parse_traceparent(header, request.header("tracestate")) if header else None
            if parent is not None:
                return parent, self._sampling.records(parent.trace_id, parent)
            # Without request observation, ``is_sampled`` is the decision of another observer.
            if request.is_sampled is not None and self._observes_requests:
                return None, request.is_sampled
        return None, random() < self._share  # noqa: S311 - no secret

    def _record(self, event: CallEvent, parent: TraceParent | None) -> None:
        trace = self._sampling.new_id(is_recorded=True) if parent is None else parent.trace_id
        span = self._recorded(event, trace, parent)
        event.trace_id = span.trace_id
        if event.queue_seconds:
            span.add("queue", event.queue_seconds, {"ovmstrio.queue.of": "admission"})
        self._set_current(event, span)

    def _set_current(self, event: CallEvent, span: RecordedSpan | UnrecordedSpan) -> None:
        event.span = span
        current_span.set(span)
        if span.user is not None:
            span.user.enter(span)

    def call_finished(self, event: CallEvent) -> None:
        """End the span of a call, unless its request is still being answered."""
        span, request = event.span, event.request
        if span is not None:
            current_span.set(None)
            if isinstance(span, _SPANS) and span.user is not None:
                span.user.leave(None)
        else:
            # Queries end without a start.
            event.make_span = self._unrecorded_span
            if event.code == OK or event.method in QUERY_METHODS:
                return
        ends_later = current_request.get() is not None if request is None else not request.is_stream
        if not (ends_later and self._observes_requests):
            self._end(event, None)

    @property
    def needs_every(self) -> bool:
        """As :class:`ovmstrio.core.events.RequestObserver`: False, as most requests are not sampled."""
        return False

    @property
    def body_bytes(self) -> int:
        """As :class:`ovmstrio.core.events.RequestObserver`: 0, as spans have no bodies."""
        return 0

    def samples(self, traceparent: str) -> bool | None:
        """Return the sampling decision; None if the request has a parent."""
        return None if traceparent else random() < self._share  # noqa: S311 - no secret

    def request_ended(self, request: WireRequest) -> None:
        """End the span of the request's call."""
        event = request.event
        if (
            event is None
            or request.is_stream
            or (event.code == OK and not event.trace_id and request.status in _OK_STATUSES)
        ):
            return
        event.request = request
        self._end(event, request)

    @contextmanager
    def trace_server_request(self, name: str, attributes: Attributes) -> Iterator[None]:
        """Trace a request of the server itself; failures are always recorded.

        These spans are exported, but not kept among recent traces.
        """
        is_sampled = random() < self._share  # noqa: S311 - no secret
        span = RecordedSpan(
            name,
            self._server_sinks,
            self._sampling.new_id(is_recorded=is_sampled),
            kind="client",
            attributes=attributes,
        )
        try:
            if is_sampled:
                with span.as_current():
                    yield
            else:
                with UnrecordedSpan(span.trace).as_current():
                    yield
        except BaseException as error:
            if is_sampled or isinstance(error, Exception):
                span.end(error)
            raise
        if is_sampled:
            span.end()

    def _end(self, event: CallEvent, request: WireRequest | None) -> None:
        span = event.span
        has_failed = self._has_failed(event, request)
        if span is None or isinstance(span, UnrecordedSpan):
            if not has_failed or event.method in QUERY_METHODS:
                return
            if not self._failures.allows():
                return
            span = span or self._unrecorded_span()
            # Later observers, such as the access log, need the same ids.
            span = event.span = self._recorded(event, span.trace, span.parent, span.number)
            if count := self._failures.take_left_out():
                span.set("ovmstrio.failures.left_out", count)
        if not isinstance(span, RecordedSpan):
            return
        set_end_attributes(event, span.set)
        if event.code == CANCELLED:
            span.set("ovmstrio.cancelled", True)
        elif has_failed:
            if event.error is not None and not event.error_type:
                span.fail(event.error)
            else:
                status = "" if request is None else str(request.status)
                code = event.code if event.code != OK else status
                span.fail_with(event.error_type or code, event.reason or code)
        elif event.code != OK:
            span.set("error.type", event.error_type or getattr(event.error, "user_type", "") or event.code)
        span.end()

    def _recorded(self, event: CallEvent, trace: int, parent: TraceParent | None, number: int = 0) -> RecordedSpan:
        request, began = event.request, event.started
        if request is not None and not request.is_stream:
            began = min(began, request.started)
        span = RecordedSpan(
            span_name(event),
            self._sinks,
            trace,
            number=number,
            parent=0 if parent is None else parent.span_id,
            has_remote_parent=parent is not None,
            state="" if parent is None else parent.state,
            kind="server",
            user=self._user,
            seconds_ago=perf_counter() - began,
        )
        set_start_attributes(event, span.set)
        return span

    def _has_failed(self, event: CallEvent, request: WireRequest | None) -> bool:
        if request is not None and is_failing_status(request):
            return True
        error = event.error
        if error is None:
            # Some protocols report failures with a success status.
            return request is not None and request.status in _OK_STATUSES and event.code not in {OK, CANCELLED}
        return event.code != CANCELLED and self._is_failure(error)


def _unrecorded_span(sampling: TraceSampler) -> UnrecordedSpan:
    return UnrecordedSpan(sampling.new_id(is_recorded=False))


class WatchedCallTracing(CallObserver):
    """Observer that records calls only while recent traces are watched.

    Args:
        limit: maximum recorded calls per second.
    """

    def __init__(self, tracing: CallTracing, recent: RecentTraces, limit: int = 20) -> None:
        self._tracing = tracing
        self._recent = recent
        self._limit = RateLimit(limit)

    def call_started(self, event: CallEvent) -> None:
        """Start the span of a watched call."""
        if not (self._recent.was_watched and self._recent.is_watched):
            return
        if self._limit.allows():
            self._tracing.call_started(event)

    def call_finished(self, event: CallEvent) -> None:
        """End the span of a call, if it has one."""
        if event.span is not None:
            self._tracing.call_finished(event)
