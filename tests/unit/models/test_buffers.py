"""The bytes of arrays as they go over the wire."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ovmstrio.core.datatypes import BY_NAME
from ovmstrio.runtimes.models.buffers import buffer_of

NUMBERS = [datatype for datatype in BY_NAME.values() if datatype.name != "BYTES"]


@pytest.mark.parametrize("datatype", NUMBERS, ids=lambda each: each.name)
@pytest.mark.parametrize("shape", [(), (1,), (2, 3), (0, 3), (2, 0)], ids=str)
def test_a_buffer_is_the_elements_one_behind_the_other(datatype: Any, shape: tuple[int, ...]) -> None:
    """Its length is its size in bytes, whatever the element type, also of scalars and of nothing."""
    array = np.arange(int(np.prod(shape))).astype(datatype.numpy).reshape(shape)
    buffer = buffer_of(array)
    assert bytes(buffer) == array.tobytes()
    assert len(buffer) == array.nbytes


@pytest.mark.parametrize("is_writeable", [True, False])
def test_what_is_packed_is_not_copied(is_writeable: bool) -> None:
    """The buffer is a view, which may be written through if the array may."""
    array = np.zeros((2, 3), np.float32)
    array.flags.writeable = is_writeable
    view = np.frombuffer(buffer_of(array), np.float32)
    assert np.shares_memory(array, view)
    assert view.flags.writeable is is_writeable


def test_what_is_not_packed_is_copied_in_the_order_of_rows() -> None:
    """Columns become rows."""
    array = np.arange(6, dtype=np.int16).reshape(2, 3)
    assert bytes(buffer_of(array.T)) == array.T.copy().tobytes()
    assert bytes(buffer_of(array[:, ::2])) == np.array([[0, 2], [3, 5]], np.int16).tobytes()
