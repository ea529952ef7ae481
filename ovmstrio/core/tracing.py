"""Spans as the server's parts see them: what runs now in a call that is traced, and the parts that it has.

::

    span = current_span.get()            # None: nobody traces, and this test is all that it costs
    if span is not None:
        with span.part("inference"):     # the current span of what runs in the block, threads and tasks too
            ...

Who records spans, and what becomes of them, is up to ``ovmstrio.telemetry.spans``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Final, Literal, Protocol

__all__ = [
    "NO_ATTRIBUTES",
    "Attributes",
    "Span",
    "SpanKind",
    "current_span",
    "part_of_call",
    "part_of_server",
    "spans_of_server",
]

SpanKind = Literal["internal", "server", "client"]

Attributes = Mapping[str, str | bool | int | float | Sequence[str]]
"""What is told of a span, by OpenTelemetry's names where it has one."""

NO_ATTRIBUTES: Final[Attributes] = MappingProxyType({})


class Span(Protocol):
    """A part of a call, from when it begins until it ends; every method may be called in any thread.

    One that is not recorded has ids, for logs and for what is called, and does nothing else.
    """

    @property
    def trace_id(self) -> str:
        """Of all spans of the call, in 32 hexadecimal digits."""
        ...

    @property
    def span_id(self) -> str:
        """Its own, in 16 hexadecimal digits."""
        ...

    @property
    def is_recorded(self) -> bool:
        """Whether anything becomes of it."""
        ...

    @property
    def shows_steps(self) -> bool:
        """Whether its caller asks to see each step of what has many, by ``ovms=steps`` in ``tracestate``."""
        ...

    def part(
        self, name: str, attributes: Attributes = NO_ATTRIBUTES, kind: SpanKind = "internal"
    ) -> AbstractContextManager[Span]:
        """Give a part of it that lasts as long as the block, and fails if that does."""
        ...

    def begin(
        self,
        name: str,
        attributes: Attributes = NO_ATTRIBUTES,
        kind: SpanKind = "internal",
        *,
        links: Sequence[Span] = (),
        seconds_ago: float = 0.0,
    ) -> Span:
        """Begin a part that is nobody's current span, and has to be ended; it began so long ago."""
        ...

    def add(self, name: str, seconds: float, attributes: Attributes = NO_ATTRIBUTES, *, ended_ago: float = 0.0) -> None:
        """Tell of a part that has ended, just now or so many seconds ago, and how long it took."""
        ...

    def as_current(self) -> AbstractContextManager[Span]:
        """Make it the current span within the block, as in a task that does not descend from its call."""
        ...

    def set(self, name: str, value: str | bool | float) -> None:
        """Tell one more thing of it."""
        ...

    def event(self, name: str, attributes: Attributes = NO_ATTRIBUTES) -> None:
        """Tell that something happened now; beyond a bound nothing more is kept."""
        ...

    def link(self, other: Span) -> None:
        """Tell that another span, of whatever trace, has to do with it."""
        ...

    def end(self, error: BaseException | None = None) -> None:
        """End it, with what failed it; only the first time counts."""
        ...

    def headers(self) -> Sequence[tuple[str, str]]:
        """Give what tells those who are called of it: ``traceparent``, and ``tracestate`` if there is one."""
        ...


current_span: Final[ContextVar[Span | None]] = ContextVar("current_span", default=None)
"""The span of what runs now; None where no call is traced."""


class _Nothing:
    """Stands for the part of a call that is not traced."""

    __slots__ = ()

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None


_NOTHING: Final = _Nothing()


def part_of_call(
    name: str, attributes: Attributes = NO_ATTRIBUTES, kind: SpanKind = "internal"
) -> AbstractContextManager[Span | None]:
    """Give a part of the current span that lasts as long as the block; nothing where there is none."""
    span = current_span.get()
    return _NOTHING if span is None else span.part(name, attributes, kind)


BeginTrace = Callable[[str, Attributes], AbstractContextManager[object]]
"""Begins a trace of what no call asks for, as a client of others, and ends it with its block."""

spans_of_server: Final[ContextVar[BeginTrace | None]] = ContextVar("spans_of_server", default=None)
"""Traces what the server does by itself; None where nobody wants to know."""


def part_of_server(name: str, attributes: Attributes) -> AbstractContextManager[object]:
    """Give a span of what asks others for something, as a part of the call that waits for it, or of none."""
    span = current_span.get()
    if span is not None:
        return span.part(name, attributes, "client")
    begin = spans_of_server.get()
    return _NOTHING if begin is None else begin(name, attributes)
