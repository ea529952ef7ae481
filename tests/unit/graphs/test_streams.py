from __future__ import annotations

import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ovmstrio.core.request import InferRequest, InferResponse
from ovmstrio.runtimes.graphs.config.graph_config import Port
from ovmstrio.runtimes.graphs.config.stream_refs import InvalidName, is_stream_name, parse_stream, parse_tag_index
from ovmstrio.runtimes.graphs.input_streams import InputStream, TimestampMismatch
from ovmstrio.runtimes.graphs.packets import (
    ImageFrame,
    MediaPipeTensor,
    OvTensor,
    Packet,
    TfTensor,
    stream_type,
    tag_for,
    type_name,
)
from ovmstrio.runtimes.graphs.timestamps import DONE, MAX, MIN, UNSET, AutomaticTimestamps, is_range_value, show
from pyovms import HttpPayload, Tensor

# Names


@given(
    st.none() | st.from_regex(r"[A-Z_][A-Z0-9_]{0,8}", fullmatch=True),
    st.integers(0, 10_000),
    st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True),
)
def test_stream_names_have_optional_tags_and_indexes(tag: str | None, index: int, name: str) -> None:
    assert is_stream_name(name)
    assert parse_stream(name) == (None, 0, name)
    if tag is not None:
        assert parse_stream(f"{tag}:{name}") == (tag, 0, name)
        assert parse_stream(f"{tag}:{index}:{name}") == (tag, index, name)
        assert parse_tag_index(f"{tag}:{index}") == parse_tag_index(str(Port(tag, index))) == Port(tag, index)


@given(st.text(max_size=20))
def test_any_text_is_a_stream_name_or_refused(text: str) -> None:
    try:
        tag, index, name = parse_stream(text)
    except InvalidName:
        return
    assert text in {name, f"{tag}:{name}", f"{tag}:{index}:{name}"}


@pytest.mark.parametrize(
    "text",
    ["", "Name", "TAG:", "TAG:Name", "tag:name", ":name", "TAG:01:name", "TAG:-1:name", "number:test3:out",
     "wrong:REQUEST:in", "A:0:b:c", "TAG: name", "1name", "é", "TAG:99999999999999999999:name"],
)  # fmt: skip
def test_invalid_stream_names_are_refused(text: str) -> None:
    with pytest.raises(InvalidName):
        parse_stream(text)


@pytest.mark.parametrize(
    ("text", "port"), [("TAG", ("TAG", 0)), ("TAG:2", ("TAG", 2)), ("", ("", 0)), (":1", ("", 1)), (":0", ("", 0))]
)
def test_tag_and_index_of_a_port_are_optional(text: str, port: tuple[str, int]) -> None:
    assert parse_tag_index(text) == port


@pytest.mark.parametrize("text", ["tag", "TAG:", "TAG:x", "TAG:1:2", "TAG:01"])
def test_invalid_ports_are_refused(text: str) -> None:
    with pytest.raises(InvalidName):
        parse_tag_index(text)


@pytest.mark.parametrize(("text", "fix"), [("TAG:Image", "write 'image'"), ("tag:image", "write 'TAG'")])
def test_other_case_is_suggested(text: str, fix: str) -> None:
    with pytest.raises(InvalidName) as raised:
        parse_stream(text)
    assert raised.value.fix == fix


# Types


@pytest.mark.parametrize(
    ("tag", "kind"),
    [
        ("OVMS_PY_TENSOR", Tensor),
        ("OVMS_PY_TENSOR_IMAGE", Tensor),
        ("OVTENSOR1", OvTensor),
        ("TENSOR", MediaPipeTensor),
        ("TFTENSOR_X", TfTensor),
        ("IMAGE", ImageFrame),
        ("REQUEST", InferRequest),
        ("RESPONSE", InferResponse),
        ("HTTP_REQUEST_PAYLOAD", HttpPayload),
        ("HTTP_RESPONSE_PAYLOAD", Tensor),
        ("", OvTensor),
    ],
)
def test_prefix_of_a_tag_is_the_type_of_its_stream(tag: str, kind: type) -> None:
    assert stream_type(tag) is kind


def test_types_have_names_and_tags() -> None:
    assert (tag_for(Tensor), type_name(Tensor)) == ("OVMS_PY_TENSOR", "pyovms.Tensor")
    assert (tag_for(bool), type_name(bool)) == (None, "bool")


# Packets


def _stream(*timestamps: int) -> InputStream:
    stream = InputStream("in", Port("IN", 0))
    for timestamp in timestamps:
        stream.push(Packet("a", timestamp))
    return stream


@given(st.lists(st.integers(-20, 20)))
def test_stream_keeps_ascending_packets(timestamps: list[int]) -> None:
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
    assert (stream.bound, stream.earliest) == ((kept[-1] + 1, kept[0]) if kept else (MIN, MIN))


@pytest.mark.parametrize("timestamp", [5, 4, -100, MIN])
def test_packet_below_the_bound_is_refused(timestamp: int) -> None:
    stream = _stream(5)
    with pytest.raises(TimestampMismatch) as caught:
        stream.push(Packet("b", timestamp))
    assert str(caught.value) == (
        'Packet timestamp mismatch on a calculator receiving from stream "in". Current minimum expected timestamp is '
        f"6 but received {show(timestamp)}. Are you using a custom InputStreamHandler?"
    )
    assert (list(stream.queue), stream.bound) == ([("a", 5)], 6)


@pytest.mark.parametrize("timestamp", [UNSET, MIN - 1, MAX + 1, DONE])
def test_packet_at_a_reserved_timestamp_is_refused(timestamp: int) -> None:
    with pytest.raises(TimestampMismatch, match='In stream "in", timestamp not specified or set to illegal value: Tim'):
        _stream(timestamp)


def test_largest_timestamp_is_the_last() -> None:
    stream = _stream(MAX)
    assert not stream.is_done
    stream.queue.popleft()
    assert stream.is_done


# Timestamps


@pytest.mark.parametrize(
    ("timestamp", "text", "is_allowed"),
    [
        (-(2**63), "Timestamp::Unset()", False),
        (-(2**63) + 1, "Timestamp::Unstarted()", False),
        (-(2**63) + 2, "Timestamp::PreStream()", False),
        (-(2**63) + 3, "Timestamp::Min()", True),
        (-(2**63) + 4, "-9223372036854775804", True),
        (-1, "-1", True),
        (0, "0", True),
        (2**63 - 5, "9223372036854775803", True),
        (2**63 - 4, "Timestamp::Max()", True),
        (2**63 - 3, "Timestamp::PostStream()", False),
        (2**63 - 2, "Timestamp::OneOverPostStream()", False),
        (2**63 - 1, "Timestamp::Done()", False),
    ],
)
def test_reserved_timestamps_have_names(timestamp: int, text: str, is_allowed: bool) -> None:
    assert (show(timestamp), is_range_value(timestamp)) == (text, is_allowed)


def test_automatic_timestamps_are_ascending_microseconds() -> None:
    clock = AutomaticTimestamps()
    before = time.time_ns() // 1000
    timestamps = [clock.next() for _ in range(5000)]
    assert before <= timestamps[0] <= time.time_ns() // 1000
    assert all(one < other for one, other in pairwise(timestamps))


def test_automatic_timestamps_ascend_when_the_clock_is_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([5_000_000, 1_000_000, 1_000_000, 9_000_000])
    monkeypatch.setattr(time, "time_ns", lambda: next(times))
    clock = AutomaticTimestamps()
    assert [clock.next() for _ in range(4)] == [5000, 5001, 5002, 9000]
