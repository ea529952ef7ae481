from __future__ import annotations

from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from PIL import Image

from paddle_serving_app.reader import Image2Array, Normalization, Sampler, Scale, TenCrop, VideoDecoder


def video(count: int) -> dict[str, Any]:
    """Give frames that tell their numbers."""
    frames = [np.full((6, 8, 3), number, np.uint8) for number in range(count)]
    return {"format": "video", "backend": "cv2", "frames": frames, "frames_len": count}


def numbers(results: dict[str, Any]) -> list[int]:
    """Tell which frames were chosen."""
    return [int(np.asarray(image)[0, 0, 0]) for image in results["imgs"]]


@pytest.mark.parametrize(
    ("sampler", "chosen"),
    [
        (Sampler(4, 1, valid_mode=True), [4, 14, 24, 34]),
        (Sampler(4, 2, valid_mode=True), [4, 5, 14, 15, 24, 25, 34, 35]),
        (Sampler(4, 1, valid_mode=True, select_left=True), [5, 15, 25, 35]),
        (Sampler(2, 3, frame_interval=4, valid_mode=True), [7, 11, 15, 21, 25, 29]),
        (Sampler(3, 1, linspace_sample=True), [0, 19, 39]),
        (Sampler(50, 1, valid_mode=True), [*range(40), *range(10)]),
        (Sampler(50, 1, valid_mode=True, select_left=True), [0] * 50),
    ],
    ids=["middles", "two of each", "left", "intervals", "even", "more than there are", "left of more"],
)
def test_frames_of_a_video(sampler: Sampler, chosen: list[int]) -> None:
    """Each way of choosing has its frames."""
    assert numbers(sampler(video(40))) == chosen


@pytest.mark.parametrize(
    ("sampler", "part"),
    [(Sampler(4, 1), 10), (Sampler(4, 1, select_left=True), 10), (Sampler(4, 1, frame_interval=2), 9)],
    ids=["anywhere", "left", "intervals"],
)
def test_any_frame_of_each_part(sampler: Sampler, part: int) -> None:
    """Without ``valid_mode`` there is one frame of each part, in order."""
    assert [number // part for number in numbers(sampler(video(40)))] == [0, 1, 2, 3]


def test_dense_frames() -> None:
    """Parts of 64 frames are taken, from ten places if all is to be seen."""
    assert numbers(Sampler(4, 1, dense_sample=True)(video(40))) == [1, 17, 33, 9]
    assert len(numbers(Sampler(4, 1, dense_sample=True, valid_mode=True)(video(200)))) == 40


def test_images_of_a_folder(tmp_path: Path) -> None:
    """Files of frames are counted from one."""
    for number in range(1, 5):
        cv2.imwrite(str(tmp_path / f"{number:05}.png"), np.full((6, 8, 3), number, np.uint8))
    results = {"format": "frame", "frame_dir": str(tmp_path), "suffix": "{:05}.png", "frames_len": 4}
    assert numbers(Sampler(2, 1, valid_mode=True)(results)) == [1, 3]
    with pytest.raises(NotImplementedError, match="video and frame, got 'MRI'"):
        Sampler(2, 1)({"format": "MRI", "frames_len": 4})


def test_from_a_file_to_an_input(tmp_path: Path) -> None:
    """A video becomes ten crops of each frame, normalized, with time first."""
    file = tmp_path / "v.avi"
    writer = cv2.VideoWriter(str(file), cv2.VideoWriter.fourcc(*"MJPG"), 10, (120, 90))
    for _ in range(12):
        writer.write(np.full((90, 120, 3), (200, 100, 50), np.uint8))
    writer.release()
    results: dict[str, Any] = {"filename": str(file)}
    steps: list[Any] = [
        VideoDecoder(),
        Sampler(3, 1, valid_mode=True, select_left=True),
        Scale(64, do_round=True, backend="cv2"),
        TenCrop(56),
        Image2Array(),
        Normalization([0.5, 0.5, 0.5], [0.25, 0.25, 0.25]),
    ]
    for step in steps:
        results = step(results)
    assert results["frames_len"] == 12
    assert results["imgs"].shape == (30, 3, 56, 56)
    expected = (np.array([50, 100, 200]) / 255 - 0.5) / 0.25
    np.testing.assert_allclose(results["imgs"].mean((0, 2, 3)), expected, atol=0.1)
    with pytest.raises(NotImplementedError, match="cv2, got 'pyav'"):
        VideoDecoder("pyav")


def test_sizes_and_axes() -> None:
    """Images are scaled, cropped and turned as asked."""
    image = Image.fromarray(np.zeros((100, 50, 3), np.uint8))
    assert Scale(24)({"imgs": [image]})["imgs"][0].size == (24, 32)
    assert Scale(24, fixed_ratio=False)({"imgs": [image]})["imgs"][0].size == (24, 24)
    kept = Scale(24, fixed_ratio=False, keep_ratio=True, backend="cv2")({"imgs": [np.zeros((50, 100, 3), np.uint8)]})
    assert kept["imgs"][0].shape == (24, 48, 3)
    assert Image2Array(data_format="cthw")({"imgs": [image, image]})["imgs"].shape == (3, 2, 100, 50)
    assert Image2Array(transpose=False)({"imgs": [image]})["imgs"].shape == (1, 100, 50, 3)
    whole = Normalization([100, 0, 0], [2, 1, 1], inplace=True)({"imgs": [np.full((1, 1, 3), 50, np.uint8)]})
    assert whole["imgs"].tolist() == [[[[-25.0, 50.0, 50.0]]]]
    for wrong in (
        lambda: Scale(1, keep_ratio=True),
        lambda: Scale(1, backend="x"),
        lambda: Image2Array(data_format="x"),
    ):
        with pytest.raises(ValueError, match=r"true together|must be"):
            wrong()
    with pytest.raises(TypeError, match=r"mean must be a list or a tuple, got int"):
        Normalization(1, [1])  # type: ignore[arg-type]


def test_corners_and_the_middle() -> None:
    """Five squares of an image come as they are, and mirrored."""
    image = Image.fromarray(np.arange(8, dtype=np.uint8)[None, :, None].repeat(8, 0).repeat(3, 2))
    crops = TenCrop(4)({"imgs": [image]})["imgs"]
    assert [int(np.asarray(crop)[0, 0, 0]) for crop in crops] == [0, 3, 4, 7, 0, 3, 4, 7, 2, 5]
