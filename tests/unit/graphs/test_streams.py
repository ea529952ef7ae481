from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ovmstrio.runtimes.graphs.config.graph_config import Port
from ovmstrio.runtimes.graphs.input_streams import InputStream, TimestampMismatch, check_timestamp
from ovmstrio.runtimes.graphs.packets import Packet
from ovmstrio.runtimes.graphs.timestamps import DONE, MAX, MIN, UNSET


def _stream(limit: int = -1) -> InputStream:
    return InputStream("in", Port("IN", 0), limit=limit)


def test_a_new_stream_expects_anything() -> None:
    """It is neither done nor full, and the smallest timestamp may come."""
    stream = _stream()
    assert (stream.bound, stream.earliest, stream.is_done, stream.is_full) == (MIN, MIN, False, False)
    stream.push(Packet("x", MIN))
    assert (stream.bound, stream.earliest) == (MIN + 1, MIN)


def test_a_packet_moves_the_bound_past_itself() -> None:
    """The earliest is the head of the queue, and the bound that of what is still to come."""
    stream = _stream()
    stream.push(Packet("a", 5))
    stream.push(Packet("b", 9))
    assert (stream.bound, stream.earliest) == (10, 5)
    assert [stream.queue.popleft(), stream.queue.popleft()] == [("a", 5), ("b", 9)]
    assert stream.earliest == 10


@pytest.mark.parametrize("timestamp", [5, 4, -100, MIN])
def test_a_packet_below_the_bound_is_refused(timestamp: int) -> None:
    """The text tells the stream, what it expects and what came; the stream is as before."""
    stream = _stream()
    stream.push(Packet("a", 5))
    with pytest.raises(TimestampMismatch) as caught:
        stream.push(Packet("b", timestamp))
    shown = "Timestamp::Min()" if timestamp == MIN else str(timestamp)
    assert str(caught.value) == (
        'Packet timestamp mismatch on a calculator receiving from stream "in". Current minimum expected timestamp is '
        f"6 but received {shown}. Are you using a custom InputStreamHandler?"
    )
    assert (list(stream.queue), stream.bound) == ([("a", 5)], 6)


@pytest.mark.parametrize("timestamp", [UNSET, MIN - 1, MAX + 1, DONE])
def test_a_packet_at_a_reserved_timestamp_is_refused(timestamp: int) -> None:
    """Also where it lies beyond the bound."""
    with pytest.raises(
        TimestampMismatch, match=r'In stream "in", timestamp not specified or set to illegal value: Tim'
    ):
        _stream().push(Packet("a", timestamp))


def test_the_largest_timestamp_is_the_last() -> None:
    """Nothing is allowed after it, so that the stream is done once it was taken."""
    stream = _stream()
    stream.push(Packet("a", MAX))
    assert not stream.is_done
    stream.queue.popleft()
    assert stream.is_done


def test_bounds_only_rise() -> None:
    """A promise cannot be taken back; an old one is no news."""
    stream = _stream()
    assert stream.advance(10)
    assert not stream.advance(10)
    assert not stream.advance(3)
    assert stream.bound == 10
    with pytest.raises(TimestampMismatch):
        stream.push(Packet("a", 9))
    stream.push(Packet("a", 10))
    assert stream.bound == 11


def test_a_closed_stream_is_done_when_it_is_empty() -> None:
    """What waits is still delivered; nothing more is taken."""
    stream = _stream()
    stream.push(Packet("a", 1))
    stream.close()
    assert (stream.is_done, stream.earliest) == (False, 1)
    with pytest.raises(TimestampMismatch, match=r"Current minimum expected timestamp is Timestamp::Done\(\)"):
        stream.push(Packet("b", 2))
    stream.queue.popleft()
    assert (stream.is_done, stream.earliest) == (True, DONE)


@pytest.mark.parametrize(("limit", "full_at"), [(1, 1), (2, 2), (3, 3), (-1, None), (0, 0)])
def test_a_stream_is_full_at_its_limit(limit: int, full_at: int | None) -> None:
    """-1 is no limit; the stream itself refuses nothing."""
    stream = _stream(limit)
    for count in range(5):
        assert stream.is_full is (full_at is not None and count >= full_at)
        stream.push(Packet("a", count))


@given(st.lists(st.integers(-20, 20)))
def test_a_stream_holds_exactly_the_ascending_packets(timestamps: list[int]) -> None:
    """Whatever is offered, those are kept whose timestamp is above all kept before."""
    stream = _stream()
    kept: list[int] = []
    for timestamp in timestamps:
        if not kept or timestamp > kept[-1]:
            kept.append(timestamp)
            stream.push(Packet("a", timestamp))
        else:
            with pytest.raises(TimestampMismatch):
                stream.push(Packet("a", timestamp))
    assert [packet.timestamp for packet in stream.queue] == kept


def test_the_check_accepts_what_is_allowed() -> None:
    """The bound itself is allowed."""
    check_timestamp("out", 5, 5)
    check_timestamp("out", MAX, MIN)
