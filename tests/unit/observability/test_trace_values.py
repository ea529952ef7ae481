"""Trace contexts, sampling, and what is kept of traces, as values."""

from __future__ import annotations

import threading

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from ovmstrio.core.errors import ModelFailure
from ovmstrio.core.tracing import current_span, part_of_call
from ovmstrio.observability.tracing.recent import RecentTraces
from ovmstrio.observability.tracing.sampling import TraceSampling
from ovmstrio.observability.tracing.spans import MOST_EVENTS, RecordedSpan
from ovmstrio.observability.tracing.trace_context import TraceParent, read_parent, written_parent
from tests.support.waits import WAIT_SECONDS

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@given(st.integers(1, 2**128 - 1), st.integers(1, 2**64 - 1), st.booleans())
def test_what_is_written_is_read_again(trace: int, span: int, is_sampled: bool) -> None:
    """Whatever the ids are."""
    assert read_parent(written_parent(trace, span, is_sampled=is_sampled)) == TraceParent(trace, span, is_sampled)


@given(st.text(max_size=80))
def test_whatever_a_client_sends_as_a_parent_is_read_or_none(text: str) -> None:
    """Nothing is raised."""
    read_parent(text, text)


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
def test_what_is_no_parent_counts_as_none(header: str) -> None:
    """As W3C's recommendation says."""
    assert read_parent(header) is None


def test_later_versions_are_read_as_far_as_they_are_known() -> None:
    """With fields behind, and only the flag that says sampled."""
    assert read_parent(f"01-{TRACE}-{SPAN}-03-more", "a=b") == TraceParent(int(TRACE, 16), int(SPAN, 16), True, "a=b")


@pytest.mark.parametrize("state", ["vendor=\xe9", "vendor=a\x7f", "vendor=\x00", "v=" + "x" * 511])
def test_a_state_that_could_not_stand_in_a_header_is_left_out(state: str) -> None:
    """It is sent on to other servers, whose clients would refuse to send it, and the parent stays."""
    assert read_parent(f"00-{TRACE}-{SPAN}-01", state) == TraceParent(int(TRACE, 16), int(SPAN, 16), True)


@pytest.mark.parametrize(
    ("name", "of_parent", "without"),
    [
        ("always_on", {True, False}, True),
        ("always_off", set(), False),
        ("parentbased_always_on", {True}, True),
        ("parentbased_always_off", {True}, False),
    ],
)
def test_samplers_decide_as_their_names_say(name: str, of_parent: set[bool], *, without: bool) -> None:
    """Those that are based on parents do as these did."""
    sampling = TraceSampling(name)
    parents = {is_sampled: TraceParent(1, 1, is_sampled) for is_sampled in (True, False)}

    assert {told for told, parent in parents.items() if sampling.records(5, parent)} == of_parent
    assert sampling.records(5, None) is without


def test_a_ratio_takes_its_share_by_the_trace() -> None:
    """So that all servers of a trace decide alike."""
    sampling = TraceSampling("traceidratio", 0.25)
    step = 2**64 // 1000

    assert sum(sampling.records(part * step, None) for part in range(1000)) == pytest.approx(250, abs=1)


@pytest.mark.parametrize(("name", "ratio"), [("sometimes", 1.0), ("traceidratio", 1.5)])
def test_samplers_that_are_none_are_refused(name: str, ratio: float) -> None:
    """With what was expected."""
    with pytest.raises(ValueError, match="expected"):
        TraceSampling(name, ratio)


def _call(recent: RecentTraces, trace: int, spans: int = 0) -> None:
    call = RecordedSpan("call", [recent], trace, kind="server")
    for _ in range(spans):
        call.add("part", 0.5, ended_ago=0.25)
    call.end()


def test_the_oldest_traces_make_room_and_long_ones_are_cut() -> None:
    """What was left out is counted; the call itself is always there."""
    recent = RecentTraces(most=2, most_spans=3)
    for trace in (1, 2, 3):
        _call(recent, trace, spans=5)

    kept = recent.traces()
    assert [trace.trace_id for trace in kept] == [f"{3:032x}", f"{2:032x}"]
    assert [(len(trace.spans), trace.dropped) for trace in kept] == [(4, 2)] * 2
    assert kept[0].root is not None
    assert recent.trace(f"{1:032x}") is None
    assert recent.trace("no id") is None
    document = kept[0].document()
    assert document["spans"] == 6
    assert int(document["tree"][0]["ended"]) - int(document["tree"][0]["began"]) == 500_000_000


def test_a_trace_without_an_end_takes_no_more_room() -> None:
    """As that of a client whose parent is always the same; its last call is there, and the others are counted."""
    recent = RecentTraces(most_spans=3)
    for _ in range(20):
        _call(recent, 1, spans=1)

    (trace,) = recent.traces()
    assert (len(trace.spans), trace.dropped) == (4, 36)
    assert trace.spans[-1] is trace.root


def test_spans_may_end_in_any_thread() -> None:
    """None is lost."""
    recent = RecentTraces()
    call = RecordedSpan("call", [recent], 7, kind="server")

    def work() -> None:
        for _ in range(50):
            call.add("part", 0.1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_SECONDS)
    call.end()

    (trace,) = recent.traces()
    assert len(trace.spans) == 201


def _fail_within(call: RecordedSpan) -> None:
    with part_of_call("failing"):
        assert current_span.get() is not call
        raise ModelFailure("the cat is out")


def test_a_part_fails_with_its_block_and_is_current_within_it() -> None:
    """Cancellation is an end like others."""
    recent = RecentTraces()
    call = RecordedSpan("call", [recent], 9, kind="server")
    with call.as_current():
        with pytest.raises(ModelFailure):
            _fail_within(call)
        assert current_span.get() is call
        for number in range(MOST_EVENTS + 5):
            call.event(f"event {number}")
    assert current_span.get() is None
    assert part_of_call("nothing").__enter__() is None
    call.end()
    call.end()

    (trace,) = recent.traces()
    assert [span.failure for span in trace.spans] == ["the cat is out", ""]
    assert len(trace.spans[1].events) == MOST_EVENTS
    assert trace.spans[0].attributes["error.type"] == "ovmstrio.core.errors.ModelFailure"


async def test_a_part_that_is_cancelled_has_not_failed() -> None:
    """It says so by an attribute."""
    recent = RecentTraces()
    call = RecordedSpan("call", [recent], 9, kind="server")
    with trio.CancelScope() as scope, call.part("waiting"):
        scope.cancel()
        await trio.sleep_forever()
    call.end()

    (trace,) = recent.traces()
    assert (trace.spans[0].failure, trace.spans[0].attributes) == ("", {"ovmstrio.cancelled": True})
