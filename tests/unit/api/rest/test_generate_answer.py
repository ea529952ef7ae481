"""Responses in the form of the generate extension."""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson
import pytest

from ovmstrio.api.kserve.rest.generate import error_event, event, generate_document
from ovmstrio.core.datatypes import BY_NAME
from ovmstrio.core.errors import GraphFailure, InvalidRequest
from ovmstrio.core.request import InferResponse
from ovmstrio.core.tensor import RawTensor, Tensor


def _value(tensor: Tensor | RawTensor) -> Any:
    written = event(InferResponse("m", "1", [tensor]))
    assert written.startswith(b"data: ")
    assert written.endswith(b"}\n\n")
    return orjson.loads(written[6:])["y"]


def test_keys_stand_in_order() -> None:
    """Model, version, id and parameters come before the outputs, the latter two only where there are any."""
    outputs: list[Tensor | RawTensor] = [RawTensor("y", "BYTES", (2,), b"hi")]
    full = generate_document(InferResponse("m", "3", outputs, "7", {"OVMS_MP_TIMESTAMP": 2**60}))
    assert list(full.items()) == [
        ("model_name", "m"),
        ("model_version", "3"),
        ("id", "7"),
        ("parameters", {"OVMS_MP_TIMESTAMP": 2**60}),
        ("y", "hi"),
    ]
    assert list(generate_document(InferResponse("m", "3", outputs))) == ["model_name", "model_version", "y"]


@pytest.mark.parametrize(
    ("datatype", "shape", "data", "value"),
    [
        ("BYTES", (3,), b"a\nb", "a\nb"),
        ("BYTES", (0,), b"", ""),
        ("BYTES", (2,), b"\x01\0\0\0a\x01\0\0\0b", ["a", "b"]),
        ("UINT8", (7,), "größe".encode(), "größe"),
        ("UINT8", (0,), b"", ""),
        ("UINT8", (2,), b"\xff\xfe", [255, 254]),
        ("UINT8", (3,), b"\x00\x01\x02", [0, 1, 2]),
        ("UINT8", (1, 2), b"ab", [97, 98]),
        ("INT64", (1,), b"\x05" + b"\0" * 7, 5),
        ("FP32", (1, 2), np.array([0.5, 2], "<f4").tobytes(), [0.5, 2.0]),
        ("BOOL", (1,), b"\x01", True),
    ],
)
def test_raw_outputs_are_values(datatype: str, shape: tuple[int, ...], data: bytes, value: Any) -> None:
    """Texts are texts, one element is a single value, and several are a flat list."""
    found = _value(RawTensor("y", datatype, shape, data))
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(("values", "expected"), [([1.5], 1.5), ([[1.5, float("nan")]], [1.5, "NaN"])])
def test_a_models_outputs_are_values(values: Any, expected: Any) -> None:
    """Models' tensors follow the same rule, with the texts for what is no number."""
    assert _value(Tensor("y", BY_NAME["FP32"], np.array(values, "<f4"))) == expected


def test_what_json_cannot_carry_is_refused() -> None:
    """A datatype of the user's own has no form here."""
    with pytest.raises(InvalidRequest, match="cannot be written as JSON"):
        _value(RawTensor("y", "words", (1,), b"a"))


def test_errors_are_events_of_their_own_type() -> None:
    """The error's text is what an error's answer would hold, and what nobody foresaw is not told."""
    assert error_event(GraphFailure("no\nluck")) == b'event: error\ndata: {"error":"no\\nluck"}\n\n'
    assert error_event(KeyError("a secret")).startswith(b'event: error\ndata: {"error":"internal error')


def _pieces(datatype: str, *data: bytes, shape: tuple[int, ...] | None = None) -> Any:
    outputs: list[Tensor | RawTensor] = [RawTensor("y", datatype, shape or (len(each),), each) for each in data]
    return orjson.loads(event(InferResponse("m", "1", outputs))[6:])["y"]


def test_pieces_of_text_are_joined_and_others_listed() -> None:
    """A letter may be cut between two pieces; numbers keep to their piece."""
    assert _pieces("UINT8", b"one ", b"two") == "one two"
    assert _pieces("UINT8", "ö".encode()[:1], "ö".encode()[1:]) == "ö"
    assert _pieces("UINT8", b"\x00\x01", b"\x02") == [[0, 1], 2]
    assert _pieces("INT64", *(bytes([n]) + b"\0" * 7 for n in (3, 4)), shape=(1,)) == [3, 4]
    assert _pieces("UINT8", b"a", b"\xff") == ["a", 255]
