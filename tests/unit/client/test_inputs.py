"""Arguments of clients that cannot be sent, or that would arrive as other values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ovmstrio.client import Client
from ovmstrio.client.api import to_raw_tensor
from ovmstrio.core.errors import InvalidRequest
from ovmstrio.core.tensor import to_bf16


@pytest.mark.parametrize(
    ("value", "datatype", "text"),
    [
        (np.array([1, 2], object), None, "expected str or bytes for BYTES, got int"),
        (np.array(["a", None], object), None, "expected str or bytes for BYTES, got NoneType"),
        (np.array([1, 2]), "BYTES", "expected str or bytes for BYTES, got int64"),
        ([2**70], None, "expected str or bytes for BYTES, got int"),
        ({"a": 1}, None, "expected str or bytes for BYTES, got dict"),
        ([300, -1], "INT8", r"300 is out of range of INT8 \[-128, 127\]"),
        (np.array([200], np.uint8), "INT8", r"200 is out of range of INT8"),
        ([1, -(2**40)], "INT32", "-1099511627776 is out of range of INT32"),
        ([1.5], "INT64", "an array of float64 cannot be sent as INT64"),
        (["1"], "BF16", "an array of <U1 cannot be sent as BF16"),
        ([[1], [2, 3]], None, "setting an array element with a sequence"),
        ([1], "fp32", "expected a datatype of BOOL, .*, got fp32"),
        (np.array([1j]), None, "dtype complex128 has no KServe datatype"),
    ],
)
def test_arrays_that_would_arrive_as_other_values_are_refused(value: Any, datatype: str | None, text: str) -> None:
    with pytest.raises(InvalidRequest, match=f"input 'x': {text}"):
        to_raw_tensor("x", value, datatype)


@pytest.mark.parametrize(
    "numbers", [[1, 0, 3], np.array([1, 0, 3], np.uint8), [1.0, 0.0, 3.0], np.array([1, 0, 3], np.float16)]
)
def test_numbers_of_every_type_become_bf16(numbers: Any) -> None:
    sent = to_raw_tensor("x", numbers, "BF16").data
    assert bytes(sent) == to_bf16(np.array([1, 0, 3], np.float32)).tobytes()


def test_bits_of_bf16_are_sent_unchanged() -> None:
    assert bytes(to_raw_tensor("x", np.array([0x3F80], np.uint16), "BF16").data) == b"\x80\x3f"


@pytest.mark.parametrize("url", ["grpc://127.0.0.1:9", "http://127.0.0.1:9"])
@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.load("m", {"nireq": object()}),
        lambda client: client.metadata("\ud800"),
        lambda client: client.infer("m", {"x": [1]}, request_id="\ud800"),
        lambda client: client.infer("m", {"x": [[1], [2, 3]]}),
    ],
    ids=["config", "name", "id", "array"],
)
def test_arguments_that_cannot_be_encoded_are_refused(url: str, call: Callable[[Client], object]) -> None:
    with Client(url) as client, pytest.raises(InvalidRequest):
        call(client)


@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.chat("m", [], temperature=np.float32(0.5)),
        lambda client: list(client.chat_stream("m", [{"role": "user", "content": "\ud800"}])),
        lambda client: client.profile(1, 1, [object()]),
    ],
    ids=["option", "text", "models"],
)
def test_bodies_that_are_no_json_are_refused(call: Callable[[Client], object]) -> None:
    with Client("http://127.0.0.1:9") as client, pytest.raises(InvalidRequest, match="cannot be written as JSON"):
        call(client)
