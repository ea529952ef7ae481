"""Arrays of numbers from JSON text, against NumPy."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ovmstrio.util import number_arrays
from ovmstrio.util.number_arrays import NumberArray, NumberKind, read_numbers
from tests.support.examples import examples

DTYPES: dict[NumberKind, Any] = {"d": np.float64, "i": np.int64, "u": np.uint64}


def _array_of(text: str) -> NumberArray:
    return NumberArray(memoryview(text.encode()))


@pytest.mark.parametrize("kind", DTYPES)
@settings(max_examples=examples(60), deadline=None)
@given(data=st.data(), size=st.sampled_from([64, 200]), indent=st.sampled_from([None, 1]))
def test_numbers_and_shape_are_those_of_numpy(
    kind: NumberKind, data: st.DataObject, size: int, indent: int | None
) -> None:
    """Of lists of any rank, over several windows of text."""
    elements = {"allow_nan": False, "allow_infinity": False} if kind == "d" else None
    shapes = hnp.array_shapes(min_dims=1, max_dims=4, max_side=6)
    expected = data.draw(hnp.arrays(DTYPES[kind], shapes, elements=elements))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(number_arrays, "SLICE_BYTES", size)
        array = _array_of(json.dumps(expected.tolist(), indent=indent))
        numbers, shape = array.numbers(kind), array.shape()
        several = read_numbers([array, _array_of(json.dumps(expected.tolist()))], kind)
    assert numbers is not None
    assert several is not None
    assert shape == expected.shape
    assert np.array_equal(numbers, expected.ravel())
    assert np.array_equal(several, np.stack([expected, expected]))


@pytest.mark.parametrize("text", ["[[1],[2,3]]", "[1,[2]]", "[[1],2]", "[[[1]],[2]]", "[[1,2],[3]]", "[[1],[[2]]]"])
def test_lists_that_are_no_array_have_no_shape(text: str) -> None:
    """Lists of one level differ in length or rank."""
    shape = _array_of(text).shape()
    assert shape is None
    assert read_numbers(_array_of(text), "d") is None


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("[1.5]", "i"),
        ("[-1]", "u"),
        ("[18446744073709551615]", "i"),
        ("[true]", "d"),
        ("[null]", "d"),
        ("[1,,2]", "d"),
        ("[1,]", "d"),
        ("[]", "d"),
        ("[01]", "d"),
        (f"[{'1' * 1_000_000}]", "d"),
    ],
)
def test_text_that_is_no_list_of_numbers_of_a_kind_is_refused(text: str, kind: NumberKind) -> None:
    """The caller reads such a list as any other value."""
    array = _array_of(text)
    assert array.numbers(kind) is None
    assert not array.is_checked
