from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray

from paddle_serving_app.reader import (
    BGR2RGB,
    RGB2BGR,
    Base64ToImage,
    CenterCrop,
    DetectionBGR2RGB,
    DetectionDiv,
    DetectionFile2Image,
    DetectionNormalize,
    DetectionPadStride,
    DetectionResize,
    DetectionSequential,
    DetectionTranspose,
    Div,
    File2Image,
    ImageReader,
    Lambda,
    Normalize,
    PadStride,
    Resize,
    ResizeByFactor,
    Sequential,
    String2Image,
    Transpose,
    URL2Image,
)
from paddle_serving_app.reader.functional import crop

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


def image(height: int, width: int) -> NDArray[np.uint8]:
    """Give an image whose every pixel tells where it was."""
    rows, columns = np.mgrid[:height, :width]
    return np.stack([rows, columns, rows + columns], 2).astype(np.uint8)


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    """Give an image file without loss."""
    file = tmp_path / "picture.png"
    cv2.imwrite(str(file), image(30, 40))
    return file


def test_an_image_is_the_same_wherever_it_comes_from(picture: Path) -> None:
    """A file, an address, its bytes and its base64 are read alike; what is no image is None."""
    data = picture.read_bytes()
    for found in (
        File2Image()(str(picture)),
        URL2Image()(picture.as_uri()),
        String2Image()(data),
        Base64ToImage()(base64.b64encode(data).decode()),
    ):
        np.testing.assert_array_equal(np.asarray(found), image(30, 40))
    assert String2Image()(b"no image") is None
    with pytest.raises(FileNotFoundError):
        File2Image()("missing.png")


def test_a_classifier_sees_the_middle_of_its_image(picture: Path) -> None:
    """The steps that classifiers are used with give values that can be told by hand."""
    steps: list[Any] = [
        File2Image(),
        CenterCrop(20),
        RGB2BGR(),
        Transpose((2, 0, 1)),
        Div(255),
        Normalize(MEAN, STD, True),
    ]
    seen = Sequential(steps)(str(picture))
    assert (seen.shape, seen.dtype) == ((3, 20, 20), np.float32)
    corner = (np.array([15, 10, 5]) / 255 - MEAN) / STD
    np.testing.assert_allclose(seen[:, 0, 0], corner, rtol=1e-5)
    assert repr(steps[1]) == "CenterCrop(size=20)"


@pytest.mark.parametrize(
    ("resize", "shape"),
    [
        (Resize(15), (15, 20, 3)),
        (Resize((8, 6)), (6, 8, 3)),
        (Resize(60, 40), (30, 40, 3)),
        (Resize((100, 50), 70), (50, 70, 3)),
        (ResizeByFactor(32, 2400), (32, 32, 3)),
        (ResizeByFactor(8, 16), (8, 16, 3)),
    ],
    ids=["shorter side", "width and height", "within a limit", "both within a limit", "multiples", "small multiples"],
)
def test_sizes(resize: Any, shape: tuple[int, ...]) -> None:
    """Each resizing has the size that it promises."""
    assert resize(image(30, 40)).shape == shape


@pytest.mark.parametrize(("side", "fitted"), [(64, 64), (95, 32), (96, 96), (130, 96), (33, 32), (1, 32)], ids=str)
def test_multiples(side: int, fitted: int) -> None:
    """A side that is no multiple loses one besides what is over it, and none is smaller than one."""
    assert ResizeByFactor(32, 960)(image(side, 64)).shape == (fitted, 64, 3)
    assert ResizeByFactor(32, 960)(image(2, 1920)).shape == (32, 960, 3)


def test_values_of_single_steps() -> None:
    """Channels are turned round, divided, normalized and padded; nothing is changed in place."""
    given = image(5, 7)
    kept = given.copy()
    np.testing.assert_array_equal(BGR2RGB()(given)[..., 0], given[..., 2])
    assert Div(2.0)(given)[3, 1].tolist() == [1.5, 0.5, 2.0]
    assert Normalize([1, 2, 3], [2, 4, 8])(given)[3, 2].tolist() == [1.0, 0.0, 0.25]
    padded = PadStride(4)(given.transpose(2, 0, 1))
    assert padded.shape == (3, 8, 8)
    assert padded.dtype == np.float32
    assert (padded[:, :5, :7] == given.transpose(2, 0, 1)).all()
    assert padded.sum() == given.sum()
    assert PadStride(0)(given) is given
    assert Lambda(len)(given) == 5
    with pytest.raises(TypeError, match="takes a function, got int"):
        Lambda(3)  # type: ignore[arg-type]
    np.testing.assert_array_equal(given, kept)


def test_a_square_out_of_anywhere() -> None:
    """A square that need not be in the middle is still whole."""
    cut = crop(image(9, 12), 5, center=False)
    assert cut.shape == (5, 5, 3)
    assert (np.diff(cut[:, 0, 0].astype(int)) == 1).all()


def test_detection_tells_what_it_did(picture: Path) -> None:
    """Besides the image there are its size and by how much it was multiplied, before padding."""
    steps: list[Any] = [
        DetectionFile2Image(),
        DetectionResize([60, 70], keep_ratio=True),
        DetectionNormalize(MEAN, STD, True),
        DetectionTranspose((2, 0, 1)),
        DetectionPadStride(32),
    ]
    seen, info = DetectionSequential(steps)(str(picture))
    assert (seen.shape, seen.dtype) == ((3, 64, 96), np.float32)
    assert info["im_shape"].tolist() == [52, 70]
    np.testing.assert_allclose(info["scale_factor"], [1.75, 1.75])
    np.testing.assert_allclose(seen[:, 0, 0], (np.zeros(3) - MEAN) / STD, rtol=1e-5)
    assert (seen[:, 52:] == 0).all()


def test_single_steps_of_detection(tmp_path: Path) -> None:
    """Sides can be stretched alone, RGB comes from files, and what is known may be nothing."""
    stretched, info = DetectionResize([60, 20], keep_ratio=False)(image(30, 40), {})
    assert (stretched.shape, info) == ((60, 20, 3), info)
    assert info is not None
    assert info["scale_factor"].tolist() == [2.0, 0.5]
    assert DetectionResize(15)(image(30, 45))[0].shape == (10, 15, 3)
    turned, nothing = DetectionBGR2RGB()(image(2, 3))
    assert (turned[1, 2].tolist(), nothing) == ([3, 2, 1], None)
    assert DetectionDiv(2)(image(2, 3))[0][1, 2].tolist() == [0.5, 1.0, 1.5]
    assert DetectionNormalize([1, 1, 1], [2, 2, 2], False)(image(2, 3))[0][1, 2].tolist() == [0.0, 0.5, 1.0]
    assert DetectionPadStride()(image(2, 3))[0].shape == (2, 3, 3)
    (tmp_path / "x").write_text("no image")
    with pytest.raises(ValueError, match="x is no image that OpenCV can read"):
        DetectionFile2Image()(tmp_path / "x")


def test_all_steps_of_a_classifier_in_one(picture: Path) -> None:
    """``ImageReader`` gives what the single steps give, or None for no image."""
    data = picture.read_bytes()
    steps: list[Any] = [
        String2Image(),
        Resize(32),
        CenterCrop(16),
        RGB2BGR(),
        Transpose((2, 0, 1)),
        Div(255),
        Normalize(MEAN, STD, True),
    ]
    found = ImageReader((3, 16, 16), resize_short_size=32).process_image(data)
    np.testing.assert_allclose(np.asarray(found), Sequential(steps)(data), rtol=1e-6)
    whole = ImageReader((3, 0, 0)).process_image(data)
    assert whole is not None
    assert whole.shape == (3, 30, 40)
    assert ImageReader().process_image(b"no image") is None
