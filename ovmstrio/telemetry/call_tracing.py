"""The spans of calls, from the one event that each of them is."""

from __future__ import annotations

from contextlib import contextmanager
from functools import cache
from random import random
from time import perf_counter
from typing import TYPE_CHECKING, Final

from ovmstrio.core.connection import Loopback, Remote
from ovmstrio.core.errors import GRPC_STATUSES
from ovmstrio.core.events import CANCELLED, OK, QUESTIONS, CallObserver, current_request
from ovmstrio.core.tracing import current_span
from ovmstrio.telemetry.spans import QuietSpan, RecordedSpan, read_parent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ovmstrio.core.events import CallEvent, WireRequest
    from ovmstrio.core.tracing import Attributes
    from ovmstrio.telemetry.recent_traces import RecentTraces
    from ovmstrio.telemetry.spans import SpanSink, TraceParent, TraceSampling, UserContext

__all__ = ["CallTracing", "WatchedCalls", "describe_call", "describe_end", "is_failing_status", "span_name"]

# ----------------------------------------------------------------------
# What is told of a call's span: OpenTelemetry's conventions for RPC, HTTP and generative AI, and the server's own
# ----------------------------------------------------------------------

_SERVERS_FAULT: Final = frozenset(
    GRPC_STATUSES.index(name)
    for name in ("UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS")
)
_HTTP_SERVERS_FAULT: Final = 500
_SCHEMES: Final = ("http", "https")
_GENERATIVE: Final = "V3"
_OPERATIONS: Final = {
    "/chat/completions": "chat",
    "/responses": "chat",
    "/completions": "text_completion",
    "/embeddings": "embeddings",
}
"""What the conventions call a request, by how its path ends."""


def span_name(event: CallEvent) -> str:
    """Name a call: the method of an RPC, what is asked of a text model, or HTTP's method and where it went."""
    request = event.request
    if request is None:
        return f"{event.method} {event.name}"
    operation = _operation(event)
    if operation:
        return f"{operation} {event.name}"
    if request.protocol == "gRPC":
        return request.target.lstrip("/")
    return f"{request.method} {_route(event, request)}"


def describe_call(event: CallEvent, tell: Callable[[str, str | bool | float], None]) -> None:
    """Tell what is known of a call when it starts."""
    tell("ovmstrio.service.name", event.name)
    tell("ovmstrio.service.version", event.version)
    tell("ovmstrio.service.kind", event.kind)
    tell("ovmstrio.api", event.door.api)
    tell("ovmstrio.method", event.method)
    if event.request_id:
        tell("ovmstrio.request.id", event.request_id)
    if (request := event.request) is not None:
        _describe_request(event, request, tell)
    if operation := _operation(event):
        tell("gen_ai.operation.name", operation)
        tell("gen_ai.provider.name", "ovmstrio")
        tell("gen_ai.request.model", event.name)
        tell("gen_ai.response.model", event.name)


def describe_end(event: CallEvent, tell: Callable[[str, str | bool | float], None]) -> None:
    """Tell what came of a call that has ended."""
    tell("ovmstrio.code", event.code)
    if event.caller:
        tell("enduser.id", event.caller)
    if event.queue_seconds:
        tell("ovmstrio.queue.seconds", event.queue_seconds)
    request = event.request
    sent, received = event.sent, event.received
    if request is not None and request.status >= 0:
        if request.protocol == "gRPC":
            tell("rpc.response.status_code", GRPC_STATUSES[request.status])
        else:
            tell("http.response.status_code", request.status)
        sent, received = sent or request.sent, received or request.received
    is_http = request is not None and request.protocol == "HTTP"
    tell("http.request.body.size" if is_http else "rpc.request.size", received)
    tell("http.response.body.size" if is_http else "rpc.response.size", sent)


def is_failing_status(request: WireRequest) -> bool:
    """Tell whether a request was answered with a status that the conventions call an error of the server's."""
    if request.protocol == "gRPC":
        return request.status in _SERVERS_FAULT
    return request.status >= _HTTP_SERVERS_FAULT


def _describe_request(event: CallEvent, request: WireRequest, tell: Callable[[str, str | bool | float], None]) -> None:
    if request.protocol == "gRPC":
        tell("rpc.system.name", "grpc")
        tell("rpc.method", request.target.lstrip("/"))
    else:
        tell("http.request.method", request.method)
        tell("http.route", _route(event, request))
        tell("url.path", request.target.partition("?")[0])
        tell("url.scheme", _scheme(request))
        tell("network.protocol.version", "1.1")
    tell("network.protocol.name", "http")
    client = request.client
    if isinstance(client, Loopback | Remote):
        tell("client.address", client.host)
    if agent := request.header("user-agent"):
        tell("user_agent.original", agent)


def _scheme(request: WireRequest) -> str:
    """Tell what the client has asked for, which may be TLS that ends at a proxy before the server."""
    said = request.header("x-forwarded-proto")
    return said if said in _SCHEMES else "https" if request.is_encrypted else "http"


def _operation(event: CallEvent) -> str:
    if event.door.api != _GENERATIVE or event.request is None:
        return ""
    path = event.request.target.partition("?")[0].rstrip("/")
    return next((name for end, name in _OPERATIONS.items() if path.endswith(end)), "")


def _route(event: CallEvent, request: WireRequest) -> str:
    """Give a path of which there are few: of services with paths of their own only the first part is known."""
    if event.door.api in ("Handlers", "PaddleServing"):
        return f"/{event.name}"
    return request.target.partition("?")[0]


# ----------------------------------------------------------------------
# The spans of calls, from the one event that each of them is
# ----------------------------------------------------------------------

_FINE: Final = frozenset({0, 200})
"""The statuses of gRPC and HTTP of most calls."""
_SPANS: Final = (QuietSpan, RecordedSpan)


class CallTracing(CallObserver):
    """Observes calls and requests, and makes a span of each call.

    A call that is not recorded is recorded at its end if it has failed.  It has ids all the same, which are made when
    somebody asks for them; code of users may at any time.

    Args:
        sampling: decides which are recorded.
        sinks: get the spans that are.
        is_failure: tells whether an error is the server's, rather than the caller's.
        of_server: get those of what no call asks for.
        user: makes spans the current ones of the code of users; None where that knows none.
        has_user_code: tells whether services of a kind run code of users; asked once for each kind.
        is_told_of_requests: whether :meth:`request_ended` is called, so that a span lasts as long as its request.
    """

    def __init__(
        self,
        sampling: TraceSampling,
        sinks: Sequence[SpanSink],
        *,
        is_failure: Callable[[BaseException], bool],
        of_server: Sequence[SpanSink] = (),
        user: UserContext | None = None,
        has_user_code: Callable[[str], bool] = bool,
        is_told_of_requests: bool = True,
    ) -> None:
        self._sampling = sampling
        self._share = sampling.share
        self._sinks = tuple(sinks)
        self._of_server = tuple(of_server)
        self._is_failure = is_failure
        self._user = user
        self._user_of = cache(lambda kind: user if has_user_code(kind) else None)
        self._is_told_of_requests = is_told_of_requests

    def call_started(self, event: CallEvent) -> None:
        """Begin the span of a call, which is the current one from now on; most are not recorded, and have none."""
        request = event.request
        if request is None and self._is_told_of_requests and current_request.get() is not None:
            # Its door has asked, and was told that it is not.
            parent, is_recorded = None, False
        else:
            parent, is_recorded = self._decide(request)
        if is_recorded:
            self._record(event, parent)
            return
        user = self._user_of(event.kind)
        if user is None and parent is None:
            return
        trace = self._sampling.new_id(is_recorded=False) if parent is None else parent.trace_id
        self._enter(event, QuietSpan(trace, parent, user))

    def _decide(self, request: WireRequest | None) -> tuple[TraceParent | None, bool]:
        """Find the parent of a call, and tell whether the call is recorded."""
        if request is not None:
            shown = request.header("traceparent") if request.traceparent is None else request.traceparent
            parent = read_parent(shown, request.header("tracestate")) if shown else None
            if parent is not None:
                return parent, self._sampling.records(parent.trace_id, parent)
            # Who is not told of requests was not asked, and what others have answered says nothing.
            if request.is_sampled is not None and self._is_told_of_requests:
                return None, request.is_sampled
        return None, random() < self._share  # noqa: S311 - no secret

    def _record(self, event: CallEvent, parent: TraceParent | None) -> None:
        trace = self._sampling.new_id(is_recorded=True) if parent is None else parent.trace_id
        span = self._recorded(event, trace, parent)
        event.trace_id = span.trace_id
        if event.queue_seconds:
            span.add("queue", event.queue_seconds, {"ovmstrio.queue.of": "admission"})
        self._enter(event, span)

    def _enter(self, event: CallEvent, span: RecordedSpan | QuietSpan) -> None:
        event.span = span
        current_span.set(span)
        if span.user is not None:
            span.user.enter(span)

    def call_finished(self, event: CallEvent) -> None:
        """End the span of a call, unless its request has yet to be answered."""
        span, request = event.span, event.request
        if span is not None:
            current_span.set(None)
            if isinstance(span, _SPANS) and span.user is not None:
                span.user.leave(None)
        elif event.code == OK or event.method in QUESTIONS:
            return
        is_told_later = current_request.get() is not None if request is None else not request.is_stream
        if not (is_told_later and self._is_told_of_requests):
            self._end(event, None)

    @property
    def needs_every(self) -> bool:
        """As :class:`ovmstrio.core.events.RequestObserver`: most are of no interest."""
        return False

    def samples(self, traceparent: str) -> bool | None:
        """Decide for a request without a parent; with one it depends on that."""
        return None if traceparent else random() < self._share  # noqa: S311 - no secret

    def unrecorded_span(self) -> QuietSpan:
        """Make the span of a call without a parent that is not recorded."""
        return QuietSpan(self._sampling.new_id(is_recorded=False))

    def request_ended(self, request: WireRequest) -> None:
        """End the span of the call that a request was."""
        event = request.event
        if event is None or request.is_stream or (event.code == OK and not event.trace_id and request.status in _FINE):
            # Most calls are not recorded, and succeed.
            return
        event.request = request
        self._end(event, request)

    @contextmanager
    def of_server(self, name: str, attributes: Attributes) -> Iterator[None]:
        """Trace what the server asks others for by itself; what fails is recorded whether it is sampled or not.

        Such traces are exported, and take no places among the recent ones, which are of calls.
        """
        is_sampled = random() < self._share  # noqa: S311 - no secret
        span = RecordedSpan(
            name, self._of_server, self._sampling.new_id(is_recorded=is_sampled), kind="client", attributes=attributes
        )
        try:
            if is_sampled:
                with span.as_current():
                    yield
            else:
                with QuietSpan(span.trace).as_current():
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
        if span is None or isinstance(span, QuietSpan):
            if not has_failed or event.method in QUESTIONS:
                return
            span = span or self.unrecorded_span()
            # Whoever tells of the call later, such as the access log, has these ids.
            span = event.span = self._recorded(event, span.trace, span.parent, span.number)
        if not isinstance(span, RecordedSpan):
            return
        describe_end(event, span.set)
        if event.code == CANCELLED:
            span.set("ovmstrio.cancelled", True)
        elif has_failed:
            span.fail(event.error or _StatusError(event.reason or event.code))
        elif event.code != OK:
            span.set("error.type", event.code)
        span.end()

    def _recorded(self, event: CallEvent, trace: int, parent: TraceParent | None, number: int = 0) -> RecordedSpan:
        """Make the span of a call, which began with its request unless that has several."""
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
        describe_call(event, span.set)
        return span

    def _has_failed(self, event: CallEvent, request: WireRequest | None) -> bool:
        if request is not None and is_failing_status(request):
            return True
        error = event.error
        if error is None:
            # Some protocols tell of failures in answers that have succeeded.
            return request is not None and request.status in _FINE and event.code not in {OK, CANCELLED}
        return event.code != CANCELLED and self._is_failure(error)


class WatchedCalls(CallObserver):
    """Has calls be recorded only while somebody looks at recent traces, and otherwise costs a test.

    Args:
        tracing: records them.
        recent: what is looked at.
        most: how many calls are recorded a second.
    """

    def __init__(self, tracing: CallTracing, recent: RecentTraces, most: int = 20) -> None:
        self._tracing = tracing
        self._recent = recent
        self._most = most
        self._second = 0
        self._count = 0

    def call_started(self, event: CallEvent) -> None:
        """Record a call that is watched."""
        if not (self._recent.was_watched and self._recent.is_watched):
            return
        second = int(perf_counter())
        if second != self._second:
            self._second, self._count = second, 0
        self._count += 1
        if self._count <= self._most:
            self._tracing.call_started(event)

    def call_finished(self, event: CallEvent) -> None:
        """End the span of a call that has one."""
        if event.span is not None:
            self._tracing.call_finished(event)


class _StatusError(Exception):
    """Stands for the error of a call that said itself what it was answered with."""
