"""Datatypes and bytes of tensors of the KServe protocol."""

from __future__ import annotations

import numpy as np
import pytest

from ovmstrio.core import errors
from ovmstrio.protocol.wire_tensors import datatype_of, from_raw, to_raw


def test_arrays_of_unknown_datatypes_are_refused() -> None:
    with pytest.raises(errors.InvalidRequest, match="complex128"):
        datatype_of(np.zeros(1, np.complex128))


def test_bf16_rounds_to_nearest() -> None:
    values = np.array([1.0, 1.00390625 * 1.0 + 0.003, -2.5, 3e38], np.float32)
    back = from_raw(to_raw(values, "BF16"), "BF16", (4,))
    assert np.abs(back / values - 1).max() <= 2**-8
