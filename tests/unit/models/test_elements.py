from __future__ import annotations

import io
import re
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from ovmstrio.core.datatypes import BY_NAME, BYTES
from ovmstrio.core.errors import InvalidRequest
from ovmstrio.core.request import Buffer, InferInput, InferRequest
from ovmstrio.core.tensor import ANY_SIZE, Dim, Tensor, TensorSpec
from ovmstrio.runtimes.models import image_files, strings
from ovmstrio.runtimes.models.buffers import buffer_of
from ovmstrio.runtimes.models.strings import strings_of_rows
from tests.support.servables import contents_request
from tests.support.validation import validate

MISSING = "Functionality not implemented"
CHANNELS = "Invalid number of channels in binary input"
RGB = np.arange(24, dtype=np.uint8).reshape(2, 4, 3) * 10


def encoded(pixels: np.ndarray[Any, Any], kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind)
    return buffer.getvalue()


def spec(*shape: int | Dim, datatype: str = "UINT8", layout: str = "NHWC") -> TensorSpec:
    dims = tuple(dim if isinstance(dim, Dim) else ANY_SIZE if dim == -1 else Dim.fixed(dim) for dim in shape)
    return TensorSpec("image", BY_NAME[datatype], dims, 0, layout)


def send(*files: bytes, shape: tuple[int, ...] | None = None) -> InferRequest:
    return contents_request("image", "BYTES", (len(files),) if shape is None else shape, list(files))


def pixels_of(tensor: TensorSpec, *files: bytes) -> np.ndarray[Any, Any]:
    return validate(send(*files), [tensor])["image"]


def refusal(specs: list[TensorSpec], request: InferRequest) -> str:
    with pytest.raises(InvalidRequest) as caught:
        validate(request, specs)
    return caught.value.message


@pytest.mark.parametrize("datatype", ["FP32", "FP64", "FP16", "INT16", "UINT8", "INT8", "UINT16", "INT32"])
@pytest.mark.parametrize("layout", ["NHWC", "?HWC", "", "N...", "...", "N...C"])
def test_pixels_are_bgr_and_cast_without_scaling(datatype: str, layout: str) -> None:
    array = pixels_of(spec(1, 2, 4, 3, datatype=datatype, layout=layout), encoded(RGB))
    np.testing.assert_array_equal(array[0], RGB[..., ::-1].astype(BY_NAME[datatype].numpy))
    assert array.flags.c_contiguous


def test_images_of_any_channels_and_depth_make_a_batch() -> None:
    rgba = np.concatenate([RGB, np.full((2, 4, 1), 7, np.uint8)], axis=2)
    np.testing.assert_array_equal(pixels_of(spec(1, 2, 4, 4), encoded(rgba))[0], rgba[..., [2, 1, 0, 3]])
    np.testing.assert_array_equal(pixels_of(spec(1, 2, 4, 1), encoded(RGB[..., 0]))[0], RGB[..., :1])
    deep = np.array([[0, 1000], [40000, 65535]], np.uint16)
    np.testing.assert_array_equal(pixels_of(spec(1, 2, 2, 1, datatype="UINT16"), encoded(deep))[0, ..., 0], deep)
    batch = pixels_of(spec(-1, 2, 4, 3), encoded(RGB), encoded(RGB[::-1]))
    np.testing.assert_array_equal(batch, np.stack([RGB, RGB[::-1]])[..., ::-1])


@pytest.mark.parametrize(
    ("height", "width", "expected"),
    [
        (6, 8, (6, 8)),
        (Dim(3, 9), Dim(1, 3), (3, 3)),
        (Dim(1, 9), Dim(1, 9), (2, 4)),
        (Dim(3, -1), -1, (3, 4)),
        (-1, -1, (2, 4)),
    ],
)
def test_images_are_resized_to_fixed_sizes_and_to_the_bounds_of_ranges(
    height: int | Dim, width: int | Dim, expected: tuple[int, int]
) -> None:
    assert pixels_of(spec(1, height, width, 3), encoded(RGB)).shape == (1, *expected, 3)


def test_resizing_is_bilinear() -> None:
    edge = np.array([[[0, 0, 0], [200, 200, 200]]], np.uint8)
    assert pixels_of(spec(1, 1, 4, 3), encoded(edge))[0, 0, :, 0].tolist() == [0, 50, 150, 200]


@pytest.mark.parametrize("kind", ["JPEG", "BMP", "WEBP", "GIF", "TIFF"])
def test_usual_formats_are_decoded(kind: str) -> None:
    array = pixels_of(spec(1, 16, 16, 3), encoded(np.full((16, 16, 3), 120, np.uint8), kind))
    assert abs(int(array.mean()) - 120) <= 2


@pytest.mark.parametrize(
    ("tensor", "request_", "text"),
    [
        (
            spec(1, 2, 4, 3),
            send(b"junk"),
            "Image parsing failed - its 4 bytes are no image of a known format (JPEG, PNG,",
        ),
        (spec(1, 2, 4, 3), send(encoded(RGB)[:45]), "Image parsing failed"),
        (spec(1, 2, 4, 3), send(b""), "Bytes contents empty"),
        (spec(1, 2, 4, 3), send(encoded(RGB[..., 0])), f"{CHANNELS} - Expected: 3; Actual: 1"),
        (spec(1, 2, 4, 1), send(encoded(RGB)), f"{CHANNELS} - Expected: 1; Actual: 3"),
        (spec(1, 2, 4, 3), send(encoded(RGB), encoded(RGB)), "Invalid input batch size - Expected: 1; Actual: 2"),
        (spec(1, 2, 4, 3), send(encoded(RGB), shape=(2,)), "Invalid input batch size - Expected: 2; Actual: 1 images"),
        (spec(-1, 2, 4, 3), send(), "Invalid input batch size - Expected: -1; Actual: 0"),
        (spec(1, 2, 4, 3), send(encoded(RGB), shape=(1, 1)), "Invalid number of shape dimensions - Expected: (-1)"),
        (spec(1, 3, 2, 4, layout="NCHW"), send(encoded(RGB)), "Unsupported layout for encoded images"),
        (spec(2, -1, -1, 3), send(encoded(RGB), encoded(RGB[:1])), "Binary images resolution mismatch"),
        (spec(1, 2, 4, 3, datatype="INT64"), send(encoded(RGB)), f"{MISSING} - encoded images for INT64"),
    ],
)
def test_invalid_images_are_refused(tensor: TensorSpec, request_: InferRequest, text: str) -> None:
    assert refusal([tensor], request_).startswith(text)


def test_huge_images_are_refused_before_they_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_files, "MAX_PIXELS", 7)
    assert re.search("2 x 4 pixels|4 x 2 pixels", refusal([spec(1, 2, 4, 3)], send(encoded(RGB))))


@given(
    st.integers(0, 200),
    st.binary(min_size=1, max_size=8),
    st.sampled_from(["PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP"]),
)
def test_damaged_images_are_refused_or_decoded(position: int, damage: bytes, kind: str) -> None:
    file = bytearray(encoded(RGB, kind))
    file[position : position + len(damage)] = damage
    try:
        array = pixels_of(spec(1, 2, 4, 3), bytes(file))
    except InvalidRequest:
        return
    assert array.shape == (1, 2, 4, 3)


NATIVE = [TensorSpec("s", BYTES, (ANY_SIZE,))]
MATRIX = [TensorSpec("s", BY_NAME["UINT8"], (ANY_SIZE, ANY_SIZE))]


def framed(*elements: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(element)) + element for element in elements)


def raw(shape: tuple[int, ...], buffer: Buffer) -> InferRequest:
    return InferRequest("m", inputs=[InferInput("s", "BYTES", shape)], raw_inputs=[buffer])


@pytest.mark.parametrize("shape", [(4,), (2, 2), (1, 4, 1)])
def test_native_strings_are_read_from_raw_buffers_and_contents(shape: tuple[int, ...]) -> None:
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
def test_invalid_framing_is_refused(buffer: bytes, text: str, specs: list[TensorSpec]) -> None:
    message = refusal(specs, raw((1,), buffer))
    assert message.startswith("Inputs inside buffer do")
    assert text in message


def test_native_strings_must_fit_the_shape() -> None:
    two = [TensorSpec("s", BYTES, (Dim.fixed(2),))]
    assert refusal(two, raw((1, 2), b"")).startswith("Invalid number of shape dimensions")
    assert refusal(two, raw((3,), b"")).startswith("Invalid input shape - Expected: (2); Actual: (3); input name: s")
    assert "Expected: 2 strings; Actual: 1 strings" in refusal(two, raw((2,), framed(b"a")))
    assert refusal(two, raw((-2,), b"")).startswith("Invalid input shape")


def test_number_and_total_length_of_strings_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal(NATIVE, raw((2**25 + 1,), b"")).startswith("String max size exceeded")
    monkeypatch.setattr(strings, "MAX_BYTES", 100)
    for specs in (NATIVE, MATRIX):
        assert refusal(specs, raw((2,), framed(b"a", b"b" * 60))).startswith("String max size exceeded")


def test_strings_become_rows_padded_with_zeros() -> None:
    for request in (raw((2,), framed(b"ab", b"cde")), contents_request("s", "BYTES", (2,), [b"ab", b"cde"])):
        assert validate(request, MATRIX)["s"].tolist() == [[97, 98, 0, 0], [99, 100, 101, 0]]


def test_matrix_of_bytes_takes_numbers() -> None:
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
def test_strings_that_do_not_fit_a_matrix_are_refused(request_: InferRequest, text: str) -> None:
    specs = [TensorSpec("s", BY_NAME["UINT8"], (Dim(1, 2), Dim.fixed(4)))]
    assert refusal(specs, request_).startswith(text)


def test_uint8_outputs_named_string_become_strings() -> None:
    rows = np.frombuffer(b"ab\0\0cd\0eabcd", np.uint8).reshape(3, 4)
    given = strings_of_rows(Tensor("label_string", BY_NAME["UINT8"], rows))
    assert given.datatype is BYTES
    assert given.array.tolist() == [b"ab", b"cd", b"abcd"]
    for kept in (Tensor("label", BY_NAME["UINT8"], rows), Tensor("x_string", BY_NAME["INT8"], rows.view(np.int8))):
        assert strings_of_rows(kept) is kept


NUMBERS = [datatype for datatype in BY_NAME.values() if datatype.name != "BYTES"]


@pytest.mark.parametrize("datatype", NUMBERS, ids=lambda each: each.name)
@pytest.mark.parametrize("shape", [(), (1,), (2, 3), (0, 3), (2, 0)], ids=str)
def test_buffer_holds_the_elements_in_order(datatype: Any, shape: tuple[int, ...]) -> None:
    array = np.arange(int(np.prod(shape))).astype(datatype.numpy).reshape(shape)
    buffer = buffer_of(array)
    assert bytes(buffer) == array.tobytes()
    assert len(buffer) == array.nbytes


@pytest.mark.parametrize("is_writeable", [True, False])
def test_buffer_of_a_contiguous_array_is_a_view(is_writeable: bool) -> None:
    array = np.zeros((2, 3), np.float32)
    array.flags.writeable = is_writeable
    view = np.frombuffer(buffer_of(array), np.float32)
    assert np.shares_memory(array, view)
    assert view.flags.writeable is is_writeable


def test_buffer_of_a_strided_array_is_copied_in_the_order_of_rows() -> None:
    array = np.arange(6, dtype=np.int16).reshape(2, 3)
    assert bytes(buffer_of(array.T)) == array.T.copy().tobytes()
    assert bytes(buffer_of(array[:, ::2])) == np.array([[0, 2], [3, 5]], np.int16).tobytes()
