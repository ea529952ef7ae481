"""Spans: those that are recorded, and those that have nothing but their ids."""

from __future__ import annotations

from collections.abc import Sequence
from random import getrandbits
from time import time_ns
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, Self

import trio

from ovmstrio.core.texts import cut, text_of
from ovmstrio.core.tracing import NO_ATTRIBUTES, current_span
from ovmstrio.observability.tracing.trace_context import written_parent

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from types import TracebackType

    from ovmstrio.core.tracing import Attributes, Span, SpanKind
    from ovmstrio.observability.tracing.trace_context import TraceParent

__all__ = [
    "LONGEST_TEXT",
    "MOST_EVENTS",
    "QuietSpan",
    "RecordedSpan",
    "SpanEvent",
    "SpanLink",
    "SpanSink",
    "UserContext",
    "new_span_id",
]

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
