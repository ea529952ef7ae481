"""The spans of calls, from the one event that each of them is."""

from __future__ import annotations

from contextlib import contextmanager
from functools import cache
from random import random
from time import perf_counter
from typing import TYPE_CHECKING, Final

from ovmstrio.core.events import CANCELLED, OK, QUESTIONS, CallObserver, current_request
from ovmstrio.core.tracing import current_span
from ovmstrio.observability.tracing.conventions import describe_call, describe_end, is_failing_status, span_name
from ovmstrio.observability.tracing.spans import QuietSpan, RecordedSpan
from ovmstrio.observability.tracing.trace_context import read_parent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ovmstrio.core.events import CallEvent, WireRequest
    from ovmstrio.core.tracing import Attributes
    from ovmstrio.observability.tracing.recent import RecentTraces
    from ovmstrio.observability.tracing.sampling import TraceSampling
    from ovmstrio.observability.tracing.spans import SpanSink, UserContext
    from ovmstrio.observability.tracing.trace_context import TraceParent

__all__ = ["CallTracing", "WatchedCalls"]

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
