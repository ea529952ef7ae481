from __future__ import annotations

import numpy as np
import pytest

from ovmstrio.core import errors
from ovmstrio.protocol.status_errors import error_of_grpc, error_of_http
from ovmstrio.protocol.wire_tensors import datatype_of, from_raw, to_raw
from ovmstrio.wire.statuses import STATUS_OF


def test_arrays_of_unknown_datatypes_are_refused() -> None:
    with pytest.raises(errors.InvalidRequest, match="complex128"):
        datatype_of(np.zeros(1, np.complex128))


def test_bf16_rounds_to_nearest() -> None:
    values = np.array([1.0, 1.00390625 * 1.0 + 0.003, -2.5, 3e38], np.float32)
    back = from_raw(to_raw(values, "BF16"), "BF16", (4,))
    assert np.abs(back / values - 1).max() <= 2**-8


@pytest.mark.parametrize("error", [cls for cls in STATUS_OF if cls is not errors.ConfigError])
def test_statuses_and_errors_are_inverse(error: type[errors.ServerError]) -> None:
    pair = STATUS_OF[error]
    assert STATUS_OF[type(error_of_grpc(pair.grpc.name, "text"))].grpc is pair.grpc
    assert STATUS_OF[type(error_of_http(pair.http, "text"))].http == pair.http


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("Model with requested version is not loaded yet", errors.VersionLoading),
        ("Model with requested version is retired", errors.VersionRetired),
    ],
)
def test_loading_and_retired_versions_are_distinguished(text: str, error: type[errors.ServerError]) -> None:
    pair = STATUS_OF[error]
    assert type(error_of_grpc(pair.grpc.name, text)) is error
    assert type(error_of_http(pair.http, f"{text}: its last load failed")) is error


@pytest.mark.parametrize("raw", [b"\x05\0\0\0ab", b"\x05\0"])
def test_truncated_bytes_are_refused(raw: bytes) -> None:
    with pytest.raises(ValueError, match="end within an element"):
        from_raw(raw, "BYTES", (1,))


def test_nan_stays_nan_in_bf16() -> None:
    nans = np.array([0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001], np.uint32).view(np.float32)
    assert np.isnan(from_raw(to_raw(nans, "BF16"), "BF16", (4,))).all()
