"""Datatypes and bytes of tensors of the KServe protocol."""

from __future__ import annotations

import numpy as np
import pytest

from ovmstrio.core import errors
from ovmstrio.protocol.wire_tensors import datatype_of, from_raw, to_raw


def test_an_array_without_a_datatype_is_refused() -> None:
    """The protocol has no complex numbers."""
    with pytest.raises(errors.InvalidRequest, match="complex128"):
        datatype_of(np.zeros(1, np.complex128))


def test_bf16_rounds_to_the_nearest_value() -> None:
    """Truncation would double the error."""
    values = np.array([1.0, 1.00390625 * 1.0 + 0.003, -2.5, 3e38], np.float32)
    back = from_raw(to_raw(values, "BF16"), "BF16", (4,))
    assert np.abs(back / values - 1).max() <= 2**-8
