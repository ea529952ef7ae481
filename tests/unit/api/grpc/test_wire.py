from __future__ import annotations

from google.protobuf.wrappers_pb2 import BytesValue, UInt64Value
from hypothesis import given
from hypothesis import strategies as st

from ovmstrio.protocol.split_messages import delimited, encode_varint, write_varint


@given(st.integers(0, 2**64 - 1))
def test_numbers_are_written_as_protobuf_writes_them(number: int) -> None:
    """Behind a tag they are what Google's parser reads, remembered or not."""
    assert UInt64Value.FromString(b"\x08" + write_varint(number)).value == number
    assert encode_varint(number) == write_varint(number)


@given(st.binary(max_size=300))
def test_values_stand_behind_tag_and_size(data: bytes) -> None:
    """Both pieces together are a field."""
    head, value = delimited(b"\x0a", memoryview(data))
    assert BytesValue.FromString(head + bytes(value)).value == data
