from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry import context as contexts
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource

from ovmstrio.core.errors import ModelFailure
from ovmstrio.core.events import OK, ApiInterface, CallEvent, WireRequest
from ovmstrio.core.tracing import Span, child_span, current_span
from ovmstrio.telemetry.call_tracing import CallTracing
from ovmstrio.telemetry.otel import UserSpans, to_readable_span
from ovmstrio.telemetry.recent_traces import RecentTraces
from ovmstrio.telemetry.spans import MAX_SPAN_EVENTS, RecordedSpan, TraceSampler, event_span
from ovmstrio.telemetry.trace_context import TraceParent, format_traceparent, parse_traceparent
from tests.support.callers import LOCAL

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@given(st.integers(1, 2**128 - 1), st.integers(1, 2**64 - 1), st.booleans())
def test_a_written_parent_is_parsed_again(trace: int, span: int, is_sampled: bool) -> None:
    assert parse_traceparent(format_traceparent(trace, span, is_sampled=is_sampled)) == TraceParent(
        trace, span, is_sampled
    )


@given(st.text(max_size=80))
def test_no_parent_of_a_client_raises(text: str) -> None:
    parse_traceparent(text, text)


@pytest.mark.parametrize(
    "header",
    [
        "",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-01-more",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
    ],
)
def test_an_invalid_parent_is_ignored(header: str) -> None:
    assert parse_traceparent(header) is None


def test_fields_of_later_versions_are_ignored() -> None:
    assert parse_traceparent(f"01-{TRACE}-{SPAN}-03-more", "a=b") == TraceParent(
        int(TRACE, 16), int(SPAN, 16), True, "a=b"
    )


@pytest.mark.parametrize("state", ["vendor=\xe9", "vendor=a\x7f", "vendor=\x00", "v=" + "x" * 511])
def test_a_state_that_is_no_valid_header_is_dropped(state: str) -> None:
    assert parse_traceparent(f"00-{TRACE}-{SPAN}-01", state) == TraceParent(int(TRACE, 16), int(SPAN, 16), True)


def test_a_ratio_samples_by_the_trace_id() -> None:
    sampling = TraceSampler("traceidratio", 0.25)
    step = 2**64 // 1000
    assert sum(sampling.records(part * step, None) for part in range(1000)) == pytest.approx(250, abs=1)


@pytest.mark.parametrize(("name", "ratio"), [("sometimes", 1.0), ("traceidratio", 1.5)])
def test_unknown_samplers_and_ratios_are_refused(name: str, ratio: float) -> None:
    with pytest.raises(ValueError, match="expected"):
        TraceSampler(name, ratio)


def _call(recent: RecentTraces, trace: int = 7) -> RecordedSpan:
    return RecordedSpan("call", [recent], trace, kind="server")


def _end_call(recent: RecentTraces, trace: int, spans: int) -> None:
    call = _call(recent, trace)
    for _ in range(spans):
        call.add("part", 0.5, ended_ago=0.25)
    call.end()


def test_old_traces_are_dropped_and_long_ones_truncated() -> None:
    recent = RecentTraces(max_traces=2, max_spans=3)
    for trace_id in (1, 2, 3):
        _end_call(recent, trace_id, spans=5)

    kept = recent.traces()
    assert [trace.trace_id for trace in kept] == [f"{3:032x}", f"{2:032x}"]
    assert [(len(trace.spans), trace.dropped) for trace in kept] == [(4, 2)] * 2
    assert kept[0].root is not None
    assert recent.trace(f"{1:032x}") is None
    assert recent.trace("no id") is None
    document = kept[0].document()
    assert document["spans"] == 6
    assert int(document["tree"][0]["ended"]) - int(document["tree"][0]["began"]) == 500_000_000


def test_an_endless_trace_has_a_bounded_size() -> None:
    recent = RecentTraces(max_spans=3)
    for _ in range(20):
        _end_call(recent, 1, spans=1)

    (trace,) = recent.traces()
    assert (len(trace.spans), trace.dropped) == (4, 36)
    assert trace.spans[-1] is trace.root


def test_spans_may_end_in_any_thread() -> None:
    recent = RecentTraces()
    call = _call(recent)
    with ThreadPoolExecutor(4) as threads:
        for _ in range(200):
            threads.submit(call.add, "part", 0.1)
    call.end()
    (trace,) = recent.traces()
    assert len(trace.spans) == 201


def _fail_within(call: RecordedSpan) -> None:
    with child_span("failing"):
        assert current_span.get() is not call
        raise ModelFailure("the cat is out")


def test_a_part_fails_with_its_block() -> None:
    recent = RecentTraces()
    call = _call(recent)
    with call.as_current():
        with pytest.raises(ModelFailure):
            _fail_within(call)
        assert current_span.get() is call
        for number in range(MAX_SPAN_EVENTS + 5):
            call.event(f"event {number}")
    assert current_span.get() is None
    assert child_span("nothing").__enter__() is None
    call.end()
    call.end()
    (trace,) = recent.traces()
    assert [span.failure for span in trace.spans] == ["the cat is out", ""]
    assert len(trace.spans[1].events) == MAX_SPAN_EVENTS
    assert trace.spans[0].attributes["error.type"] == "ovmstrio.core.errors.ModelFailure"


async def test_a_part_that_is_cancelled_has_not_failed() -> None:
    recent = RecentTraces()
    call = _call(recent)
    with trio.CancelScope() as scope, call.part("waiting"):
        scope.cancel()
        await trio.sleep_forever()
    call.end()
    (trace,) = recent.traces()
    assert (trace.spans[0].failure, trace.spans[0].attributes) == ("", {"ovmstrio.cancelled": True})


# Spans of calls


KSERVE = ApiInterface("KServe", "gRPC", "ModelInfer")


def _start(tracing: CallTracing, request: WireRequest | None = None, kind: str = "model") -> CallEvent:
    event = CallEvent("m", "1", kind, KSERVE, "ModelInfer", request=request)
    copy_context().run(tracing.call_started, event)
    return event


class _SpanList:
    def __init__(self) -> None:
        self.spans: list[RecordedSpan] = []

    def span_ended(self, span: RecordedSpan) -> None:
        self.spans.append(span)


def test_a_call_that_fails_after_its_end_has_the_ids_of_its_span() -> None:
    kept = _SpanList()
    tracing = CallTracing(TraceSampler("always_off"), [kept], is_failure=bool)
    request = WireRequest("gRPC", "POST", "/a/b", (), LOCAL)
    event = request.event = _start(tracing, request)
    event.code, request.status = OK, 4

    def end() -> Span | None:
        tracing.call_finished(event)
        tracing.request_ended(request)
        return event_span(event)

    unrecorded = copy_context().run(end)
    (span,) = kept.spans
    assert unrecorded is not None
    assert (unrecorded.trace_id, unrecorded.span_id) == (span.trace_id, span.span_id)


@pytest.mark.parametrize("ratio", [0.0, 0.01, 0.5, 1.0])
def test_ids_encode_the_sampling_decision(ratio: float) -> None:
    sampling = TraceSampler("traceidratio", ratio)
    decided = [each for each in (True, False) if ratio not in (0.0, 1.0) or each == bool(ratio)]
    for is_recorded in decided:
        ids = {sampling.new_id(is_recorded=is_recorded) for _ in range(200)}
        assert len(ids) == 200
        assert {sampling.records(each, None) for each in ids} == {is_recorded}
        assert max(ids) < 2**128


# User code


def test_attributes_events_and_links_of_user_code_are_bounded() -> None:
    recent = RecentTraces()
    span = _call(recent)
    before = contexts.get_current()
    UserSpans().enter(span)
    try:
        seen = trace.get_current_span()
        seen.set_attribute("size", object())  # type: ignore[arg-type]
        seen.add_event("came", {"bytes": b"x", "long": "y" * 100_000, "number": 3})
        seen.record_exception(ValueError("z" * 100_000), {"of": {1}})  # type: ignore[dict-item]
        for _ in range(2 * MAX_SPAN_EVENTS):
            seen.add_link(trace.SpanContext(1, 2, is_remote=False))
    finally:
        UserSpans().leave(before)
    span.end()
    (kept,) = recent.traces()
    (document,) = json.loads(json.dumps(kept.document()))["tree"]
    assert document["attributes"]["size"].startswith("<object")
    came, raised = (event["attributes"] for event in document["events"])
    assert (came["bytes"], came["number"]) == ("b'x'", 3)
    assert raised["of"] == "{1}"
    assert max(len(came["long"]), len(raised["exception.message"])) < 2000
    assert len(document["links"]) == MAX_SPAN_EVENTS


def test_texts_and_numbers_that_no_exporter_can_encode_are_replaced(caplog: pytest.LogCaptureFixture) -> None:
    kept = _SpanList()
    call = RecordedSpan("call", [kept], 7)
    call.set("ovmstrio.request.id", "a\ud800b")
    with call.part("part"):
        UserSpans().enter(call)
        trace.get_current_span().set_attribute("large", 2**70)
        UserSpans().leave(None)
    call.end(ModelFailure("\udfff is no text"))
    encoded = encode_spans([to_readable_span(each, Resource({})) for each in kept.spans])
    _, sent = encoded.resource_spans[0].scope_spans[0].spans
    attributes = {each.key: each.value.string_value for each in sent.attributes}
    assert attributes["ovmstrio.request.id"] == "a?b"
    assert attributes["large"] == str(2**70)
    assert sent.status.message == "? is no text"
    assert not caplog.records
