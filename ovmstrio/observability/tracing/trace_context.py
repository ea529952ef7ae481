"""W3C's Trace Context: what a caller says of the trace that its call is a part of, and what is said to those called."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

__all__ = ["TraceParent", "read_parent", "written_parent"]

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
