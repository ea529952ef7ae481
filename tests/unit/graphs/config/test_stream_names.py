from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ovmstrio.runtimes.graphs.config.graph_config import Port
from ovmstrio.runtimes.graphs.config.stream_refs import InvalidName, is_stream_name, parse_stream, parse_tag_index

NAMES = st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True)
TAGS = st.from_regex(r"[A-Z_][A-Z0-9_]{0,8}", fullmatch=True)
INDEXES = st.integers(0, 10_000)


@given(NAMES)
def test_a_name_alone_has_no_tag(name: str) -> None:
    """The index is left to whoever counts the untagged streams."""
    assert parse_stream(name) == (None, 0, name)
    assert is_stream_name(name)


@given(TAGS, NAMES)
def test_a_tag_without_index_has_index_0(tag: str, name: str) -> None:
    """TAG:name is TAG:0:name."""
    assert parse_stream(f"{tag}:{name}") == parse_stream(f"{tag}:0:{name}") == (tag, 0, name)


@given(TAGS, INDEXES, NAMES)
def test_all_three_parts_are_kept(tag: str, index: int, name: str) -> None:
    """TAG:index:name gives what was written, and the port reads back as a tag_index."""
    assert parse_stream(f"{tag}:{index}:{name}") == (tag, index, name)
    assert parse_tag_index(f"{tag}:{index}") == Port(tag, index)
    assert parse_tag_index(str(Port(tag, index))) == Port(tag, index)


@given(st.text(max_size=20))
def test_any_text_is_read_or_refused(text: str) -> None:
    """What is read can be written again; nothing else than InvalidName is raised."""
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
def test_what_is_no_stream_is_refused(text: str) -> None:
    """Upper and lower case, indexes and the number of parts are all looked at."""
    with pytest.raises(InvalidName):
        parse_stream(text)


@pytest.mark.parametrize(
    ("text", "port"), [("TAG", ("TAG", 0)), ("TAG:2", ("TAG", 2)), ("", ("", 0)), (":1", ("", 1)), (":0", ("", 0))]
)
def test_ports_have_short_forms(text: str, port: tuple[str, int]) -> None:
    """Tag and index may both be left out."""
    assert parse_tag_index(text) == port


@pytest.mark.parametrize("text", ["tag", "TAG:", "TAG:x", "TAG:1:2", "TAG:01"])
def test_what_is_no_port_is_refused(text: str) -> None:
    """An index is a number without leading zeros."""
    with pytest.raises(InvalidName):
        parse_tag_index(text)


def test_the_other_case_is_suggested() -> None:
    """A name in upper case and a tag in lower case say what to write."""
    with pytest.raises(InvalidName) as name:
        parse_stream("TAG:Image")
    with pytest.raises(InvalidName) as tag:
        parse_stream("tag:image")
    assert (name.value.fix, tag.value.fix) == ("write 'image'", "write 'TAG'")
