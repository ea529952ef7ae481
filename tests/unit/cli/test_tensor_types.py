"""Values keep their worth on the way to an input, or are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ovms_cli.tensor_types import to_type
from ovmstrio.client import TensorInfo
from ovmstrio.core.errors import InvalidRequest

INTEGERS = ["INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64"]


def _convert(value: Any, datatype: str) -> Any:
    return to_type(value, TensorInfo("x", datatype, (-1,)), lambda _: None)


@given(st.data(), st.sampled_from([*INTEGERS, "BOOL"]), st.sampled_from([*INTEGERS, "FP16", "FP32", "FP64", "BOOL"]))
def test_integers_are_exact_or_refused(data: st.DataObject, source: str, target: str) -> None:
    """No value wraps around, loses its sign or is rounded."""
    kind = "bool" if source == "BOOL" else source.lower()
    bounds = (0, 1) if source == "BOOL" else (int(np.iinfo(kind).min), int(np.iinfo(kind).max))
    value = data.draw(st.integers(*bounds))
    try:
        converted = _convert(np.array([value], kind), target)
    except InvalidRequest:
        return
    assert converted[0].item() == value


@given(st.lists(st.integers(-(2**70), 2**70), max_size=5), st.sampled_from(INTEGERS))
def test_integers_of_json_are_exact_or_refused(values: list[int], target: str) -> None:
    """A list of integers arrives as it is, or not, and arrives whenever the type can hold it."""
    bounds = np.iinfo(target.lower())
    fits = all(int(bounds.min) <= value <= int(bounds.max) for value in values)
    try:
        converted = _convert(values, target)
    except InvalidRequest:
        assert not fits
        return
    assert converted.tolist() == values


@pytest.mark.parametrize(
    ("value", "datatype", "text"),
    [
        (np.array([-1], np.int8), "UINT8", "int8, whose values do not survive"),
        (np.array([255], np.uint8), "INT8", "do not survive"),
        (np.array([2**24 + 1]), "FP32", "do not survive"),
        (np.array([1e300]), "FP32", "do not survive"),
        (np.array([257]), "BF16", "do not survive"),
        ([257], "BF16", "do not survive"),
        (np.array([3.4e38]), "BF16", "do not survive"),
        (np.array([1j]), "FP32", "got complex128"),
        (np.array([1, 2]), "BYTES", "values of type int"),
        ([1.5], "INT32", "do not survive"),
        (np.array([1.5], object), "INT32", "do not survive"),
        (["no"], "BOOL", "values of type str"),
        ([None], "FP32", "values of type NoneType"),
        ([[1], [2, 3]], "FP32", "differing lengths"),
        ([1.5, 10**400], "FP64", "too large"),
        ([10**30], "INT64", "fits no integer type"),
        ([["a"], ["b", "c"]], "BYTES", "values of type list"),
        (["\ud800"], "BYTES", "no UTF-8"),
    ],
)
def test_what_would_change_is_refused(value: Any, datatype: str, text: str) -> None:
    """The message names the input, what it takes and what came."""
    with pytest.raises(InvalidRequest, match=f'input "x": expected {datatype}') as raised:
        _convert(value, datatype)
    assert text in str(raised.value)


def test_fractions_go_into_narrower_types() -> None:
    """They are as near as the type can say; whole numbers that it can say are exact."""
    for value in (np.array([0.1]), [0.1], np.array([256]), np.array([0.1, 200.3], np.float16)):
        assert _convert(value, "BF16").dtype == np.float32


def test_texts_stand_for_what_json_has_no_numbers_for() -> None:
    """They are the ones that the server writes."""
    converted = _convert([1, "NaN", "-Infinity"], "FP16")
    np.testing.assert_array_equal(converted, np.array([1, np.nan, -np.inf], np.float16))


def test_lists_deeper_than_any_array_are_refused() -> None:
    """Depth is no way to a traceback."""
    value: Any = 1
    for _ in range(65):
        value = [value]
    with pytest.raises(InvalidRequest):
        _convert(value, "FP32")
