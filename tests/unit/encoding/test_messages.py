from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ovmstrio.core import errors
from ovmstrio.encoding.messages import REQUEST, decode_request, name_in
from ovmstrio.encoding.raw_contents import datatype_of, from_raw, to_raw
from ovmstrio.encoding.status_errors import error_of_grpc, error_of_http
from ovmstrio.transport.statuses import ERROR_STATUSES


def _text(number: int, value: str) -> bytes:
    data = value.encode()
    return bytes([number << 3 | 2]) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    parts = []
    while value >= 0x80:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*parts, value])


OLDER = _text(1, "x") + _text(2, "1,2") + _text(3, "uci") + _text(4, "prediction")
NAMED = {"key": ["x"], "value": ["1,2"], "name": "uci", "method": "prediction"}


@pytest.mark.parametrize(
    ("data", "fields"),
    [
        (OLDER, NAMED),
        (OLDER + b"\x28" + _varint(10000) + _text(6, "::1"), {**NAMED, "logid": 10000, "clientip": "::1"}),
        (_text(3, "uci") + _text(6, "10.0.0.1"), {"name": "uci", "clientip": "10.0.0.1"}),
        (_text(3, "uci") + b"\x28\x07", {"name": "uci", "logid": 7}),
    ],
)
def test_the_older_layout_is_recognized_by_its_fields_or_name(data: bytes, fields: dict[str, Any]) -> None:
    assert decode_request(data) == REQUEST(**fields)


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (REQUEST(key=["x"], value=["1"], name="uci", method="m", logid=7).SerializeToString(), b"uci"),
        (REQUEST(name="uci", tensors=[{"name": "other"}]).SerializeToString(), b"uci"),
        (_text(3, "uci") + _text(4, "prediction") + b"\x28\x07", b"uci"),
        (_text(3, "uci") + _text(6, "10.0.0.1"), b"uci"),
        (_text(4, "one") + _text(4, "uci"), b"uci"),
        (_text(1, "x"), b""),
        (b"", b""),
        (b"\xff\xff\xff", b""),
    ],
)
def test_the_name_is_found_without_decoding(data: bytes, name: bytes) -> None:
    assert name_in(data) == name


def test_a_name_after_many_empty_fields_is_read() -> None:
    request = decode_request(_text(1, "") * 100_000 + _text(4, "uci"))
    assert (len(request.key), request.name) == (100_000, "uci")


def test_other_bytes_are_refused_with_their_number() -> None:
    with pytest.raises(ValueError, match="its 3 bytes are not"):
        decode_request(b"\xff\xff\xff")


@given(
    keys=st.lists(st.text(max_size=8), max_size=4),
    name=st.text(max_size=8),
    method=st.text(max_size=8),
    logid=st.integers(-(2**63), 2**63 - 1),
    clientip=st.text(max_size=8),
    numbers=st.lists(st.floats(width=32, allow_nan=False), max_size=4),
)
def test_the_newer_layout_is_decoded_unchanged(
    keys: list[str], name: str, method: str, logid: int, clientip: str, numbers: list[float]
) -> None:
    sent = REQUEST(key=keys, value=keys, name=name, method=method, logid=logid, clientip=clientip)
    sent.tensors.add(name="t", elem_type=1, float_data=numbers, shape=[len(numbers)])
    assert decode_request(sent.SerializeToString()) == sent


@given(st.binary(max_size=64))
def test_any_bytes_are_decoded_or_refused(data: bytes) -> None:
    try:
        decode_request(data)
    except ValueError as error:
        assert "bytes" in str(error)  # noqa: PT017 - either outcome is right


# Tensors and statuses of the KServe protocol


def test_arrays_of_unknown_datatypes_are_refused() -> None:
    with pytest.raises(errors.InvalidRequest, match="complex128"):
        datatype_of(np.zeros(1, np.complex128))


def test_bf16_rounds_to_nearest() -> None:
    values = np.array([1.0, 1.00390625 * 1.0 + 0.003, -2.5, 3e38], np.float32)
    back = from_raw(to_raw(values, "BF16"), "BF16", (4,))
    assert np.abs(back / values - 1).max() <= 2**-8


@pytest.mark.parametrize("error", [cls for cls in ERROR_STATUSES if cls is not errors.ConfigError])
def test_statuses_and_errors_are_inverse(error: type[errors.ServerError]) -> None:
    pair = ERROR_STATUSES[error]
    assert ERROR_STATUSES[type(error_of_grpc(pair.grpc.name, "text"))].grpc is pair.grpc
    assert ERROR_STATUSES[type(error_of_http(pair.http, "text"))].http == pair.http


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("Model with requested version is not loaded yet", errors.VersionLoading),
        ("Model with requested version is retired", errors.VersionRetired),
    ],
)
def test_loading_and_retired_versions_are_distinguished(text: str, error: type[errors.ServerError]) -> None:
    pair = ERROR_STATUSES[error]
    assert type(error_of_grpc(pair.grpc.name, text)) is error
    assert type(error_of_http(pair.http, f"{text}: its last load failed")) is error


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"retry-after": "30"}, 30),
        ({"grpc-retry-pushback-ms": "2500", "retry-after": "3"}, 2.5),
        ({"retry-after": "Wed, 21 Oct 2026 07:28:00 GMT"}, 1),
        ({}, 1),
    ],
)
def test_the_error_of_an_overloaded_server_has_its_time_to_wait(headers: dict[str, str], seconds: float) -> None:
    for error in (error_of_grpc("RESOURCE_EXHAUSTED", "full", headers), error_of_http(429, "full", headers)):
        assert isinstance(error, errors.Overloaded)
        assert error.retry_after_seconds == seconds


@pytest.mark.parametrize("raw", [b"\x05\0\0\0ab", b"\x05\0"])
def test_truncated_bytes_are_refused(raw: bytes) -> None:
    with pytest.raises(ValueError, match="element exceeds the contents"):
        from_raw(raw, "BYTES", (1,))


def test_nan_stays_nan_in_bf16() -> None:
    nans = np.array([0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001], np.uint32).view(np.float32)
    assert np.isnan(from_raw(to_raw(nans, "BF16"), "BF16", (4,))).all()
