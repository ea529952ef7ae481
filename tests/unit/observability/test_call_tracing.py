"""What calls that are not recorded cost, and what they have all the same."""

from __future__ import annotations

from contextvars import copy_context
from typing import TYPE_CHECKING

import pytest

from ovmstrio.core.events import OK, CallEvent, Door, WireRequest
from ovmstrio.core.tracing import current_span
from ovmstrio.core.unrecorded_spans import span_of, unrecorded_spans
from ovmstrio.observability.tracing.call_tracing import CallTracing
from ovmstrio.observability.tracing.sampling import TraceSampling
from ovmstrio.wire.grpc.headers import read_request_head
from tests.support.peers import LOCAL

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ovmstrio.core.tracing import Span
    from ovmstrio.observability.tracing.spans import RecordedSpan

DOOR = Door("KServe", "gRPC", "ModelInfer")
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEAD = ((b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/a/b"), (b"content-type", b"application/grpc"))


class _Users:
    """What code of users sees."""

    def __init__(self) -> None:
        self.entered: list[Span] = []

    def enter(self, span: Span) -> object:
        self.entered.append(span)
        return None

    def leave(self, before: object) -> None:
        del before


class _Unread(tuple[tuple[str, str], ...]):
    """Headers that nobody may look at."""

    __slots__ = ()

    def __iter__(self) -> Iterator[tuple[str, str]]:
        raise AssertionError("the headers were read")


def _begin(tracing: CallTracing, request: WireRequest | None = None, kind: str = "model") -> CallEvent:
    event = CallEvent("m", "1", kind, DOOR, "ModelInfer", request=request)
    copy_context().run(tracing.call_started, event)
    return event


def test_headers_are_read_for_a_parent_only_where_there_is_one() -> None:
    """The door that has read them says so."""
    tracing = CallTracing(TraceSampling("always_off"), [], is_failure=bool)
    bare, parent = read_request_head(HEAD, 10_000), f"00-{TRACE}-{SPAN}-00"
    request = WireRequest("gRPC", "POST", bare.path, _Unread(), LOCAL)
    request.traceparent = bare.traceparent
    assert _begin(tracing, request).span is None

    known = read_request_head((*HEAD, (b"traceparent", parent.encode()), (b"tracestate", b"a=b")), 10_000)
    request = WireRequest("gRPC", "POST", known.path, known.headers, LOCAL)
    request.traceparent = known.traceparent
    span = _begin(tracing, request).span
    assert span is not None
    assert (span.trace_id, span.is_recorded) == (TRACE, False)
    assert dict(span.headers())["tracestate"] == "a=b"


def test_a_kind_is_asked_once_whether_it_runs_code_of_users() -> None:
    """Which sees the spans of its calls, recorded or not, and no others."""
    asked: list[str] = []

    def has_user_code(kind: str) -> bool:
        asked.append(kind)
        return kind == "handler"

    users = _Users()
    tracing = CallTracing(TraceSampling("always_off"), [], is_failure=bool, user=users, has_user_code=has_user_code)
    events = [_begin(tracing, kind=kind) for kind in ("model", "handler", "model", "handler")]
    assert asked == ["model", "handler"]
    assert users.entered == [events[1].span, events[3].span]


def test_a_share_is_recorded_as_the_ratio_says() -> None:
    """By the ids that calls without parents are given."""
    tracing = CallTracing(TraceSampling("parentbased_traceidratio", 0.25), [], is_failure=bool)
    recorded = sum(bool(_begin(tracing).trace_id) for _ in range(2000))
    assert 350 < recorded < 650
    assert current_span.get() is None


class _Kept:
    """Keeps what has ended."""

    def __init__(self) -> None:
        self.spans: list[RecordedSpan] = []

    def span_ended(self, span: RecordedSpan) -> None:
        self.spans.append(span)


def test_who_tells_of_a_failed_call_behind_its_end_has_the_ids_of_its_span() -> None:
    """As the access log does, where nothing was logged before."""
    kept = _Kept()
    tracing = CallTracing(TraceSampling("always_off"), [kept], is_failure=bool)
    request = WireRequest("gRPC", "POST", "/a/b", (), LOCAL)
    event = request.event = _begin(tracing, request)
    event.code, request.status = OK, 4

    def end() -> Span | None:
        unrecorded_spans.set(tracing.unrecorded_span)
        tracing.call_finished(event)
        tracing.request_ended(request)
        return span_of(event)

    told = copy_context().run(end)
    (span,) = kept.spans
    assert told is not None
    assert (told.trace_id, told.span_id) == (span.trace_id, span.span_id)


@pytest.mark.parametrize("ratio", [0.0, 0.01, 0.5, 1.0])
def test_ids_say_what_was_decided(ratio: float) -> None:
    """So that servers that are called later, which decide by the id, decide alike."""
    sampling = TraceSampling("traceidratio", ratio)
    decided = [each for each in (True, False) if ratio not in (0.0, 1.0) or each == bool(ratio)]
    for is_recorded in decided:
        ids = {sampling.new_id(is_recorded=is_recorded) for _ in range(200)}
        assert len(ids) == 200
        assert {sampling.records(each, None) for each in ids} == {is_recorded}
        assert max(ids) < 2**128
