from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from paddle_serving_app.reader import BlazeFacePostprocess, RCNNPostprocess, SegPostprocess
from paddle_serving_app.reader.image_reader import generate_colormap

ROWS = np.array([[1, 0.75, 10, 20, 30, 40], [0, 0.25, 1, 2, 3, 4], [1, 0.5, 0, 0, 0, 0]], np.float32)


@pytest.fixture
def labels(tmp_path: Path) -> str:
    """Give a file with the names of two classes."""
    file = tmp_path / "labels.txt"
    file.write_text("cat\ndog \n")
    return str(file)


def test_rows_become_boxes(tmp_path: Path, labels: str) -> None:
    """Rows as far as the last offset are class, score, and left, top, width and height in pixels."""
    post = RCNNPostprocess(labels, str(tmp_path / "out"))
    outputs = {"im_shape": np.ones((1, 2)), "boxes": ROWS, "boxes.lod": [0, 2]}
    assert post(outputs, visualize=False) == [
        {"category_id": 1, "bbox": [10.0, 20.0, 21.0, 21.0], "score": 0.75},
        {"category_id": 0, "bbox": [1.0, 2.0, 3.0, 3.0], "score": 0.25},
    ]
    assert post.catid2name == {0: "cat", 1: "dog"}
    assert (tmp_path / "out").is_dir()


@pytest.mark.parametrize("offsets", [{}, {"boxes.lod": np.array([[0, 3]])}], ids=["none", "two-dimensional"])
def test_offsets_may_be_missing_or_nested(tmp_path: Path, labels: str, offsets: dict[str, Any]) -> None:
    """All rows count where a server has no offsets, and another output beside them is left alone."""
    found = RCNNPostprocess(labels, str(tmp_path))({"boxes": ROWS, "number": np.array([3]), **offsets}, visualize=False)
    assert [box["category_id"] for box in found] == [1, 0, 1]


def test_nothing_found_and_nothing_that_is_boxes(tmp_path: Path, labels: str) -> None:
    """A single number means no boxes, and any other shape is told."""
    post = RCNNPostprocess(labels, str(tmp_path))
    assert post({"boxes": np.array([[-1.0]])}, visualize=False) == []
    with pytest.raises(ValueError, match=r"boxes are \[number, 6\], got mask \[2, 5\]"):
        post({"mask": np.zeros((2, 5))}, visualize=False)


def test_boxes_are_drawn(tmp_path: Path, labels: str) -> None:
    """What is likely is drawn in its class's colour into a copy of the image, and all is written as JSON."""
    photo = tmp_path / "photo.png"
    cv2.imwrite(str(photo), np.full((64, 64, 3), 255, np.uint8))
    found = RCNNPostprocess(labels, str(tmp_path / "out"))({"image": str(photo), "boxes": ROWS[:2]})
    assert json.loads((tmp_path / "out" / "bbox.json").read_text()) == found
    drawn = np.asarray(cv2.imread(str(tmp_path / "out" / "photo.png")))
    assert drawn[30, 10].tolist() == [0, 0, 128]
    assert drawn[3, 1].tolist() == [255, 255, 255]
    assert np.asarray(cv2.imread(str(photo))).min() == 255


def test_faces_are_in_shares_of_the_image(tmp_path: Path, labels: str) -> None:
    """Corners between 0 and 1 are clipped and become pixels."""
    post = BlazeFacePostprocess(labels, str(tmp_path))
    rows = np.array([[0, 0.5, 0.25, 0.5, 1.5, 0.75]], np.float32)
    assert post({"im_shape": np.array([100, 200]), "boxes": rows}, visualize=False) == [
        {"category_id": 0, "bbox": [50.0, 50.0, 150.0, 25.0], "score": 0.5}
    ]


def test_masks_become_pictures(tmp_path: Path) -> None:
    """A mask is written as it is, and in colours as large as the image."""
    photo = tmp_path / "photo.png"
    cv2.imwrite(str(photo), np.zeros((20, 30, 3), np.uint8))
    mask = np.zeros((1, 512, 512), np.int64)
    mask[:, 256:] = 2
    SegPostprocess(3)({"filename": str(photo), "mask": mask, "mask.lod": [0, 1]})
    assert np.asarray(cv2.imread(str(tmp_path / "photo_png_mask.png"), -1))[[0, 511], 0].tolist() == [0, 2]
    coloured = np.asarray(cv2.imread(str(tmp_path / "photo_png_result.png")))
    assert coloured.shape == (20, 30, 3)
    assert coloured[[0, 19], 0].tolist() == [[0, 0, 0], [0, 128, 0]]
    with pytest.raises(ValueError, match="needs filename and a mask, got filename"):
        SegPostprocess(3)({"filename": "x"})
    with pytest.raises(ValueError, match="is no image"):
        SegPostprocess(3)({"filename": str(tmp_path / "none.png"), "mask": mask})


def test_colours_of_classes() -> None:
    """Colours are those of Pascal VOC."""
    colours = generate_colormap(22)
    assert colours[:5] == [[0, 0, 0], [128, 0, 0], [0, 128, 0], [128, 128, 0], [0, 0, 128]]
    assert colours[20] == [0, 64, 128]
