from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ovmstrio.openvino.paddle_program import fields, read_program
from tests.support.paddle_files import write_field


@given(st.integers(1, 1000), st.lists(st.binary(max_size=300)), st.lists(st.integers(0, 2**64 - 1)))
def test_fields_are_read_as_written(number: int, contents: list[bytes], numbers: list[int]) -> None:
    data = b"".join(write_field(number, content) for content in contents)
    data += b"".join(write_field(number + 1, value) for value in numbers)
    assert list(fields(data, number)) == contents
    assert list(fields(data, number + 1)) == []


@given(st.binary())
def test_invalid_programs_raise_value_error(data: bytes) -> None:
    try:
        read_program(data)
    except ValueError:
        return
    assert read_program(data).content == data


@pytest.mark.parametrize(("version", "kept"), [(1_007_000, False), (0, False), (2_000_000, True)])
def test_version_is_removed_from_old_programs_only(version: int, *, kept: bool) -> None:
    block = write_field(1, write_field(4, write_field(3, "mul")))
    other = write_field(5, b"more")
    content = block + write_field(4, write_field(1, version)) + other
    program = read_program(content)
    assert (program.version, program.operations) == (version, frozenset({"mul"}))
    assert program.readable() == (content if kept else block + other)
