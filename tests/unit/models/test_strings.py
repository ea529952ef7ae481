from __future__ import annotations

import struct

import numpy as np
import pytest

from ovmstrio.core.datatypes import BY_NAME, BYTES
from ovmstrio.core.errors import InvalidRequest
from ovmstrio.core.request import Buffer, InferInput, InferRequest
from ovmstrio.core.tensor import ANY_SIZE, Dim, Tensor, TensorSpec
from ovmstrio.runtimes.models import strings
from ovmstrio.runtimes.models.strings import strings_of_rows
from tests.support.servables import contents_request
from tests.support.validation import validate

NATIVE = [TensorSpec("s", BYTES, (ANY_SIZE,))]
MATRIX = [TensorSpec("s", BY_NAME["UINT8"], (ANY_SIZE, ANY_SIZE))]


def framed(*elements: bytes) -> bytes:
    """Put each element behind its length."""
    return b"".join(struct.pack("<I", len(element)) + element for element in elements)


def raw(shape: tuple[int, ...], buffer: Buffer) -> InferRequest:
    """Make a request of one raw BYTES input."""
    return InferRequest("m", inputs=[InferInput("s", "BYTES", shape)], raw_inputs=[buffer])


def refusal(specs: list[TensorSpec], request: InferRequest) -> str:
    """Give the text with which a request is refused."""
    with pytest.raises(InvalidRequest) as caught:
        validate(request, specs)
    return caught.value.message


@pytest.mark.parametrize("shape", [(4,), (2, 2), (1, 4, 1)])
def test_native_strings_from_raw_and_contents(shape: tuple[int, ...]) -> None:
    """Elements keep their bytes and the tensor its shape, whichever way they come."""
    elements = [b"a", b"", b"\xff\x00\x00", b"long" * 100]
    specs = [TensorSpec("s", BYTES, (ANY_SIZE,) * len(shape))]
    for request in (
        raw(shape, framed(*elements)),
        raw(shape, memoryview(bytearray(framed(*elements)))),
        contents_request("s", "BYTES", shape, elements),
    ):
        array = validate(request, specs)["s"]
        assert array.shape == shape
        assert array.ravel().tolist() == elements


def test_text_is_encoded() -> None:
    """Strings out of JSON become UTF-8."""
    assert validate(contents_request("s", "BYTES", (1,), ["é"]), NATIVE)["s"].tolist() == ["é".encode()]


@pytest.mark.parametrize(
    ("buffer", "text"),
    [
        (b"\x01", "1 bytes are left where a length"),
        (framed(b"ab")[:-1], "an element of 2 bytes is announced and 1 are left"),
        (framed(b"ab") + b"xyz", "3 bytes are left"),
        (b"\xff\xff\xff\xff", "an element of 4294967295 bytes is announced and 0 are left"),
    ],
)
@pytest.mark.parametrize("specs", [NATIVE, MATRIX])
def test_broken_framing_is_refused(buffer: bytes, text: str, specs: list[TensorSpec]) -> None:
    """A buffer that is not length, bytes, length, bytes, ... is refused with what is wrong in it."""
    message = refusal(specs, raw((1,), buffer))
    assert message.startswith("Inputs inside buffer do")
    assert text in message


def test_native_strings_must_fit_the_shape() -> None:
    """Rank, sizes and the number of strings are checked, in this order."""
    two = [TensorSpec("s", BYTES, (Dim.fixed(2),))]
    assert refusal(two, raw((1, 2), b"")).startswith("Invalid number of shape dimensions")
    assert refusal(two, raw((3,), b"")).startswith("Invalid input shape - Expected: (2); Actual: (3); input name: s")
    assert "Expected: 2 strings; Actual: 1 strings" in refusal(two, raw((2,), framed(b"a")))
    assert refusal(two, raw((-2,), b"")).startswith("Invalid input shape")


def test_too_many_or_too_long_strings_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of strings and the memory that they take as rows are bounded."""
    assert refusal(NATIVE, raw((2**25 + 1,), b"")).startswith("String max size exceeded")
    monkeypatch.setattr(strings, "MAX_BYTES", 100)
    for specs in (NATIVE, MATRIX):
        assert refusal(specs, raw((2,), framed(b"a", b"b" * 60))).startswith("String max size exceeded")


def test_matrix_of_bytes_is_padded_with_zeros() -> None:
    """Strings for a two-dimensional UINT8 input become rows of the longest string's length and one more."""
    for request in (raw((2,), framed(b"ab", b"cde")), contents_request("s", "BYTES", (2,), [b"ab", b"cde"])):
        assert validate(request, MATRIX)["s"].tolist() == [[97, 98, 0, 0], [99, 100, 101, 0]]


def test_matrix_takes_bytes_as_numbers_too() -> None:
    """The same input sent as UINT8 is numbers."""
    request = InferRequest("m", inputs=[InferInput("s", "UINT8", (1, 2))], raw_inputs=[b"\x01\x02"])
    assert validate(request, MATRIX)["s"].tolist() == [[1, 2]]


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        (raw((1, 1), framed(b"a")), r"Invalid number of shape dimensions - Expected: (-1); Actual: (1,1)"),
        (raw((2,), framed(b"a")), "Invalid input batch size - Expected: 2; Actual: 1 strings"),
        (raw((0,), b""), "Invalid input batch size - Expected: at least 1; Actual: no strings"),
        (raw((3,), framed(b"a", b"b", b"c")), "Invalid input batch size - Expected: [1~2]; Actual: 3"),
        (raw((1,), framed(b"abcd")), "Invalid input shape - Expected: ([1~2],4); Actual: (1,5)"),
    ],
)
def test_matrix_refusals(request_: InferRequest, text: str) -> None:
    """Rank, number of strings, batch and width are checked, in this order."""
    specs = [TensorSpec("s", BY_NAME["UINT8"], (Dim(1, 2), Dim.fixed(4)))]
    assert refusal(specs, request_).startswith(text)


def test_outputs_called_string_become_strings() -> None:
    """A UINT8 matrix whose name ends in _string is given as strings, cut at the first NUL; others stay."""
    rows = np.frombuffer(b"ab\0\0cd\0eabcd", np.uint8).reshape(3, 4)
    given = strings_of_rows(Tensor("label_string", BY_NAME["UINT8"], rows))
    assert given.datatype is BYTES
    assert given.array.tolist() == [b"ab", b"cd", b"abcd"]
    for kept in (Tensor("label", BY_NAME["UINT8"], rows), Tensor("x_string", BY_NAME["INT8"], rows.view(np.int8))):
        assert strings_of_rows(kept) is kept
