from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from paddle_serving_app import reader
from paddle_serving_app.reader import ChineseBertReader, IMDBDataset, LACReader, SentaReader
from paddle_serving_app.reader.batching import pad_batch_data, prepare_batch_data
from paddle_serving_app.reader.bert_base_reader import BertBaseReader
from paddle_serving_app.reader.functional import crop
from paddle_serving_app.reader.image_reader import generate_colormap
from paddle_serving_app.reader.lac_reader import load_kv_dict
from paddle_serving_app.reader.ocr_reader import CharacterOps, CTCLabelDecode
from paddle_serving_app.reader.tokenization import (
    BasicTokenizer,
    CharTokenizer,
    FullTokenizer,
    WordpieceTokenizer,
    convert_to_unicode,
    load_vocab,
)

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


def _image(height: int, width: int) -> NDArray[np.uint8]:
    rows, columns = np.mgrid[:height, :width]
    return np.stack([rows, columns, rows + columns], 2).astype(np.uint8)


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    file = tmp_path / "picture.png"
    cv2.imwrite(str(file), _image(30, 40))
    return file


def test_images_are_read_from_files_urls_bytes_and_base64(picture: Path) -> None:
    data = picture.read_bytes()
    for found in (
        reader.File2Image()(str(picture)),
        reader.URL2Image()(picture.as_uri()),
        reader.String2Image()(data),
        reader.Base64ToImage()(base64.b64encode(data).decode()),
    ):
        np.testing.assert_array_equal(np.asarray(found), _image(30, 40))
    assert reader.String2Image()(b"no image") is None
    with pytest.raises(FileNotFoundError):
        reader.File2Image()("missing.png")


def test_the_steps_of_a_classifier(picture: Path) -> None:
    steps: list[Any] = [
        reader.File2Image(),
        reader.CenterCrop(20),
        reader.RGB2BGR(),
        reader.Transpose((2, 0, 1)),
        reader.Div(255),
        reader.Normalize(MEAN, STD, True),
    ]
    seen = reader.Sequential(steps)(str(picture))
    assert (seen.shape, seen.dtype) == ((3, 20, 20), np.float32)
    corner = (np.array([15, 10, 5]) / 255 - MEAN) / STD
    np.testing.assert_allclose(seen[:, 0, 0], corner, rtol=1e-5)
    assert repr(steps[1]) == "CenterCrop(size=20)"


@pytest.mark.parametrize(
    ("resize", "shape"),
    [
        (reader.Resize(15), (15, 20, 3)),
        (reader.Resize((8, 6)), (6, 8, 3)),
        (reader.Resize(60, 40), (30, 40, 3)),
        (reader.Resize((100, 50), 70), (50, 70, 3)),
        (reader.ResizeByFactor(32, 2400), (32, 32, 3)),
        (reader.ResizeByFactor(8, 16), (8, 16, 3)),
    ],
    ids=["shorter side", "width and height", "within a limit", "both within a limit", "multiples", "small multiples"],
)
def test_images_are_resized(resize: Any, shape: tuple[int, ...]) -> None:
    assert resize(_image(30, 40)).shape == shape


@pytest.mark.parametrize(("side", "fitted"), [(64, 64), (95, 32), (96, 96), (130, 96), (33, 32), (1, 32)], ids=str)
def test_sides_are_rounded_to_multiples(side: int, fitted: int) -> None:
    assert reader.ResizeByFactor(32, 960)(_image(side, 64)).shape == (fitted, 64, 3)
    assert reader.ResizeByFactor(32, 960)(_image(2, 1920)).shape == (32, 960, 3)


def test_values_of_single_steps() -> None:
    given = _image(5, 7)
    kept = given.copy()
    np.testing.assert_array_equal(reader.BGR2RGB()(given)[..., 0], given[..., 2])
    assert reader.Div(2.0)(given)[3, 1].tolist() == [1.5, 0.5, 2.0]
    assert reader.Normalize([1, 2, 3], [2, 4, 8])(given)[3, 2].tolist() == [1.0, 0.0, 0.25]
    padded = reader.PadStride(4)(given.transpose(2, 0, 1))
    assert padded.shape == (3, 8, 8)
    assert padded.dtype == np.float32
    assert (padded[:, :5, :7] == given.transpose(2, 0, 1)).all()
    assert padded.sum() == given.sum()
    assert reader.PadStride(0)(given) is given
    assert reader.Lambda(len)(given) == 5
    with pytest.raises(TypeError, match="takes a function, got int"):
        reader.Lambda(3)  # type: ignore[arg-type]
    np.testing.assert_array_equal(given, kept)
    cut = crop(_image(9, 12), 5, center=False)
    assert cut.shape == (5, 5, 3)
    assert (np.diff(cut[:, 0, 0].astype(int)) == 1).all()


def test_the_steps_of_a_detector_record_size_and_scale(picture: Path) -> None:
    steps: list[Any] = [
        reader.DetectionFile2Image(),
        reader.DetectionResize([60, 70], keep_ratio=True),
        reader.DetectionNormalize(MEAN, STD, True),
        reader.DetectionTranspose((2, 0, 1)),
        reader.DetectionPadStride(32),
    ]
    seen, info = reader.DetectionSequential(steps)(str(picture))
    assert (seen.shape, seen.dtype) == ((3, 64, 96), np.float32)
    assert info["im_shape"].tolist() == [52, 70]
    np.testing.assert_allclose(info["scale_factor"], [1.75, 1.75])
    np.testing.assert_allclose(seen[:, 0, 0], (np.zeros(3) - MEAN) / STD, rtol=1e-5)
    assert (seen[:, 52:] == 0).all()


def test_single_steps_of_detection(tmp_path: Path) -> None:
    stretched, info = reader.DetectionResize([60, 20], keep_ratio=False)(_image(30, 40), {})
    assert (stretched.shape, info) == ((60, 20, 3), info)
    assert info is not None
    assert info["scale_factor"].tolist() == [2.0, 0.5]
    assert reader.DetectionResize(15)(_image(30, 45))[0].shape == (10, 15, 3)
    turned, nothing = reader.DetectionBGR2RGB()(_image(2, 3))
    assert (turned[1, 2].tolist(), nothing) == ([3, 2, 1], None)
    assert reader.DetectionDiv(2)(_image(2, 3))[0][1, 2].tolist() == [0.5, 1.0, 1.5]
    assert reader.DetectionNormalize([1, 1, 1], [2, 2, 2], False)(_image(2, 3))[0][1, 2].tolist() == [0.0, 0.5, 1.0]
    assert reader.DetectionPadStride()(_image(2, 3))[0].shape == (2, 3, 3)
    (tmp_path / "x").write_text("no image")
    with pytest.raises(ValueError, match="x is not an image that OpenCV can read"):
        reader.DetectionFile2Image()(tmp_path / "x")


def test_image_reader_equals_the_single_steps(picture: Path) -> None:
    data = picture.read_bytes()
    steps: list[Any] = [
        reader.String2Image(),
        reader.Resize(32),
        reader.CenterCrop(16),
        reader.RGB2BGR(),
        reader.Transpose((2, 0, 1)),
        reader.Div(255),
        reader.Normalize(MEAN, STD, True),
    ]
    found = reader.ImageReader((3, 16, 16), resize_short_size=32).process_image(data)
    np.testing.assert_allclose(np.asarray(found), reader.Sequential(steps)(data), rtol=1e-6)
    whole = reader.ImageReader((3, 0, 0)).process_image(data)
    assert whole is not None
    assert whole.shape == (3, 30, 40)
    assert reader.ImageReader().process_image(b"no image") is None


def _video(count: int) -> dict[str, Any]:
    frames = [np.full((6, 8, 3), number, np.uint8) for number in range(count)]
    return {"format": "video", "backend": "cv2", "frames": frames, "frames_len": count}


def _numbers(results: dict[str, Any]) -> list[int]:
    return [int(np.asarray(image)[0, 0, 0]) for image in results["imgs"]]


@pytest.mark.parametrize(
    ("sampler", "chosen"),
    [
        (reader.Sampler(4, 1, valid_mode=True), [4, 14, 24, 34]),
        (reader.Sampler(4, 2, valid_mode=True), [4, 5, 14, 15, 24, 25, 34, 35]),
        (reader.Sampler(4, 1, valid_mode=True, select_left=True), [5, 15, 25, 35]),
        (reader.Sampler(2, 3, frame_interval=4, valid_mode=True), [7, 11, 15, 21, 25, 29]),
        (reader.Sampler(3, 1, linspace_sample=True), [0, 19, 39]),
        (reader.Sampler(50, 1, valid_mode=True), [*range(40), *range(10)]),
        (reader.Sampler(50, 1, valid_mode=True, select_left=True), [0] * 50),
    ],
    ids=["middles", "two of each", "left", "intervals", "even", "more than there are", "left of more"],
)
def test_sampled_frames_of_a_video(sampler: reader.Sampler, chosen: list[int]) -> None:
    assert _numbers(sampler(_video(40))) == chosen


@pytest.mark.parametrize(
    ("sampler", "part"),
    [
        (reader.Sampler(4, 1), 10),
        (reader.Sampler(4, 1, select_left=True), 10),
        (reader.Sampler(4, 1, frame_interval=2), 9),
    ],
    ids=["anywhere", "left", "intervals"],
)
def test_random_samples_are_one_per_segment(sampler: reader.Sampler, part: int) -> None:
    assert [number // part for number in _numbers(sampler(_video(40)))] == [0, 1, 2, 3]


def test_dense_samples_and_ten_crops() -> None:
    assert _numbers(reader.Sampler(4, 1, dense_sample=True)(_video(40))) == [1, 17, 33, 9]
    assert len(_numbers(reader.Sampler(4, 1, dense_sample=True, valid_mode=True)(_video(200)))) == 40
    image = Image.fromarray(np.arange(8, dtype=np.uint8)[None, :, None].repeat(8, 0).repeat(3, 2))
    crops = reader.TenCrop(4)({"imgs": [image]})["imgs"]
    assert [int(np.asarray(crop)[0, 0, 0]) for crop in crops] == [0, 3, 4, 7, 0, 3, 4, 7, 2, 5]


def test_frames_are_read_from_a_folder(tmp_path: Path) -> None:
    for number in range(1, 5):
        cv2.imwrite(str(tmp_path / f"{number:05}.png"), np.full((6, 8, 3), number, np.uint8))
    results = {"format": "frame", "frame_dir": str(tmp_path), "suffix": "{:05}.png", "frames_len": 4}
    assert _numbers(reader.Sampler(2, 1, valid_mode=True)(results)) == [1, 3]
    with pytest.raises(NotImplementedError, match="video and frame, got 'MRI'"):
        reader.Sampler(2, 1)({"format": "MRI", "frames_len": 4})


def test_a_video_file_becomes_an_input(tmp_path: Path) -> None:
    file = tmp_path / "v.avi"
    writer = cv2.VideoWriter(str(file), cv2.VideoWriter.fourcc(*"MJPG"), 10, (120, 90))
    for _ in range(12):
        writer.write(np.full((90, 120, 3), (200, 100, 50), np.uint8))
    writer.release()
    results: dict[str, Any] = {"filename": str(file)}
    steps: list[Any] = [
        reader.VideoDecoder(),
        reader.Sampler(3, 1, valid_mode=True, select_left=True),
        reader.Scale(64, do_round=True, backend="cv2"),
        reader.TenCrop(56),
        reader.Image2Array(),
        reader.Normalization([0.5, 0.5, 0.5], [0.25, 0.25, 0.25]),
    ]
    for step in steps:
        results = step(results)
    assert results["frames_len"] == 12
    assert results["imgs"].shape == (30, 3, 56, 56)
    expected = (np.array([50, 100, 200]) / 255 - 0.5) / 0.25
    np.testing.assert_allclose(results["imgs"].mean((0, 2, 3)), expected, atol=0.1)
    with pytest.raises(NotImplementedError, match="cv2, got 'pyav'"):
        reader.VideoDecoder("pyav")


def test_frames_are_scaled_and_transposed() -> None:
    image = Image.fromarray(np.zeros((100, 50, 3), np.uint8))
    assert reader.Scale(24)({"imgs": [image]})["imgs"][0].size == (24, 32)
    assert reader.Scale(24, fixed_ratio=False)({"imgs": [image]})["imgs"][0].size == (24, 24)
    kept = reader.Scale(24, fixed_ratio=False, keep_ratio=True, backend="cv2")(
        {"imgs": [np.zeros((50, 100, 3), np.uint8)]}
    )
    assert kept["imgs"][0].shape == (24, 48, 3)
    assert reader.Image2Array(data_format="cthw")({"imgs": [image, image]})["imgs"].shape == (3, 2, 100, 50)
    assert reader.Image2Array(transpose=False)({"imgs": [image]})["imgs"].shape == (1, 100, 50, 3)
    whole = reader.Normalization([100, 0, 0], [2, 1, 1], inplace=True)({"imgs": [np.full((1, 1, 3), 50, np.uint8)]})
    assert whole["imgs"].tolist() == [[[[-25.0, 50.0, 50.0]]]]
    for wrong in (
        lambda: reader.Scale(1, keep_ratio=True),
        lambda: reader.Scale(1, backend="x"),
        lambda: reader.Image2Array(data_format="x"),
    ):
        with pytest.raises(ValueError, match=r"true together|must be"):
            wrong()
    with pytest.raises(TypeError, match=r"mean must be a list or a tuple, got int"):
        reader.Normalization(1, [1])  # type: ignore[arg-type]


ROWS = np.array([[1, 0.75, 10, 20, 30, 40], [0, 0.25, 1, 2, 3, 4], [1, 0.5, 0, 0, 0, 0]], np.float32)


@pytest.fixture
def labels(tmp_path: Path) -> str:
    file = tmp_path / "labels.txt"
    file.write_text("cat\ndog \n")
    return str(file)


def test_rows_of_detections_become_boxes(tmp_path: Path, labels: str) -> None:
    post = reader.RCNNPostprocess(labels, str(tmp_path / "out"))
    outputs = {"im_shape": np.ones((1, 2)), "boxes": ROWS, "boxes.lod": [0, 2]}
    assert post(outputs, visualize=False) == [
        {"category_id": 1, "bbox": [10.0, 20.0, 21.0, 21.0], "score": 0.75},
        {"category_id": 0, "bbox": [1.0, 2.0, 3.0, 3.0], "score": 0.25},
    ]
    assert post.catid2name == {0: "cat", 1: "dog"}
    assert (tmp_path / "out").is_dir()
    post = reader.RCNNPostprocess(labels, str(tmp_path))
    assert post({"boxes": np.array([[-1.0]])}, visualize=False) == []
    with pytest.raises(ValueError, match=r"boxes are \[number, 6\], got mask \[2, 5\]"):
        post({"mask": np.zeros((2, 5))}, visualize=False)


@pytest.mark.parametrize("offsets", [{}, {"boxes.lod": np.array([[0, 3]])}], ids=["none", "two-dimensional"])
def test_offsets_may_be_missing_or_nested(tmp_path: Path, labels: str, offsets: dict[str, Any]) -> None:
    found = reader.RCNNPostprocess(labels, str(tmp_path))(
        {"boxes": ROWS, "number": np.array([3]), **offsets}, visualize=False
    )
    assert [box["category_id"] for box in found] == [1, 0, 1]


def test_boxes_are_drawn(tmp_path: Path, labels: str) -> None:
    photo = tmp_path / "photo.png"
    cv2.imwrite(str(photo), np.full((64, 64, 3), 255, np.uint8))
    found = reader.RCNNPostprocess(labels, str(tmp_path / "out"))({"image": str(photo), "boxes": ROWS[:2]})
    assert json.loads((tmp_path / "out" / "bbox.json").read_text()) == found
    drawn = np.asarray(cv2.imread(str(tmp_path / "out" / "photo.png")))
    assert drawn[30, 10].tolist() == [0, 0, 128]
    assert drawn[3, 1].tolist() == [255, 255, 255]
    assert np.asarray(cv2.imread(str(photo))).min() == 255


def test_relative_boxes_of_faces_become_pixels(tmp_path: Path, labels: str) -> None:
    post = reader.BlazeFacePostprocess(labels, str(tmp_path))
    rows = np.array([[0, 0.5, 0.25, 0.5, 1.5, 0.75]], np.float32)
    assert post({"im_shape": np.array([100, 200]), "boxes": rows}, visualize=False) == [
        {"category_id": 0, "bbox": [50.0, 50.0, 150.0, 25.0], "score": 0.5}
    ]


def test_masks_are_written_as_images_in_colours_of_pascal_voc(tmp_path: Path) -> None:
    photo = tmp_path / "photo.png"
    cv2.imwrite(str(photo), np.zeros((20, 30, 3), np.uint8))
    mask = np.zeros((1, 512, 512), np.int64)
    mask[:, 256:] = 2
    reader.SegPostprocess(3)({"filename": str(photo), "mask": mask, "mask.lod": [0, 1]})
    assert np.asarray(cv2.imread(str(tmp_path / "photo_png_mask.png"), -1))[[0, 511], 0].tolist() == [0, 2]
    coloured = np.asarray(cv2.imread(str(tmp_path / "photo_png_result.png")))
    assert coloured.shape == (20, 30, 3)
    assert coloured[[0, 19], 0].tolist() == [[0, 0, 0], [0, 128, 0]]
    with pytest.raises(ValueError, match="needs filename and a mask, got filename"):
        reader.SegPostprocess(3)({"filename": "x"})
    with pytest.raises(ValueError, match="is not an image"):
        reader.SegPostprocess(3)({"filename": str(tmp_path / "none.png"), "mask": mask})
    colours = generate_colormap(22)
    assert colours[:5] == [[0, 0, 0], [128, 0, 0], [0, 128, 0], [128, 128, 0], [0, 0, 128]]
    assert colours[20] == [0, 64, 128]


PARAMS = {"thresh": 0.3, "box_thresh": 0.6, "max_candidates": 1000, "unclip_ratio": 1.5, "min_size": 3}


def _box(left: float, top: float, right: float, bottom: float) -> NDArray[np.float32]:
    return np.array([[left, top], [right, top], [right, bottom], [left, bottom]], np.float32)


def _likely(height: int, width: int, *regions: tuple[int, int, int, int, float]) -> NDArray[np.float32]:
    found = np.zeros((1, 1, height, width), np.float32)
    for left, top, right, bottom, value in regions:
        found[0, 0, top : bottom + 1, left : right + 1] = value
    return found


def test_likely_regions_become_boxes_of_the_image() -> None:
    found = reader.DBPostProcess(PARAMS)(_likely(100, 200, (40, 30, 100, 50, 0.9)), [[0.5, 2.0]])
    # 60 by 20 pixels: 1200 * 1.5 / 160 = 11.25 on every side, in whole pixels of the map.
    assert found[0].dtype == np.int16
    assert found[0].tolist() == [[[14, 38], [55, 38], [55, 122], [14, 122]]]


def test_thin_or_improbable_regions_are_dropped() -> None:
    post = reader.DBPostProcess(PARAMS)
    assert post(_likely(60, 60, (5, 5, 50, 6, 0.9), (5, 20, 50, 40, 0.5)), [[1, 1]]) == [[]]
    (kept,) = post(_likely(60, 90, (5, 5, 80, 15, 0.7), (5, 40, 50, 45, 0.5)), [[1, 1]])
    assert len(kept) == 1
    assert len(reader.DBPostProcess({**PARAMS, "max_candidates": 0})(_likely(9, 9), [[1, 1]])[0]) == 0
    assert "unclip_ratio=1.5" in repr(post)


def test_a_slanted_region_keeps_its_slant() -> None:
    slanted = _likely(120, 160)
    corners = np.rint(cv2.boxPoints(((80, 60), (90, 20), 30))).astype(np.int32)
    cv2.fillPoly(slanted[0, 0], [corners], (0.9,))
    ((found,),) = reader.DBPostProcess(PARAMS)(slanted, [[1, 1]])
    np.testing.assert_allclose(found.mean(0), [80, 60], atol=1)
    along, down = found[1] - found[0], found[3] - found[0]
    np.testing.assert_allclose(np.degrees(np.arctan2(along[1], along[0])), 30, atol=2)
    np.testing.assert_allclose([np.hypot(*along), np.hypot(*down)], [90 + 24.5, 20 + 24.5], atol=2)


def test_polygons_are_enlarged_with_round_corners() -> None:
    post = reader.DBPostProcess({**PARAMS, "unclip_ratio": 2})
    for corners in (_box(10, 10, 30, 20), _box(10, 10, 30, 20)[::-1]):
        (grown,) = post.unclip(corners)
        far = 200 * 2 / 60
        np.testing.assert_allclose([grown.min(0), grown.max(0)], [[10 - far, 10 - far], [30 + far, 20 + far]], atol=0.5)
        to_corner = np.abs(grown - np.clip(grown, [10, 10], [30, 20]))
        np.testing.assert_allclose(np.hypot(*to_corner.T), far, atol=0.75)


def test_boxes_are_filtered_and_sorted() -> None:
    shuffled = _box(50, 12, 90, 30)[[2, 0, 3, 1]]
    filtered = reader.FilterBoxes(10, 10)(
        [_box(0, 0, 10, 40), shuffled, _box(-5, 10, 30, 33.7), _box(5, 60, 300, 90)], [80, 100]
    )
    assert filtered.tolist() == [
        _box(50, 12, 90, 30).tolist(), _box(0, 10, 30, 33).tolist(), _box(5, 60, 99, 79).tolist()
    ]  # fmt: skip
    assert [found[0].tolist() for found in reader.SortedBoxes()(filtered)] == [[0, 10], [50, 12], [5, 60]]
    assert reader.SortedBoxes()(np.array([_box(50, 10, 60, 20), _box(0, 19, 9, 30)]))[0][0].tolist() == [0, 19]
    assert reader.FilterBoxes(10, 10)([], [80, 100]).shape == (0,)


def test_boxes_are_cropped_and_rotated() -> None:
    image = np.zeros((60, 80, 3), np.uint8)
    image[10:20, 20:50] = (10, 20, 30)
    image[10:20, 20] = 255
    corners = _box(20, 10, 50, 20)
    cut = reader.GetRotateCropImage()(image, corners)
    np.testing.assert_array_equal(cut, image[10:20, 20:50])
    assert corners.tolist() == _box(20, 10, 50, 20).tolist()
    upright = reader.GetRotateCropImage()(image.transpose(1, 0, 2), _box(10, 20, 20, 50))
    assert upright.shape == (10, 30, 3)
    assert (upright[:, 0] == 255).all()


@pytest.fixture
def ocr_reader(tmp_path: Path) -> reader.OCRReader:
    file = tmp_path / "keys.txt"
    file.write_text("你\n好\r\na\nb\n", encoding="utf-8")
    return reader.OCRReader(char_dict_path=str(file))


def test_lines_are_resized_and_padded(ocr_reader: reader.OCRReader) -> None:
    line = np.full((16, 40, 3), 255, np.uint8)
    made = ocr_reader.resize_norm_img(line, 5)
    assert made.shape == (3, 32, 160)
    assert made.dtype == np.float32
    assert (made[:, :, :80] == 1).all()
    assert (made[:, :, 80:] == 0).all()
    assert ocr_reader.resize_norm_img(line, 1).shape == (3, 32, 32)
    assert ocr_reader.preprocess([line, np.zeros((10, 60, 3), np.uint8)]).shape == (3, 32, 192)
    fixed = reader.OCRReader(char_type="en", image_shape=[3, 32, 100])
    assert fixed.resize_norm_img(line, 9).shape == (3, 32, 100)


def test_probabilities_are_decoded_to_text(ocr_reader: reader.OCRReader) -> None:
    rows = np.zeros((2, 6, 6), np.float32)
    for step, (character, value) in enumerate([(1, 0.5), (1, 0.9), (0, 1), (1, 0.75), (5, 1), (3, 0.25)]):
        rows[0, step, character] = value
    rows[1, :, 0] = 1
    (text, score), (nothing, no_score) = ocr_reader.postprocess_ocrv2({"save_infer_model/scale_0.tmp_1": rows})
    assert (text, float(score)) == ("你你 a", 0.625)
    assert nothing == ""
    assert np.isnan(no_score)
    assert ocr_reader.postprocess_ocrv2({"likely": rows, "count": np.ones(2)})[0][0] == text
    with pytest.raises(ValueError, match=r"one output must be .*, got one, other"):
        ocr_reader.postprocess_ocrv2({"one": rows, "other": rows})


def test_decoded_classes_become_text(ocr_reader: reader.OCRReader) -> None:
    likely_rows = np.array([[0.5, 0, 0, 0, 0.1], [0, 0, 0, 0, 1], [0, 0.25, 0, 0, 0.2]])
    outputs: dict[str, Any] = {
        "ctc_greedy_decoder_0.tmp_0": [[0], [1], [2]], "ctc_greedy_decoder_0.tmp_0.lod": [0, 2, 3],
        "softmax_0.tmp_0": likely_rows, "softmax_0.tmp_0.lod": [0, 1, 3],
    }  # fmt: skip
    assert ocr_reader.postprocess(outputs) == [["你好"], ["a"]]
    assert ocr_reader.postprocess(outputs, with_score=True) == [["你好", 0.5], ["a", 0.25]]


def test_characters_are_encoded_and_decoded() -> None:
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
def test_unknown_character_types_are_refused(kind: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        CTCLabelDecode({"character_type": kind})
    with pytest.raises(ValueError, match="must be ch, en or en_sensitive, got 'x'"):
        CharacterOps({"character_type": "x", "loss_type": "ctc"})


WIDE_ONE = "\uff11"
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "un", "##aff", "##able", "你", "好", ",", "cafe"]


@pytest.fixture
def vocabulary(tmp_path: Path) -> str:
    file = tmp_path / "vocab.txt"
    file.write_text("\n".join(VOCABULARY), encoding="utf-8")
    return str(file)


def test_bert_inputs_of_a_sentence(vocabulary: str) -> None:
    reader = ChineseBertReader({"vocab_file": vocabulary, "max_seq_len": 10})
    assert reader.process("Unaffable, 你好 café".encode()) == {
        "input_ids": [2, 5, 6, 7, 10, 8, 9, 11, 0, 0],
        "position_ids": [0, 1, 2, 3, 4, 5, 6, 7, 0, 0],
        "segment_ids": [0] * 10,
        "input_mask": [1] * 8 + [0] * 2,
    }
    assert reader.process("你" * 30)["input_ids"] == [2] + [8] * 8 + [0]
    reader.set_feed_keys(["a", "b", "c", "d"])
    assert list(reader.process("你")) == reader.get_feed_keys() == ["a", "b", "c", "d"]
    with pytest.raises(ValueError, match=r"needs .*vocab_file"):
        ChineseBertReader()
    with pytest.raises(NotImplementedError):
        BertBaseReader().process("x")


def test_tokenizers_split_words_and_pieces(vocabulary: str, tmp_path: Path) -> None:
    basic = BasicTokenizer()
    assert basic.tokenize("Café\t(你好)\x00 a-b\u00a0c\ufffd") == ["cafe", "(", "你", "好", ")", "a", "-", "b", "c"]
    assert BasicTokenizer(do_lower_case=False).tokenize("Café") == ["Café"]
    full = FullTokenizer(vocabulary)
    assert full.tokenize("unaff xyz 你") == ["un", "##aff", "[UNK]", "你"]
    assert full.convert_ids_to_tokens(full.convert_tokens_to_ids(["un", "你"])) == ["un", "你"]
    assert CharTokenizer(vocabulary).tokenize("UN 好") == ["un", "好"]
    assert WordpieceTokenizer({"a": 0, "##a": 1}, max_input_chars_per_word=3).tokenize("aaa aaaa") == [
        "a", "##a", "##a", "[UNK]"
    ]  # fmt: skip
    marked = WordpieceTokenizer({"\u2581ab": 0, "c": 1}, use_sentence_piece_vocab=True)
    assert marked.tokenize("abc") == ["\u2581ab", "c"]
    assert convert_to_unicode(b"a\xff") == "a"
    with pytest.raises(ValueError, match="str or bytes, got int"):
        convert_to_unicode(3)  # type: ignore[arg-type]
    file = tmp_path / "vocab.txt"
    file.write_text("a\t7\nb\nc\t1\t2\nd\n")
    assert load_vocab(file) == {"a": 7, "b": 1}


def test_rows_are_padded() -> None:
    rows, positions, mask, longest, count, lengths = pad_batch_data([[1, 2], [3]], 9, 3, True, True, True, True, True)
    assert rows.tolist() == [[[1], [2], [9]], [[3], [9], [9]]]
    assert positions[:, :, 0].tolist() == [[0, 1, 9], [0, 9, 9]]
    assert mask[:, :, 0].tolist() == [[1, 1, 0], [1, 0, 0]]
    assert (longest, count, lengths.tolist()) == (3, 3, [[2], [1]])
    tokens, _, _, mask, labels = prepare_batch_data([([1, 2], [0, 0], [0, 1], 7), ([3], [0], [0], 8)], 3, 2)
    assert (tokens[:, :, 0].tolist(), mask.sum(), labels.tolist()) == ([[1, 2], [3, 0]], 3, [[7], [8]])
    assert pad_batch_data([[1]], max_seq_len=2).dtype == np.int64
    with pytest.raises(ValueError, match="max_seq_len is 1, got 2"):
        pad_batch_data([[1, 2]], max_seq_len=1)


def test_reviews_become_words_and_batches(tmp_path: Path) -> None:
    (tmp_path / "imdb.vocab").write_text("the\nmovie\n,\ngood\n")
    dataset = IMDBDataset()
    dataset.load_resource(tmp_path / "imdb.vocab")
    assert dataset.get_words_only("The movie,<br />GOOD fun") == [0, 1, 2, 3, 4]
    assert dataset.get_words_and_label("the | movie | 1\n") == ([0, 4, 1], [1])
    assert list(dataset.generate_sample("good|0")()) == [(("words", [3]), ("label", [0]))]
    (tmp_path / "imdb.vocab").write_text("")
    for name, labels in (("a", range(5)), ("b", range(5, 7))):
        (tmp_path / name).write_text("".join(f"x|{label}\n" for label in labels))
    dataset = IMDBDataset()
    dataset.load_resource(tmp_path / "imdb.vocab")
    read = dataset.infer_reader([tmp_path / "a", tmp_path / "b"], batch=3, buf_size=4)
    for _ in range(2):
        batches = list(read())
        assert [len(batch) for batch in batches] == [3, 3, 1]
        assert sorted(label[0] for batch in batches for _, label in batch) == list(range(7))


def test_chinese_words_are_segmented(tmp_path: Path) -> None:
    (tmp_path / "word.dic").write_text("0\t你\n1\t好\n2\t1\n3\tOOV\n", encoding="utf-8")
    (tmp_path / "tag.dic").write_text("0\tn-B\n1\tn-I\n2\tO\n")
    (tmp_path / "q2b.dic").write_text(f"{WIDE_ONE}\t1\nno pair\n", encoding="utf-8")
    reader = LACReader(str(tmp_path))
    assert (reader.vocab_size, reader.num_labels) == (4, 3)
    assert reader.process(f" 你好{WIDE_ONE}x \n".encode()) == [0, 1, 2, 3]
    assert reader.label_to_ids(["n-I", "x"]) == [1, 2]
    assert reader.parse_result("你好世界", np.array([[0], [1], [0], [1]])) == ["你好", "世界"]
    assert reader.parse_result("你好世界", np.array([[0], [2], [2], [0]])) == ["你", "好世", "界"]
    (tmp_path / "tag.dic").write_text("0\tx\n0\ty\n")
    with pytest.raises(KeyError, match="the key '0' twice"):
        load_kv_dict(tmp_path / "tag.dic")
    with pytest.raises(FileNotFoundError, match=r"needs the folder .*nowhere with word\.dic"):
        LACReader(str(tmp_path / "nowhere"))


def test_unknown_words_have_the_number_after_the_vocabulary(tmp_path: Path) -> None:
    file = tmp_path / "senta.txt"
    file.write_text("你\t1\n0\n\n世界\t9\n", encoding="utf-8")
    assert SentaReader(str(file)).process(["世界", "你", "", "x", "<unk>"]) == [9, 1, 0, 4, 3]
    with pytest.raises(FileNotFoundError, match="needs the vocabulary"):
        SentaReader(str(tmp_path / "missing"))
