"""Span protocol and the current span; ``ovmstrio.telemetry.spans`` records spans.

::

    span = current_span.get()            # None without tracing: the only cost
    if span is not None:
        with span.part("inference"):     # the current span within the block, threads and tasks included
            ...
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Final, Literal, Protocol

SpanKind = Literal["internal", "server", "client"]

Attributes = Mapping[str, str | bool | int | float | Sequence[str]]
"""Span attributes, with OpenTelemetry names where they exist."""

NO_ATTRIBUTES: Final[Attributes] = MappingProxyType({})


class Span(Protocol):
    """A span; every method may be called in any thread.

    A span that is not recorded has ids for logs and propagation, and does nothing else.
    """

    @property
    def trace_id(self) -> str:
        """Trace id, 32 hexadecimal digits."""

    @property
    def span_id(self) -> str:
        """Span id, 16 hexadecimal digits."""

    @property
    def is_recorded(self) -> bool:
        """True if the span is recorded."""

    @property
    def shows_steps(self) -> bool:
        """True if the caller requests detailed steps with ``ovms=steps`` in ``tracestate``."""

    def part(
        self, name: str, attributes: Attributes = NO_ATTRIBUTES, kind: SpanKind = "internal"
    ) -> AbstractContextManager[Span]:
        """Run the block in a child span, which fails with the block."""

    def begin(
        self,
        name: str,
        attributes: Attributes = NO_ATTRIBUTES,
        kind: SpanKind = "internal",
        *,
        links: Sequence[Span] = (),
        seconds_ago: float = 0.0,
    ) -> Span:
        """Start a child span that does not become current and must be ended; it began ``seconds_ago``."""

    def add(self, name: str, seconds: float, attributes: Attributes = NO_ATTRIBUTES, *, ended_ago: float = 0.0) -> None:
        """Add a finished child span by duration; it ended ``ended_ago`` seconds ago."""

    def as_current(self) -> AbstractContextManager[Span]:
        """Make the span current within the block, in a task that did not inherit it."""

    def set(self, name: str, value: str | bool | float) -> None:
        """Set an attribute."""

    def event(self, name: str, attributes: Attributes = NO_ATTRIBUTES) -> None:
        """Add an event; dropped beyond a limit."""

    def link(self, other: Span) -> None:
        """Add a link to another span."""

    def end(self, error: BaseException | None = None) -> None:
        """End the span; later calls have no effect."""

    def headers(self) -> Sequence[tuple[str, str]]:
        """Return propagation headers: ``traceparent`` and, if set, ``tracestate``."""


current_span: Final[ContextVar[Span | None]] = ContextVar("current_span", default=None)
"""The current span; None without tracing."""


class _NoSpan:
    __slots__ = ()

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None


_NO_SPAN: Final = _NoSpan()


def child_span(
    name: str, attributes: Attributes = NO_ATTRIBUTES, kind: SpanKind = "internal"
) -> AbstractContextManager[Span | None]:
    """Run the block in a child of the current span, if there is one."""
    span = current_span.get()
    return _NO_SPAN if span is None else span.part(name, attributes, kind)


StartRootSpan = Callable[[str, Attributes], AbstractContextManager[object]]
"""Starts a root client span, for a request of the server itself, and ends it with the block."""


def client_span(
    name: str, attributes: Attributes, start_root_span: StartRootSpan | None = None
) -> AbstractContextManager[object]:
    """Run the block in a client span: a child of the current span, or a root span; ``None`` without tracing."""
    span = current_span.get()
    if span is not None:
        return span.part(name, attributes, "client")
    return _NO_SPAN if start_root_span is None else start_root_span(name, attributes)
