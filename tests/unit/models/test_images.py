from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from ovmstrio.core.datatypes import BY_NAME
from ovmstrio.core.errors import InvalidRequest
from ovmstrio.core.request import InferRequest
from ovmstrio.core.tensor import ANY_SIZE, Dim, TensorSpec
from ovmstrio.runtimes.models import image_files
from tests.support.servables import contents_request
from tests.support.validation import validate

RGB = np.arange(24, dtype=np.uint8).reshape(2, 4, 3) * 10


def encoded(pixels: np.ndarray[Any, Any], kind: str = "PNG") -> bytes:
    """Encode pixels as an image file."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind)
    return buffer.getvalue()


def spec(*shape: int | Dim, datatype: str = "UINT8", layout: str = "NHWC") -> TensorSpec:
    """Make an image input; -1 is any size."""
    dims = tuple(dim if isinstance(dim, Dim) else ANY_SIZE if dim == -1 else Dim.fixed(dim) for dim in shape)
    return TensorSpec("image", BY_NAME[datatype], dims, 0, layout)


def send(*files: bytes, shape: tuple[int, ...] | None = None) -> InferRequest:
    """Make a request of encoded images."""
    return contents_request("image", "BYTES", (len(files),) if shape is None else shape, list(files))


def pixels_of(tensor: TensorSpec, *files: bytes) -> np.ndarray[Any, Any]:
    """Decode images through validation."""
    return validate(send(*files), [tensor])["image"]


def refusal(tensor: TensorSpec, request: InferRequest) -> str:
    """Give the text with which a request is refused."""
    with pytest.raises(InvalidRequest) as caught:
        validate(request, [tensor])
    return caught.value.message


@pytest.mark.parametrize("datatype", ["FP32", "FP64", "FP16", "INT16", "UINT8", "INT8", "UINT16", "INT32"])
@pytest.mark.parametrize("layout", ["NHWC", "?HWC", "", "N...", "...", "N...C"])
def test_pixels_are_bgr_and_cast(datatype: str, layout: str) -> None:
    """A lossless image arrives channels last, blue first, cast without scaling."""
    array = pixels_of(spec(1, 2, 4, 3, datatype=datatype, layout=layout), encoded(RGB))
    np.testing.assert_array_equal(array[0], RGB[..., ::-1].astype(BY_NAME[datatype].numpy))
    assert array.flags.c_contiguous


def test_alpha_grey_and_sixteen_bits() -> None:
    """Alpha stays behind blue, green, red; grey has one channel; sixteen-bit grey keeps its values."""
    rgba = np.concatenate([RGB, np.full((2, 4, 1), 7, np.uint8)], axis=2)
    np.testing.assert_array_equal(pixels_of(spec(1, 2, 4, 4), encoded(rgba))[0], rgba[..., [2, 1, 0, 3]])
    np.testing.assert_array_equal(pixels_of(spec(1, 2, 4, 1), encoded(RGB[..., 0]))[0], RGB[..., :1])
    deep = np.array([[0, 1000], [40000, 65535]], np.uint16)
    np.testing.assert_array_equal(pixels_of(spec(1, 2, 2, 1, datatype="UINT16"), encoded(deep))[0, ..., 0], deep)


def test_batch_of_images() -> None:
    """Each element is one image of the batch."""
    array = pixels_of(spec(-1, 2, 4, 3), encoded(RGB), encoded(RGB[::-1]))
    np.testing.assert_array_equal(array[1], RGB[::-1, :, ::-1])


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
def test_sizes(height: int | Dim, width: int | Dim, expected: tuple[int, int]) -> None:
    """Fixed sizes resize, ranges take the nearest bound, open sizes keep the image's own."""
    assert pixels_of(spec(1, height, width, 3), encoded(RGB)).shape == (1, *expected, 3)


def test_resize_is_bilinear() -> None:
    """Between two pixels the values go over linearly."""
    edge = np.array([[[0, 0, 0], [200, 200, 200]]], np.uint8)
    assert pixels_of(spec(1, 1, 4, 3), encoded(edge))[0, 0, :, 0].tolist() == [0, 50, 150, 200]


@pytest.mark.parametrize("kind", ["JPEG", "BMP", "WEBP", "GIF", "TIFF"])
def test_formats(kind: str) -> None:
    """The usual formats are decoded."""
    array = pixels_of(spec(1, 16, 16, 3), encoded(np.full((16, 16, 3), 120, np.uint8), kind))
    assert abs(int(array.mean()) - 120) <= 2


@pytest.mark.parametrize(
    ("tensor", "request_", "text"),
    [
        (
            spec(1, 2, 4, 3),
            send(b"junk"),
            "Image parsing failed - its 4 bytes are no image of a known format (JPEG, PNG, BMP, WEBP, TIFF, GIF, PPM)",
        ),
        (spec(1, 2, 4, 3), send(encoded(RGB)[:45]), "Image parsing failed"),
        (spec(1, 2, 4, 3), send(b""), "Bytes contents empty"),
        (
            spec(1, 2, 4, 3),
            send(encoded(RGB[..., 0])),
            "Invalid number of channels in binary input - Expected: 3; Actual: 1",
        ),
        (spec(1, 2, 4, 1), send(encoded(RGB)), "Invalid number of channels in binary input - Expected: 1; Actual: 3"),
        (spec(1, 2, 4, 3), send(encoded(RGB), encoded(RGB)), "Invalid input batch size - Expected: 1; Actual: 2"),
        (spec(1, 2, 4, 3), send(encoded(RGB), shape=(2,)), "Invalid input batch size - Expected: 2; Actual: 1 images"),
        (spec(-1, 2, 4, 3), send(), "Invalid input batch size - Expected: -1; Actual: 0"),
        (spec(1, 2, 4, 3), send(encoded(RGB), shape=(1, 1)), "Invalid number of shape dimensions - Expected: (-1)"),
        (spec(1, 3, 2, 4, layout="NCHW"), send(encoded(RGB)), "Unsupported layout for encoded images"),
        (spec(2, -1, -1, 3), send(encoded(RGB), encoded(RGB[:1])), "Binary images resolution mismatch"),
    ],
)
def test_refusals(tensor: TensorSpec, request_: InferRequest, text: str) -> None:
    """What is no image, or no image for this input, is the caller's fault and says why."""
    assert refusal(tensor, request_).startswith(text)


def test_other_element_types_are_not_supported() -> None:
    """Images are for the element types that OVMS takes them for."""
    with pytest.raises(InvalidRequest, match="encoded images for INT64"):
        validate(send(encoded(RGB)), [spec(1, 2, 4, 3, datatype="INT64")])


def test_huge_images_are_refused_before_they_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small file that announces a large image is refused by its header."""
    monkeypatch.setattr(image_files, "MAX_PIXELS", 7)
    assert "2 x 4 pixels" in refusal(spec(1, 2, 4, 3), send(encoded(RGB))).replace("4 x 2", "2 x 4")


@given(
    st.integers(0, 200),
    st.binary(min_size=1, max_size=8),
    st.sampled_from(["PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP"]),
)
def test_damaged_images_are_refusals_or_images(position: int, damage: bytes, kind: str) -> None:
    """Whatever is done to a file, it is refused or decoded to the input's shape."""
    file = bytearray(encoded(RGB, kind))
    file[position : position + len(damage)] = damage
    try:
        array = pixels_of(spec(1, 2, 4, 3), bytes(file))
    except InvalidRequest:
        return
    assert array.shape == (1, 2, 4, 3)
