from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ovmstrio.api.kserve.grpc.request_decoding import read_elements
from ovmstrio.protocol.descriptors import message_class

FIELDS: list[tuple[str, str, bool, st.SearchStrategy[Any]]] = [
    ("float_val", "<f4", True, st.floats(width=32, allow_nan=False)),
    ("double_val", "<f8", True, st.floats(allow_nan=False)),
    ("bool_val", "?", True, st.booleans()),
    ("int_val", "<i4", False, st.integers(-(2**31), 2**31 - 1)),
    ("uint64_val", "<u8", False, st.integers(0, 2**64 - 1)),
]


@pytest.mark.parametrize(("field", "dtype", "packed", "values"), FIELDS, ids=[row[0] for row in FIELDS])
@pytest.mark.parametrize("copies", [1, 50])
@given(data=st.data())
def test_elements_are_those_of_the_field(
    data: st.DataObject, copies: int, field: str, dtype: str, packed: bool, values: st.SearchStrategy[Any]
) -> None:
    """Few come as a list, many as an array, and neither other fields nor unknown ones get in the way."""
    elements = data.draw(st.lists(values, min_size=2, max_size=5)) * copies
    message = message_class("tensorflow.TensorProto")(version_number=3, tensor_content=b"12", **{field: elements})
    message.MergeFromString(b"\xba\x3e\x01x")
    found = read_elements(message, field, np.dtype(dtype), packed=packed)
    assert isinstance(found, list) is (len(elements) <= 64)
    assert (found if isinstance(found, list) else np.asarray(found).tolist()) == elements
