"""Recorded and unrecorded spans, W3C trace context, sampling and OpenTelemetry environment variables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import getrandbits, randrange
from time import time_ns
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, Self

import structlog
import trio

from ovmstrio.core.errors import error_type
from ovmstrio.core.events import CallEvent, current_event
from ovmstrio.core.tracing import NO_ATTRIBUTES, Span, current_span
from ovmstrio.telemetry.trace_context import TraceParent, format_traceparent
from ovmstrio.util.truncation import cut, text_of

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from types import TracebackType

    from ovmstrio.core.tracing import Attributes, SpanKind

# W3C Trace Context


# Spans

MAX_SPAN_EVENTS: Final = 128
"""Event limit per span; the default of ``OTEL_SPAN_EVENT_COUNT_LIMIT``."""
MAX_ATTRIBUTE_CHARACTERS: Final = 1024
"""Maximum characters of attribute texts."""
_SPAN_BITS: Final = 64
_NANOSECONDS: Final = 1e9
_STEPS: Final = "ovms=steps"


def attribute_text(text: str) -> str:
    """Truncate a text of a span; an unpaired surrogate, with which exporters fail, becomes ``?``."""
    text = cut(text, MAX_ATTRIBUTE_CHARACTERS)
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def new_span_id() -> int:
    """Return a random non-zero span id."""
    return getrandbits(_SPAN_BITS) or 1


class SpanEvent(NamedTuple):
    """Span event; ``at`` is in nanoseconds since the epoch."""

    name: str
    at: int
    attributes: Attributes


class SpanLink(NamedTuple):
    """Link to another span."""

    trace_id: int
    span_id: int


class SpanSink(Protocol):
    """Receiver of finished spans in any thread; must neither block nor raise."""

    def span_ended(self, span: RecordedSpan) -> None:
        """Process a finished span, which is immutable from now on."""


class UserContext(Protocol):
    """Bridge that makes spans current for the instrumentation of user code."""

    def enter(self, span: Span) -> object:
        """Make a span current and return the token for :meth:`leave`."""

    def leave(self, before: object) -> None:
        """Restore the previous span."""


class _CurrentSpan:
    """Context manager of the current span; ``ends`` if the span ends with the block."""

    __slots__ = ("_before", "_ends", "_span", "_user_before")

    def __init__(self, span: RecordedSpan | UnrecordedSpan, *, ends: bool) -> None:
        self._span = span
        self._ends = ends

    def __enter__(self) -> Span:
        span = self._span
        self._before = current_span.get()
        current_span.set(span)
        self._user_before = None if span.user is None else span.user.enter(span)
        return span

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        span = self._span
        if span.user is not None:
            span.user.leave(self._user_before)
        current_span.set(self._before)
        if self._ends:
            span.end(error)


class RecordedSpan:
    """A span that is passed to sinks when it ends.

    Attributes:
        parent: span id of the parent; 0 for a root span.
        has_remote_parent: whether the parent is in another process.
        began: nanoseconds since the epoch.
        ended: nanoseconds since the epoch; 0 while running.
        failure: error message, or empty.
        user: bridge to the instrumentation of user code, or None.
    """

    __slots__ = (
        "_sinks", "attributes", "began", "ended", "events", "failure", "has_remote_parent", "kind", "links", "name",
        "number", "parent", "state", "trace", "user",
    )  # fmt: skip

    is_recorded = True

    def __init__(
        self,
        name: str,
        sinks: Sequence[SpanSink],
        trace: int,
        *,
        number: int = 0,
        parent: int = 0,
        has_remote_parent: bool = False,
        state: str = "",
        kind: SpanKind = "internal",
        attributes: Attributes = NO_ATTRIBUTES,
        user: UserContext | None = None,
        seconds_ago: float = 0.0,
    ) -> None:
        self.name = name
        self.kind: SpanKind = kind
        self.trace = trace
        self.number = number or new_span_id()
        self.parent = parent
        self.has_remote_parent = has_remote_parent
        self.state = state
        self.began = time_ns() - int(seconds_ago * _NANOSECONDS)
        self.ended = 0
        self.attributes = dict(attributes)
        self.events: list[SpanEvent] = []
        self.links: list[SpanLink] = []
        self.failure = ""
        self.user = user
        self._sinks = sinks

    @property
    def shows_steps(self) -> bool:
        """As :class:`ovmstrio.core.tracing.Span`."""
        return _STEPS in self.state

    @property
    def trace_id(self) -> str:
        """As :class:`ovmstrio.core.tracing.Span`."""
        return f"{self.trace:032x}"

    @property
    def span_id(self) -> str:
        """As :class:`ovmstrio.core.tracing.Span`."""
        return f"{self.number:016x}"

    def part(
        self, name: str, attributes: Attributes = NO_ATTRIBUTES, kind: SpanKind = "internal"
    ) -> AbstractContextManager[Span]:
        """As :class:`ovmstrio.core.tracing.Span`."""
        return _CurrentSpan(self.begin(name, attributes, kind), ends=True)

    def begin(
        self,
        name: str,
        attributes: Attributes = NO_ATTRIBUTES,
        kind: SpanKind = "internal",
        *,
        links: Sequence[Span] = (),
        seconds_ago: float = 0.0,
    ) -> RecordedSpan:
        """As :class:`ovmstrio.core.tracing.Span`."""
        span = RecordedSpan(
            name,
            self._sinks,
            self.trace,
            parent=self.number,
            state=self.state,
            kind=kind,
            attributes=attributes,
            user=self.user,
            seconds_ago=seconds_ago,
        )
        for each in links:
            span.link(each)
        return span

    def add(self, name: str, seconds: float, attributes: Attributes = NO_ATTRIBUTES, *, ended_ago: float = 0.0) -> None:
        """As :class:`ovmstrio.core.tracing.Span`."""
        span = self.begin(name, attributes, seconds_ago=seconds + ended_ago)
        span.finish(span.began + int(seconds * _NANOSECONDS))

    def as_current(self) -> AbstractContextManager[Span]:
        """As :class:`ovmstrio.core.tracing.Span`."""
        return _CurrentSpan(self, ends=False)

    def set(self, name: str, value: str | bool | float) -> None:
        """As :class:`ovmstrio.core.tracing.Span`."""
        if not self.ended:
            self.attributes[name] = attribute_text(value) if isinstance(value, str) else value

    def event(self, name: str, attributes: Attributes = NO_ATTRIBUTES) -> None:
        """As :class:`ovmstrio.core.tracing.Span`."""
        if len(self.events) < MAX_SPAN_EVENTS:
            self.events.append(SpanEvent(name, time_ns(), attributes))

    def link(self, other: Span) -> None:
        """As :class:`ovmstrio.core.tracing.Span`."""
        if len(self.links) < MAX_SPAN_EVENTS and other.is_recorded:
            self.links.append(SpanLink(int(other.trace_id, 16), int(other.span_id, 16)))

    def fail(self, error: BaseException) -> None:
        """Record an error; cancellation is an attribute and no error."""
        if isinstance(error, trio.Cancelled):
            self.attributes["ovmstrio.cancelled"] = True
            return
        name, text = error_type(error), text_of(error)
        self.fail_with(name, text)
        self.event("exception", {"exception.type": name, "exception.message": attribute_text(text)})

    def fail_with(self, name: str, text: str) -> None:
        """Record a failure that is no exception, by the name of its type."""
        self.failure = attribute_text(text) or name
        self.attributes["error.type"] = name

    def end(self, error: BaseException | None = None) -> None:
        """As :class:`ovmstrio.core.tracing.Span`."""
        if self.ended:
            return
        if error is not None:
            self.fail(error)
        self.finish(max(time_ns(), self.began))

    def finish(self, ended: int) -> None:
        """Set the end time and pass the span to the sinks."""
        self.ended = ended
        for sink in self._sinks:
            sink.span_ended(self)

    def headers(self) -> Sequence[tuple[str, str]]:
        """As :class:`ovmstrio.core.tracing.Span`."""
        return _headers(self.trace, self.number, self.state, is_sampled=True)


class UnrecordedSpan:
    """Span of an unrecorded call, also used for all its children."""

    __slots__ = ("_number", "parent", "trace", "user")

    is_recorded = False
    shows_steps = False

    def __init__(self, trace: int, parent: TraceParent | None = None, user: UserContext | None = None) -> None:
        self.trace = trace
        self.parent = parent
        self.user = user
        self._number = 0

    @property
    def number(self) -> int:
        """Span id, created on first use."""
        self._number = self._number or new_span_id()
        return self._number

    @property
    def trace_id(self) -> str:
        """As :class:`ovmstrio.core.tracing.Span`."""
        return f"{self.trace:032x}"

    @property
    def span_id(self) -> str:
        """As :class:`ovmstrio.core.tracing.Span`."""
        return f"{self.number:016x}"

    def part(self, *_: object) -> Self:
        """Return itself, a context manager that does nothing."""
        return self

    def begin(self, *_: object, **__: object) -> Self:
        """Return itself."""
        return self

    def add(self, *_: object, **__: object) -> None:
        """Do nothing."""

    def as_current(self) -> AbstractContextManager[Span]:
        """As :class:`ovmstrio.core.tracing.Span`."""
        return _CurrentSpan(self, ends=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def set(self, name: str, value: object) -> None:
        """Do nothing."""

    def event(self, name: str, attributes: Attributes = NO_ATTRIBUTES) -> None:
        """Do nothing."""

    def link(self, other: Span) -> None:
        """Do nothing."""

    def end(self, error: BaseException | None = None) -> None:
        """Do nothing."""

    def headers(self) -> Sequence[tuple[str, str]]:
        """As :class:`ovmstrio.core.tracing.Span`, with the sampling flag unset."""
        state = "" if self.parent is None else self.parent.state
        return _headers(self.trace, self.number, state, is_sampled=False)


def _headers(trace: int, number: int, state: str, *, is_sampled: bool) -> Sequence[tuple[str, str]]:
    parent = ("traceparent", format_traceparent(trace, number, is_sampled=is_sampled))
    return (parent, ("tracestate", state)) if state else (parent,)


# Sampling

_PARENT_BASED: Final = "parentbased_"
_RATIOS: Final = {"always_on": 1.0, "always_off": 0.0}
_RATIO: Final = "traceidratio"
SAMPLERS: Final = tuple(f"{prefix}{name}" for prefix in ("", _PARENT_BASED) for name in (*_RATIOS, _RATIO))
"""Supported values of ``OTEL_TRACES_SAMPLER``."""
_RATIO_BITS: Final = 64
"""Trace-id bits that the ratio is applied to."""
_MAX_RATIO_BITS: Final = 2**_RATIO_BITS - 1


class TraceSampler:
    """Sampler of calls.

    Args:
        name: one of :data:`SAMPLERS`.
        ratio: sampling ratio from 0 to 1, for ratio samplers.

    Raises:
        ValueError: unknown name, or ratio out of range.

    Attributes:
        share: sampling ratio of calls without a parent, from 0 to 1.
    """

    def __init__(self, name: str = "parentbased_always_on", ratio: float = 1.0) -> None:
        if name not in SAMPLERS:
            raise ValueError(f"expected one of {', '.join(SAMPLERS)}, got {name!r}")
        if not 0 <= ratio <= 1:
            raise ValueError(f"expected a ratio from 0 to 1, got {ratio}")
        self._follows_parent = name.startswith(_PARENT_BASED)
        self.share: Final = _RATIOS.get(name.removeprefix(_PARENT_BASED), ratio)
        # Traces whose lower 64 bits are below this bound are recorded.
        self._bound: Final = round(self.share * (_MAX_RATIO_BITS + 1))

    def records(self, trace_id: int, parent: TraceParent | None) -> bool:
        """Return whether to record a call."""
        if parent is not None and self._follows_parent:
            return parent.is_sampled
        return trace_id & _MAX_RATIO_BITS < self._bound

    def new_id(self, *, is_recorded: bool) -> int:
        """Return a trace id that all ratio samplers decide on in the same way."""
        bound = self._bound
        if bound > _MAX_RATIO_BITS or not bound:
            return getrandbits(2 * _RATIO_BITS) or 1
        low = randrange(bound) if is_recorded else randrange(bound, _MAX_RATIO_BITS + 1)  # noqa: S311 - no secret
        return (getrandbits(_RATIO_BITS) or 1) << _RATIO_BITS | low


ALWAYS: Final = TraceSampler("always_on")


# OpenTelemetry environment variables

log = structlog.get_logger(__name__)

_DEFAULT_PROPAGATORS: Final = ("tracecontext", "baggage")
"""Default of ``OTEL_PROPAGATORS``; user code gets the baggage header like any other header."""


def sampler_from_environ(environ: Mapping[str, str]) -> TraceSampler:
    """Return the sampler of the environment; log a warning and use the default for invalid values."""
    name = environ.get("OTEL_TRACES_SAMPLER", "").strip().lower() or "parentbased_always_on"
    given = environ.get("OTEL_TRACES_SAMPLER_ARG", "").strip()
    if name not in SAMPLERS:
        log.warning("unknown OTEL_TRACES_SAMPLER, sampling all calls", found=name, expected=SAMPLERS)
        return TraceSampler()
    if "ratio" not in name:
        return TraceSampler(name)
    try:
        return TraceSampler(name, float(given or 1))
    except ValueError:
        log.warning("invalid OTEL_TRACES_SAMPLER_ARG, sampling all calls", found=given)
        return TraceSampler(name)


def warn_unsupported_propagators(environ: Mapping[str, str]) -> None:
    """Log a warning if unsupported propagators are configured."""
    names = [name.strip().lower() for name in environ.get("OTEL_PROPAGATORS", "").split(",")]
    unknown = [name for name in names if name and name not in _DEFAULT_PROPAGATORS]
    if unknown or (any(names) and _DEFAULT_PROPAGATORS[0] not in names):
        log.warning("unsupported OTEL_PROPAGATORS, using tracecontext only", found=names)


# Lazy spans of unrecorded calls


def event_span(event: CallEvent) -> Span | None:
    """Return the span of a call, created if missing; None without tracing."""
    if event.span is None and event.make_span is not None:
        event.span = event.make_span()
    return event.span


def current_or_event_span() -> Span | None:
    """Return the current span for its ids; None outside of calls and without tracing."""
    span = current_span.get()
    if span is not None:
        return span
    event = current_event.get()
    return None if event is None else event_span(event)
