from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ovmstrio.core.tensor import Array

cv2: Any = pytest.importorskip("cv2")

from ovmstrio.samples.ocr_pipeline import cut, decode, rectangles, spell  # noqa: E402 - these imports need OpenCV

_CUT = {"threshold": "0.3", "box_threshold": "0.5", "growth": "1.6"}


def _map(*boxes: tuple[int, int, int, int], height: int = 64, width: int = 256) -> Array:
    likely = np.zeros((1, 1, height, width), np.float32)
    for left, top, right, bottom in boxes:
        likely[0, 0, top:bottom, left:right] = 0.9
    return likely


def test_a_file_is_decoded_and_enlarged() -> None:
    picture = np.random.default_rng(0).integers(0, 256, (30, 70, 3), np.uint8)
    encoded = np.concatenate([cv2.imencode(".png", picture)[1].reshape(-1), np.zeros(3, np.uint8)])
    outputs = decode.execute({"file": encoded[np.newaxis]}, {"shorter_side": "64"})
    np.testing.assert_array_equal(outputs["picture"][0], picture)
    assert outputs["enlarged"].shape == (1, 64, 160, 3)
    with pytest.raises(ValueError, match="no picture"):
        decode.execute({"file": np.zeros((1, 5), np.uint8)}, {})


def test_text_regions_are_grown_and_doubtful_ones_dropped() -> None:
    """A core of 100 x 10 points is grown by 1.6 * 1000 / 220 on each side."""
    ((rectangle),) = rectangles.text_rectangles(_map((50, 20, 151, 31))[0, 0], 0.3, 0.5, 1.6)
    points = cv2.boxPoints(rectangle)
    margin = 1.6 * 101 * 11 / 224
    np.testing.assert_allclose(points.min(axis=0), [50 - margin, 20 - margin], atol=1)
    np.testing.assert_allclose(points.max(axis=0), [151 + margin, 31 + margin], atol=1)
    likely = _map((10, 10, 12, 12))[0, 0]
    likely[30:40, 50:150] = 0.4
    assert list(rectangles.text_rectangles(likely, 0.3, 0.5, 1.6)) == []
    assert len(list(rectangles.text_rectangles(likely, 0.3, 0.3, 1.6))) == 1


def test_lines_are_read_from_top_to_bottom_and_left_to_right() -> None:
    def box(left: int, top: int) -> list[list[int]]:
        return [[left, top], [left + 50, top], [left + 50, top + 20], [left, top + 20]]

    given = np.array([box(0, 40), box(100, 0), box(10, 5)], np.int32)
    assert rectangles.in_reading_order(given)[:, 0, 0].tolist() == [10, 100, 0]
    assert rectangles.in_reading_order(given[:0]).shape == (0, 4, 2)


@pytest.mark.parametrize("angle", [-8, 0, 8])
def test_a_tilted_line_is_straightened(angle: int) -> None:
    centre, size = (100.0, 60.0), (120.0, 24.0)
    stripe = np.full((120, 200, 3), 90, np.uint8)
    stripe[48:60, 40:160], stripe[60:72, 40:160] = 0, 255
    turned = cv2.warpAffine(stripe, cv2.getRotationMatrix2D(centre, -angle, 1), (200, 120))
    box = rectangles.corners((centre, size, angle), np.ones(2), turned.shape)
    line = rectangles.upright(turned, box, 48, 3200)
    assert line.shape[0] == 48
    assert line.shape[1] == pytest.approx(240, abs=8)
    assert line[8:18, 10:-10].mean() < 30
    assert line[30:40, 10:-10].mean() > 225


def test_upward_text_is_rotated() -> None:
    picture = np.zeros((100, 60, 3), np.uint8)
    picture[:, 30:] = 255
    box = np.array([[20, 0], [40, 0], [40, 99], [20, 99]])
    line = rectangles.upright(picture, box, 48, 3200)
    assert line.shape[1] > 200
    assert line[:16].mean() > 225
    assert line[32:].mean() < 30


def test_lines_of_a_picture_have_one_width() -> None:
    picture = np.full((1, 128, 512, 3), 200, np.uint8)
    outputs = cut.execute({"picture": picture, "likely": _map((8, 4, 40, 10), (8, 40, 240, 46))}, _CUT)
    lines, widths, boxes = outputs["lines"], outputs["widths"], outputs["boxes"]
    assert lines.shape[:3] == (2, 1, 48)
    assert widths.shape == (2, 1, 1)
    assert widths[0, 0, 0] == 320
    assert widths[1, 0, 0] == lines.shape[3] > 320
    assert lines.shape[3] % 16 == 0
    assert boxes.shape == (2, 4, 2)
    assert (boxes[:, 0, 1] < boxes[:, 3, 1]).all()
    assert (boxes[:, 1, 0] / 2 > [40, 240]).all()
    picture = np.zeros((1, 64, 256, 3), np.uint8)
    outputs = cut.execute({"picture": picture, "likely": _map()}, _CUT)
    assert [outputs[name].shape[0] for name in ("lines", "widths", "boxes")] == [0, 0, 0]
    assert outputs["lines"].ndim == 5


@pytest.fixture
def spelled() -> Callable[..., dict[str, Array]]:
    def spelled_by(steps: list[list[int]], likely: list[list[float]]) -> dict[str, Array]:
        inputs = {
            "characters": np.array(steps, np.int32)[:, np.newaxis],
            "likely": np.array(likely, np.float32)[:, np.newaxis],
            "boxes": np.arange(len(steps) * 8, dtype=np.int32).reshape(-1, 4, 2),
        }
        return spell.execute(inputs, {"score_threshold": "0.5"}, ["", "a", "b", "é", " "])

    return spelled_by


def test_steps_become_text_above_the_score_threshold(spelled: Callable[..., dict[str, Array]]) -> None:
    outputs = spelled([[1, 1, 0, 1, 2], [3, 4, 1, 0, 0]], [[0.9, 0.1, 0.1, 0.8, 0.7], [0.6, 0.9, 0.9, 0.0, 0.0]])
    assert [bytes(row).rstrip(b"\0").decode() for row in outputs["texts_string"]] == ["aab", "é a"]
    np.testing.assert_allclose(outputs["scores"], [0.8, 0.8])
    np.testing.assert_array_equal(outputs["boxes"][1].reshape(-1), np.arange(8, 16))
    outputs = spelled([[1, 0], [2, 0], [0, 0]], [[0.3, 0.9], [0.9, 0.9], [0.9, 0.9]])
    assert [bytes(row).rstrip(b"\0") for row in outputs["texts_string"]] == [b"b"]
    assert outputs["boxes"].tolist() == [np.arange(8, 16).reshape(4, 2).tolist()]
    nothing = spelled([[0, 0]], [[0.9, 0.9]])
    assert nothing["texts_string"].shape[0] == nothing["scores"].shape[0] == nothing["boxes"].shape[0] == 0


def test_the_characters_are_those_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "characters.txt").write_text("x\ny\n", encoding="utf-8")
    monkeypatch.setattr(spell, "__file__", str(tmp_path / "spell.py"))
    assert spell.initialize({}) == ["", "x", "y", " "]
