"""Nested lists taken apart, against numpy."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from ovmstrio.api.tensorflow.rest.predict_request import MAX_RANK, unnest
from ovmstrio.core.errors import InvalidRequest


@given(arrays.arrays(np.int32, arrays.array_shapes(min_dims=0, max_dims=5, min_side=0, max_side=4)))
def test_shape_and_elements_are_numpys(array: np.ndarray[Any, Any]) -> None:
    """Lists without elements end the shape where nothing lies in them."""
    nested = unnest(array.tolist())
    assert nested is not None
    empty = array.shape.index(0) + 1 if 0 in array.shape else array.ndim
    assert nested.shape == array.shape[:empty]
    assert nested.elements == array.reshape(-1).tolist()
    assert nested.kinds == ({int} if array.size else set())


_VALUES = st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists)


@given(_VALUES)
def test_anything_is_taken_apart_or_ragged(value: Any) -> None:
    """What is taken apart has as many elements as its shape says, and none that is a list; numpy refuses the rest."""
    nested = unnest(value)
    if nested is None:
        with pytest.raises(ValueError, match="inhomogeneous"):
            np.array(_numbers(value))
        return
    assert len(nested.elements) == np.prod(nested.shape, dtype=int)
    assert nested.kinds == {type(element) for element in nested.elements}
    assert list not in nested.kinds
    assert np.array(_numbers(value)).shape == nested.shape


def _numbers(value: Any) -> Any:
    """Put 1 for every element."""
    return [_numbers(each) for each in value] if isinstance(value, list) else 1


@pytest.mark.parametrize("value", [[1, [2]], [[1], 2], [[1], [2, 3]], [[], [1]], [[[1]], [1]], [[[1], [2]], [[3]]]])
def test_ragged_lists_are_no_tensor(value: Any) -> None:
    """Lists of one level have one length, and nothing beside them."""
    assert unnest(value) is None


def test_lists_lie_in_each_other_up_to_a_limit() -> None:
    """One more is refused before it costs anything."""
    deepest = json.loads("[" * MAX_RANK + "1" + "]" * MAX_RANK)
    nested = unnest(deepest)
    assert nested is not None
    assert nested.shape == (1,) * MAX_RANK
    with pytest.raises(InvalidRequest, match=r"^JSON nesting depth exceeded"):
        unnest([deepest])
