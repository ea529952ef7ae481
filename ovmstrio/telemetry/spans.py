"""Spans: those that are recorded, and those that have nothing but their ids."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from random import getrandbits, randrange
from time import time_ns
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, Self

import structlog
import trio

from ovmstrio.core.events import CallEvent, current_event
from ovmstrio.core.tracing import NO_ATTRIBUTES, Span, current_span
from ovmstrio.util.truncation import cut, text_of

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from types import TracebackType

    from ovmstrio.core.tracing import Attributes, SpanKind

__all__ = [
    "ALWAYS",
    "LONGEST_TEXT",
    "MOST_EVENTS",
    "SAMPLERS",
    "QuietSpan",
    "RecordedSpan",
    "SpanEvent",
    "SpanLink",
    "SpanSink",
    "TraceParent",
    "TraceSampling",
    "UserContext",
    "asks_for_traces",
    "exporter_names",
    "new_span_id",
    "otlp_protocol",
    "read_parent",
    "sampling_of",
    "span_in_hand",
    "span_of",
    "unrecorded_spans",
    "warn_of_propagators",
    "written_parent",
]

# ----------------------------------------------------------------------
# W3C's Trace Context: what a caller says of the trace that its call is a part of, and what is said to those called
# ----------------------------------------------------------------------

_PARENT: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED: Final = 1
_FIRST_VERSION: Final = "00"
_NO_VERSION: Final = "ff"
_LONGEST_STATE: Final = 512


class TraceParent(NamedTuple):
    """The caller's span.

    Attributes:
        trace_id: a number of 128 bits.
        span_id: of 64 bits.
        is_sampled: whether the caller records its trace.
        state: what tracing systems on the way have added, to be passed on as it is.
    """

    trace_id: int
    span_id: int
    is_sampled: bool
    state: str = ""


def read_parent(header: str, state: str = "") -> TraceParent | None:
    """Read ``traceparent`` and ``tracestate``; None for what is not one, which counts as no parent."""
    match = _PARENT.fullmatch(header.strip())
    if match is None:
        return None
    version, trace, span, flags, further = match.groups()
    trace_id, span_id = int(trace, 16), int(span, 16)
    if not (trace_id and span_id) or version == _NO_VERSION or (version == _FIRST_VERSION and further):
        return None
    # It is sent on in headers, where nothing else may stand.
    kept = state if len(state) <= _LONGEST_STATE and state.isascii() and state.isprintable() else ""
    return TraceParent(trace_id, span_id, bool(int(flags, 16) & _SAMPLED), kept)


def written_parent(trace_id: int, span_id: int, *, is_sampled: bool) -> str:
    """Write a ``traceparent``."""
    return f"00-{trace_id:032x}-{span_id:016x}-{int(is_sampled):02x}"


# ----------------------------------------------------------------------
# Spans: those that are recorded, and those that have nothing but their ids
# ----------------------------------------------------------------------

MOST_EVENTS: Final = 128
"""How many events of a span are kept; ``OTEL_SPAN_EVENT_COUNT_LIMIT`` has the same default."""
LONGEST_TEXT: Final = 1024
"""Characters of a text that is told of a span."""
_SPAN_BITS: Final = 64
_NANOSECONDS: Final = 1e9
_STEPS: Final = "ovms=steps"


def new_span_id() -> int:
    """Make an id, which is never 0."""
    return getrandbits(_SPAN_BITS) or 1


class SpanEvent(NamedTuple):
    """Something that happened within a span; ``at`` is in nanoseconds since the epoch."""

    name: str
    at: int
    attributes: Attributes


class SpanLink(NamedTuple):
    """Another span that has to do with one."""

    trace_id: int
    span_id: int


class SpanSink(Protocol):
    """Gets spans that have ended, in whatever thread they did; must neither block nor raise."""

    def span_ended(self, span: RecordedSpan) -> None:
        """Take a span, which does not change any more."""
        ...


class UserContext(Protocol):
    """Makes spans the current ones of the instrumentation that code of users brings."""

    def enter(self, span: Span) -> object:
        """Make a span the current one; gives what :meth:`leave` needs."""
        ...

    def leave(self, before: object) -> None:
        """Make the one before the current one again."""
        ...


class _Current:
    """A block in which a span is the current one, at whose end it ends if it is the block's own."""

    __slots__ = ("_before", "_ends", "_span", "_user_before")

    def __init__(self, span: RecordedSpan | QuietSpan, *, ends: bool) -> None:
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
    """A span that becomes part of a trace when it ends.

    Attributes:
        name: of what is done.
        kind: whether it is a call that came, one that went out, or none.
        trace: the trace's id.
        number: its own.
        parent: of the span that it is a part of; 0 for the first of a trace.
        has_remote_parent: whether that is another program's.
        state: W3C's ``tracestate``.
        began: in nanoseconds since the epoch.
        ended: likewise; 0 before.
        attributes: what is told of it.
        events: what happened in it.
        links: other spans.
        failure: what failed it, in words; empty if nothing did.
        user: makes it the current one of the code of users; None where that knows no spans.
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
        return _Current(self.begin(name, attributes, kind), ends=True)

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
        return _Current(self, ends=False)

    def set(self, name: str, value: str | bool | float) -> None:
        """As :class:`ovmstrio.core.tracing.Span`."""
        if not self.ended:
            self.attributes[name] = cut(value, LONGEST_TEXT) if isinstance(value, str) else value

    def event(self, name: str, attributes: Attributes = NO_ATTRIBUTES) -> None:
        """As :class:`ovmstrio.core.tracing.Span`."""
        if len(self.events) < MOST_EVENTS:
            self.events.append(SpanEvent(name, time_ns(), attributes))

    def link(self, other: Span) -> None:
        """As :class:`ovmstrio.core.tracing.Span`."""
        if len(self.links) < MOST_EVENTS and other.is_recorded:
            self.links.append(SpanLink(int(other.trace_id, 16), int(other.span_id, 16)))

    def fail(self, error: BaseException) -> None:
        """Note what failed it; cancellation is an end like others, and no failure."""
        if isinstance(error, trio.Cancelled):
            self.attributes["ovmstrio.cancelled"] = True
            return
        text = cut(text_of(error), LONGEST_TEXT)
        name = f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins.")
        self.failure = text or name
        self.attributes["error.type"] = name
        self.event("exception", {"exception.type": name, "exception.message": text})

    def end(self, error: BaseException | None = None) -> None:
        """As :class:`ovmstrio.core.tracing.Span`."""
        if self.ended:
            return
        if error is not None:
            self.fail(error)
        self.finish(max(time_ns(), self.began))

    def finish(self, ended: int) -> None:
        """Have it have ended at a time."""
        self.ended = ended
        for sink in self._sinks:
            sink.span_ended(self)

    def headers(self) -> Sequence[tuple[str, str]]:
        """As :class:`ovmstrio.core.tracing.Span`."""
        return _headers(self.trace, self.number, self.state, is_sampled=True)


class QuietSpan:
    """The span of a call that is not recorded; all parts of the call have its ids."""

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
        """Its own id, which is made when somebody asks for it."""
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
        """Give itself, as a block that does nothing."""
        return self

    def begin(self, *_: object, **__: object) -> Self:
        """Give itself."""
        return self

    def add(self, *_: object, **__: object) -> None:
        """Forget what is told."""

    def as_current(self) -> AbstractContextManager[Span]:
        """As :class:`ovmstrio.core.tracing.Span`."""
        return _Current(self, ends=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def set(self, name: str, value: object) -> None:
        """Forget what is told."""

    def event(self, name: str, attributes: Attributes = NO_ATTRIBUTES) -> None:
        """Forget what is told."""

    def link(self, other: Span) -> None:
        """Forget what is told."""

    def end(self, error: BaseException | None = None) -> None:
        """Do nothing."""

    def headers(self) -> Sequence[tuple[str, str]]:
        """As :class:`ovmstrio.core.tracing.Span`; those who are called need not record either."""
        state = "" if self.parent is None else self.parent.state
        return _headers(self.trace, self.number, state, is_sampled=False)


def _headers(trace: int, number: int, state: str, *, is_sampled: bool) -> Sequence[tuple[str, str]]:
    parent = ("traceparent", written_parent(trace, number, is_sampled=is_sampled))
    return (parent, ("tracestate", state)) if state else (parent,)


# ----------------------------------------------------------------------
# Which calls are recorded: as their callers are, and of those that have no parent a share
# ----------------------------------------------------------------------

_PARENT_BASED: Final = "parentbased_"
_RATIOS: Final = {"always_on": 1.0, "always_off": 0.0}
_RATIO: Final = "traceidratio"
SAMPLERS: Final = tuple(f"{prefix}{name}" for prefix in ("", _PARENT_BASED) for name in (*_RATIOS, _RATIO))
"""The names that are understood."""
_LOW: Final = 64
"""Bits of a trace's id, by which a share is taken."""
_LOW_BITS: Final = 2**_LOW - 1


class TraceSampling:
    """Decides for one call after the other.

    Args:
        name: one of :data:`SAMPLERS`.
        ratio: the share, from 0 to 1, where the name has one.

    Raises:
        ValueError: the name is none of them, or the ratio out of its bounds.

    Attributes:
        share: of the calls without a parent, from 0 to 1.
    """

    def __init__(self, name: str = "parentbased_always_on", ratio: float = 1.0) -> None:
        if name not in SAMPLERS:
            raise ValueError(f"expected one of {', '.join(SAMPLERS)}, got {name!r}")
        if not 0 <= ratio <= 1:
            raise ValueError(f"expected a ratio from 0 to 1, got {ratio}")
        self._follows_parent = name.startswith(_PARENT_BASED)
        self.share: Final = _RATIOS.get(name.removeprefix(_PARENT_BASED), ratio)
        # Traces without a parent are recorded whose last 64 bits are a smaller number.
        self._bound: Final = round(self.share * (_LOW_BITS + 1))

    def records(self, trace_id: int, parent: TraceParent | None) -> bool:
        """Decide for a call of a trace."""
        if parent is not None and self._follows_parent:
            return parent.is_sampled
        return trace_id & _LOW_BITS < self._bound

    def new_id(self, *, is_recorded: bool) -> int:
        """Make the id of a trace of which it is decided whether it is recorded, as all others decide by it then."""
        bound = self._bound
        if bound > _LOW_BITS or not bound:
            return getrandbits(2 * _LOW) or 1
        low = randrange(bound) if is_recorded else randrange(bound, _LOW_BITS + 1)  # noqa: S311 - no secret
        return (getrandbits(_LOW) or 1) << _LOW | low


ALWAYS: Final = TraceSampling("always_on")


# ----------------------------------------------------------------------
# Which calls the environment wants sampled, in OpenTelemetry's own variables, read without OpenTelemetry
# ----------------------------------------------------------------------

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


# ----------------------------------------------------------------------
# What OpenTelemetry's own variables say of traces, read without it: in the server and in worker processes
# ----------------------------------------------------------------------

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


# ----------------------------------------------------------------------
# Spans of calls that nobody records, which are made only when somebody asks for their ids
# ----------------------------------------------------------------------

unrecorded_spans: Final[ContextVar[Callable[[], Span] | None]] = ContextVar("unrecorded_spans", default=None)
"""Makes the span of a call that is not recorded; None where calls are not traced."""


def span_of(event: CallEvent) -> Span | None:
    """Give the span of a call, made now if it had none yet; None where calls are not traced."""
    if event.span is None:
        make = unrecorded_spans.get()
        if make is not None:
            event.span = make()
    return event.span


def span_in_hand() -> Span | None:
    """Give the span of what runs now, for its ids; None outside of calls, and where calls are not traced."""
    span = current_span.get()
    if span is not None:
        return span
    event = current_event.get()
    return None if event is None else span_of(event)
