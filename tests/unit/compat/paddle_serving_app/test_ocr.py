from __future__ import annotations

from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray

from paddle_serving_app.reader import DBPostProcess, FilterBoxes, GetRotateCropImage, OCRReader, SortedBoxes
from paddle_serving_app.reader.ocr_reader import CharacterOps, CTCLabelDecode

PARAMS = {"thresh": 0.3, "box_thresh": 0.6, "max_candidates": 1000, "unclip_ratio": 1.5, "min_size": 3}


def box(left: float, top: float, right: float, bottom: float) -> NDArray[np.float32]:
    """Give the corners of a rectangle, clockwise from the top left."""
    return np.array([[left, top], [right, top], [right, bottom], [left, bottom]], np.float32)


def likely(height: int, width: int, *regions: tuple[int, int, int, int, float]) -> NDArray[np.float32]:
    """Give a map with regions of left, top, right, bottom and likelihood."""
    found = np.zeros((1, 1, height, width), np.float32)
    for left, top, right, bottom, value in regions:
        found[0, 0, top : bottom + 1, left : right + 1] = value
    return found


def test_regions_become_boxes_of_the_image() -> None:
    """A likely region is enlarged by its area to its outline, and put back to the image's size."""
    found = DBPostProcess(PARAMS)(likely(100, 200, (40, 30, 100, 50, 0.9)), [[0.5, 2.0]])
    # 60 by 20 pixels: 1200 * 1.5 / 160 = 11.25 on every side, in whole pixels of the map.
    assert found[0].dtype == np.int16
    assert found[0].tolist() == [[[14, 38], [55, 38], [55, 122], [14, 122]]]


def test_what_is_no_text() -> None:
    """Regions that are thin, or not likely enough on the average, are none."""
    post = DBPostProcess(PARAMS)
    assert post(likely(60, 60, (5, 5, 50, 6, 0.9), (5, 20, 50, 40, 0.5)), [[1, 1]]) == [[]]
    (kept,) = post(likely(60, 90, (5, 5, 80, 15, 0.7), (5, 40, 50, 45, 0.5)), [[1, 1]])
    assert len(kept) == 1
    assert len(DBPostProcess({**PARAMS, "max_candidates": 0})(likely(9, 9), [[1, 1]])[0]) == 0
    assert "unclip_ratio=1.5" in repr(post)


def test_a_slanted_region_keeps_its_slant() -> None:
    """The corners of a slanted rectangle come clockwise from the top left."""
    slanted = likely(120, 160)
    corners = np.rint(cv2.boxPoints(((80, 60), (90, 20), 30))).astype(np.int32)
    cv2.fillPoly(slanted[0, 0], [corners], (0.9,))
    ((found,),) = DBPostProcess(PARAMS)(slanted, [[1, 1]])
    np.testing.assert_allclose(found.mean(0), [80, 60], atol=1)
    along, down = found[1] - found[0], found[3] - found[0]
    np.testing.assert_allclose(np.degrees(np.arctan2(along[1], along[0])), 30, atol=2)
    np.testing.assert_allclose([np.hypot(*along), np.hypot(*down)], [90 + 24.5, 20 + 24.5], atol=2)


def test_round_corners() -> None:
    """A polygon is enlarged on every side, whichever way round its corners come."""
    post = DBPostProcess({**PARAMS, "unclip_ratio": 2})
    for corners in (box(10, 10, 30, 20), box(10, 10, 30, 20)[::-1]):
        (grown,) = post.unclip(corners)
        far = 200 * 2 / 60
        np.testing.assert_allclose([grown.min(0), grown.max(0)], [[10 - far, 10 - far], [30 + far, 20 + far]], atol=0.5)
        to_corner = np.abs(grown - np.clip(grown, [10, 10], [30, 20]))
        np.testing.assert_allclose(np.hypot(*to_corner.T), far, atol=0.75)


def test_boxes_are_filtered_and_sorted() -> None:
    """Small boxes go, corners are put in order and in the image, and boxes in the order of reading."""
    shuffled = box(50, 12, 90, 30)[[2, 0, 3, 1]]
    filtered = FilterBoxes(10, 10)([box(0, 0, 10, 40), shuffled, box(-5, 10, 30, 33.7), box(5, 60, 300, 90)], [80, 100])
    assert filtered.tolist() == [
        box(50, 12, 90, 30).tolist(), box(0, 10, 30, 33).tolist(), box(5, 60, 99, 79).tolist()
    ]  # fmt: skip
    assert [found[0].tolist() for found in SortedBoxes()(filtered)] == [[0, 10], [50, 12], [5, 60]]
    assert SortedBoxes()(np.array([box(50, 10, 60, 20), box(0, 19, 9, 30)]))[0][0].tolist() == [0, 19]
    assert FilterBoxes(10, 10)([], [80, 100]).shape == (0,)


def test_boxes_are_cut_out() -> None:
    """A box is straightened, and turned if it is much higher than wide; corners stay as they are."""
    image = np.zeros((60, 80, 3), np.uint8)
    image[10:20, 20:50] = (10, 20, 30)
    image[10:20, 20] = 255
    corners = box(20, 10, 50, 20)
    cut = GetRotateCropImage()(image, corners)
    np.testing.assert_array_equal(cut, image[10:20, 20:50])
    assert corners.tolist() == box(20, 10, 50, 20).tolist()
    upright = GetRotateCropImage()(image.transpose(1, 0, 2), box(10, 20, 20, 50))
    assert upright.shape == (10, 30, 3)
    assert (upright[:, 0] == 255).all()


@pytest.fixture
def reader(tmp_path: Path) -> OCRReader:
    """Give a reader of four characters, and a space."""
    file = tmp_path / "keys.txt"
    file.write_text("你\n好\r\na\nb\n", encoding="utf-8")
    return OCRReader(char_dict_path=str(file))


def test_lines_become_inputs(reader: OCRReader) -> None:
    """A line is 32 pixels high, between -1 and 1, and has zeros behind its end."""
    line = np.full((16, 40, 3), 255, np.uint8)
    made = reader.resize_norm_img(line, 5)
    assert made.shape == (3, 32, 160)
    assert made.dtype == np.float32
    assert (made[:, :, :80] == 1).all()
    assert (made[:, :, 80:] == 0).all()
    assert reader.resize_norm_img(line, 1).shape == (3, 32, 32)
    assert reader.preprocess([line, np.zeros((10, 60, 3), np.uint8)]).shape == (3, 32, 192)
    fixed = OCRReader(char_type="en", image_shape=[3, 32, 100])
    assert fixed.resize_norm_img(line, 9).shape == (3, 32, 100)


def test_likelihoods_become_text(reader: OCRReader) -> None:
    """The likeliest class of each step is spelled once, without blanks, and the score is of what is spelled."""
    rows = np.zeros((2, 6, 6), np.float32)
    for step, (character, value) in enumerate([(1, 0.5), (1, 0.9), (0, 1), (1, 0.75), (5, 1), (3, 0.25)]):
        rows[0, step, character] = value
    rows[1, :, 0] = 1
    (text, score), (nothing, no_score) = reader.postprocess_ocrv2({"save_infer_model/scale_0.tmp_1": rows})
    assert (text, float(score)) == ("你你 a", 0.625)
    assert nothing == ""
    assert np.isnan(no_score)
    assert reader.postprocess_ocrv2({"likely": rows, "count": np.ones(2)})[0][0] == text
    with pytest.raises(ValueError, match=r"one output must be .*, got one, other"):
        reader.postprocess_ocrv2({"one": rows, "other": rows})


def test_decoded_classes_become_text(reader: OCRReader) -> None:
    """Classes that a model has decoded are spelled line by line, with the average of the likeliest characters."""
    likely_rows = np.array([[0.5, 0, 0, 0, 0.1], [0, 0, 0, 0, 1], [0, 0.25, 0, 0, 0.2]])
    outputs: dict[str, Any] = {
        "ctc_greedy_decoder_0.tmp_0": [[0], [1], [2]], "ctc_greedy_decoder_0.tmp_0.lod": [0, 2, 3],
        "softmax_0.tmp_0": likely_rows, "softmax_0.tmp_0.lod": [0, 1, 3],
    }  # fmt: skip
    assert reader.postprocess(outputs) == [["你好"], ["a"]]
    assert reader.postprocess(outputs, with_score=True) == [["你好", 0.5], ["a", 0.25]]


def test_characters_and_classes() -> None:
    """Text becomes classes and text again; ends and blanks are not spelled."""
    attention = CharacterOps({"character_type": "en", "loss_type": "attention"})
    assert attention.encode("Ab9!").tolist() == [12, 13, 11]
    assert attention.decode([0, 12, 12, 13, 1]) == "aab"
    assert attention.decode([0, 12, 12, 13, 1], is_remove_duplicate=True) == "ab"
    assert int(attention.get_beg_end_flag_idx("end")) == 1
    plain = CharacterOps({"character_type": "en_sensitive", "loss_type": "ctc"})
    assert (plain.get_char_num(), plain.decode([0, 94, 36])) == (94, "0A")
    with pytest.raises(ValueError, match="have the ends"):
        plain.get_beg_end_flag_idx("beg")
    assert CTCLabelDecode({"character_type": "EN_symbol"})(np.eye(95)[None, :2], label=[[1, 1]]) == (
        [("0", 1.0)], [("00", 1.0)]
    )  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "text"), [("klingon", "must be one of"), ("ch", "needs character_dict_path")], ids=["unknown", "no file"]
)
def test_characters_that_cannot_be_known(kind: str, text: str) -> None:
    """An unknown type, and one without its file, are told."""
    with pytest.raises(ValueError, match=text):
        CTCLabelDecode({"character_type": kind})
    with pytest.raises(ValueError, match="must be ch, en or en_sensitive, got 'x'"):
        CharacterOps({"character_type": "x", "loss_type": "ctc"})
