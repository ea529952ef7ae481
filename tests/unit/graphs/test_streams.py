from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ovmstrio.config.documents import InvalidValue
from ovmstrio.graphs.graph_config import Port
from ovmstrio.graphs.packets import DONE, MAX, MIN, UNSET, AutomaticTimestamps, Packet
from ovmstrio.graphs.stream_refs import is_stream_name, parse_stream, parse_tag_index
from ovmstrio.graphs.streams import InputStream, TimestampMismatch


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
    except InvalidValue:
        return
    assert text in {name, f"{tag}:{name}", f"{tag}:{index}:{name}"}


@pytest.mark.parametrize(
    "text",
    ["", "Name", "TAG:", "TAG:Name", "tag:name", ":name", "TAG:01:name", "TAG:-1:name", "number:test3:out",
     "wrong:REQUEST:in", "A:0:b:c", "TAG: name", "1name", "é", "TAG:99999999999999999999:name"],
)  # fmt: skip
def test_invalid_stream_names_are_refused(text: str) -> None:
    with pytest.raises(InvalidValue):
        parse_stream(text)


@pytest.mark.parametrize(("text", "fix"), [("TAG:Image", "write 'image'"), ("tag:image", "write 'TAG'")])
def test_other_case_is_suggested(text: str, fix: str) -> None:
    with pytest.raises(InvalidValue) as raised:
        parse_stream(text)
    assert raised.value.suggestion == fix


@pytest.mark.parametrize("timestamp", [UNSET, MIN - 1, MAX + 1, DONE])
def test_packet_at_a_reserved_timestamp_is_refused(timestamp: int) -> None:
    with pytest.raises(TimestampMismatch, match='In stream "in", timestamp not specified or set to illegal value: Tim'):
        InputStream("in", Port("IN", 0)).push(Packet("a", timestamp))


def test_automatic_timestamps_ascend_when_the_clock_is_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([5_000_000, 1_000_000, 1_000_000, 9_000_000])
    monkeypatch.setattr(time, "time_ns", lambda: next(times))
    clock = AutomaticTimestamps()
    assert [clock.next() for _ in range(4)] == [5000, 5001, 5002, 9000]
