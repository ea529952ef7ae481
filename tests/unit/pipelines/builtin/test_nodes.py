from __future__ import annotations

import math
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from ovmstrio.core.errors import ConfigError, CustomNodeFailure
from ovmstrio.core.tensor import BY_NAME, Array
from ovmstrio.pipelines.builtin.builtin_node import BUILTIN_NAMES, builtin_name
from ovmstrio.pipelines.builtin.east_ocr import DetectedText, suppress_overlaps
from ovmstrio.pipelines.builtin.images import Box
from tests.support.pipelines import opened_builtin

HEIGHT, WIDTH = 24, 32
SIZES: dict[str, object] = {
    "original_image_width": WIDTH,
    "original_image_height": HEIGHT,
    "target_image_width": 10,
    "target_image_height": 6,
    "confidence_threshold": 0.5,
}
EAST_SIZE = 64
EAST_SIZES = SIZES | {
    "original_image_width": EAST_SIZE,
    "original_image_height": EAST_SIZE,
    "target_image_width": 12,
    "target_image_height": 8,
}
PACKAGE = "ovmstrio.pipelines.builtin."


def noise(height: int, width: int) -> Array:
    return np.random.default_rng(7).uniform(0, 255, (height, width, 3)).astype(np.float32)


@pytest.fixture
def picture() -> Array:
    return noise(HEIGHT, WIDTH)


def nchw(image: Array) -> Array:
    return np.ascontiguousarray(image.transpose(2, 0, 1)[np.newaxis])


def detections(*rows: tuple[float, ...], count: int | None = None) -> Array:
    output = np.zeros((1, 1, len(rows) if count is None else count, 7), np.float32)
    output[..., 0] = -1
    if rows:
        output[0, 0, : len(rows)] = rows
    return output


# add_one


async def test_add_one_adds_and_subtracts() -> None:
    numbers = np.arange(10, dtype=np.float32)[np.newaxis]
    plain = await opened_builtin("add_one")
    assert (await plain.execute({"input_numbers": numbers}))["output_numbers"].tolist() == [list(range(1, 11))]
    other = await opened_builtin("add_one", add_number=5, sub_number=2)
    output = (await other.execute({"input_numbers": numbers}))["output_numbers"]
    assert (output.dtype, output.tolist()) == (np.float32, [list(range(3, 13))])
    assert plain.inputs["input_numbers"].shape == plain.outputs["output_numbers"].shape == (1, 10)


async def test_invalid_inputs_fail_the_call() -> None:
    node = await opened_builtin("add_one")
    for inputs, text in (
        ({}, "input 'input_numbers' is missing"),
        ({"input_numbers": np.zeros((1, 10))}, "Expected: FP32; Actual: float64"),
        ({"input_numbers": np.zeros((1, 9), np.float32)}, r"Expected: \(1, 10\); Actual: \(1, 9\)"),
    ):
        with pytest.raises(CustomNodeFailure, match=text):
            await node.execute(inputs)


# horizontal_ocr


async def test_horizontal_ocr_cuts_boxes_out(picture: Array) -> None:
    node = await opened_builtin("horizontal_ocr", **SIZES)
    boxes = np.array([[2.7, 3, 12, 9, 0.9], [0, 0, 5, 5, 0.4], [0, 0, WIDTH, HEIGHT, 0.5]], np.float32)
    outputs = await node.execute({"image": nchw(picture), "boxes": boxes})
    crops = [cv2.resize(picture[3:9, 2:12], (10, 6)), cv2.resize(picture, (10, 6))]
    assert outputs["text_images"].shape == (2, 1, 3, 6, 10)
    for output, expected in zip(outputs["text_images"], crops, strict=True):
        np.testing.assert_array_equal(output[0].transpose(1, 2, 0), expected)
    assert outputs["text_coordinates"].tolist() == [[[2, 3, 10, 6]], [[0, 0, WIDTH, HEIGHT]]]
    assert outputs["confidence_levels"].tolist() == [[[np.float32(0.9)]], [[0.5]]]


async def test_horizontal_ocr_converts_to_grey_and_changes_layout(picture: Array) -> None:
    node = await opened_builtin(
        "horizontal_ocr",
        **SIZES,
        original_image_layout="NHWC",
        target_image_layout="NHWC",
        convert_to_gray_scale="true",
    )
    boxes = np.array([[0, 0, 20, 20, 1]], np.float32)
    output = (await node.execute({"image": picture[np.newaxis], "boxes": boxes}))["text_images"]
    expected = cv2.cvtColor(cv2.resize(picture[:20, :20], (10, 6)), cv2.COLOR_BGR2GRAY)
    np.testing.assert_array_equal(output[0, 0, :, :, 0], expected)
    assert node.outputs["text_images"].shape == (-1, 1, 6, 10, 1)
    assert node.inputs["image"].shape == (1, HEIGHT, WIDTH, 3)
    assert node.inputs["boxes"].shape == (-1, 5)


async def test_horizontal_ocr_limits_the_batch(picture: Array) -> None:
    node = await opened_builtin("horizontal_ocr", **SIZES, max_output_batch=2)
    boxes = np.array([[i, 0, i + 2, 4, 0.5 + i / 10] for i in range(4)], np.float32)
    outputs = await node.execute({"image": nchw(picture), "boxes": boxes})
    assert outputs["text_coordinates"][:, 0, 0].tolist() == [0, 1]
    empty = await node.execute({"image": nchw(picture), "boxes": np.empty((0, 5), np.float32)})
    assert {name: (array.shape, array.dtype.name) for name, array in empty.items()} == {
        "text_images": ((0, 1, 3, 6, 10), "float32"),
        "text_coordinates": ((0, 1, 4), "int32"),
        "confidence_levels": ((0, 1, 1), "float32"),
    }


@pytest.mark.parametrize(
    ("box", "text"),
    [
        ((5, 5, 5, 9), "is empty"),
        ((5, 9, 8, 5), "is empty"),
        ((-1, 0, 5, 5), "is not inside the image of 32 x 24 pixels"),
        ((0, 0, 33, 5), "is not inside the image"),
        ((0, 0, np.nan, 5), "not image coordinates"),
        ((0, 0, np.inf, 5), "not image coordinates"),
    ],
)
async def test_horizontal_ocr_fails_on_invalid_boxes(picture: Array, box: tuple[float, ...], text: str) -> None:
    node = await opened_builtin("horizontal_ocr", **SIZES)
    with pytest.raises(CustomNodeFailure, match=f"node 'node' of horizontal_ocr: .*{text}"):
        await node.execute({"image": nchw(picture), "boxes": np.array([[*box, 1]], np.float32)})


# model_zoo_intel_object_detection


async def test_object_detection_crops_detections(picture: Array) -> None:
    node = await opened_builtin("model_zoo_intel_object_detection", **SIZES, filter_label_id=3)
    rows = detections(
        (0, 3, 0.9, 0.25, 0.25, 0.5, 0.75),
        (0, 2, 0.9, 0, 0, 1, 1),
        (0, 3, 0.4, 0, 0, 1, 1),
        (1, 3, 0.9, 0, 0, 1, 1),
        (0, 3, 0.5, -0.5, 0.5, 1.5, 2),
    )
    outputs = await node.execute({"image": nchw(picture), "detection": rows})
    crops = [cv2.resize(picture[6:18, 8:16], (10, 6)), cv2.resize(picture[12:, :], (10, 6))]
    for output, expected in zip(outputs["images"], crops, strict=True):
        np.testing.assert_array_equal(output[0].transpose(1, 2, 0), expected)
    assert outputs["coordinates"].tolist() == [[[0.25, 0.25, 0.5, 0.75]], [[-0.5, 0.5, 1.5, 2]]]
    assert outputs["confidences"].tolist() == [[[np.float32(0.9)]], [[0.5]]]
    assert outputs["label_ids"].tolist() == [[[3]], [[3]]]
    assert outputs["label_ids"].dtype == np.int32


async def test_object_detection_limits_the_batch_of_all_outputs(picture: Array) -> None:
    node = await opened_builtin("model_zoo_intel_object_detection", **SIZES, max_output_batch=2, buffer_queue_size=1)
    rows = detections(*((0, i, 0.9, 0, 0, 1, 1) for i in range(5)))
    outputs = await node.execute({"image": nchw(picture), "detection": rows})
    assert {name: array.shape[:2] for name, array in outputs.items()} == dict.fromkeys(node.outputs, (2, 1))
    assert outputs["label_ids"].ravel().tolist() == [0, 1]
    for name, info in node.outputs.items():
        assert info.shape[1:] == outputs[name].shape[1:]
        assert info.datatype is not None
        assert info.datatype.numpy == outputs[name].dtype


async def test_object_detection_without_detections_has_no_rows(picture: Array) -> None:
    node = await opened_builtin("model_zoo_intel_object_detection", **SIZES)
    outputs = await node.execute({"image": nchw(picture), "detection": detections(count=3)})
    assert {array.shape[0] for array in outputs.values()} == {0}
    with pytest.raises(CustomNodeFailure, match="is not inside"):
        await node.execute({"image": nchw(picture), "detection": detections((0, 1, 1, 1.1, 0, 1.5, 1))})


# face_blur


async def test_face_blur_blurs_boxes_only(picture: Array) -> None:
    sizes = {**SIZES, "target_image_width": WIDTH, "target_image_height": HEIGHT}
    node = await opened_builtin("face_blur", **sizes, gaussian_blur_kernel_size=5)
    rows = detections((0, 1, 0.9, 0.25, 0.25, 0.5, 0.75), (0, 1, 0.1, 0, 0, 1, 1), count=200)
    before = picture.copy()
    output = (await node.execute({"image": nchw(picture), "detection": rows}))["image"][0].transpose(1, 2, 0)
    expected = picture.copy()
    expected[6:18, 8:16] = cv2.GaussianBlur(picture, (5, 5), 0)[6:18, 8:16]
    np.testing.assert_allclose(output, expected, rtol=1e-5)
    np.testing.assert_array_equal(picture, before)


async def test_face_blur_clamps_boxes_and_resizes(picture: Array) -> None:
    node = await opened_builtin("face_blur", **SIZES, gaussian_blur_kernel_size=7, target_image_layout="NHWC")
    rows = detections((0, 1, 0.9, -1, -1, 0.25, 0.5), (0, 1, 0.9, 1, 1, 2, 2), count=200)
    output = (await node.execute({"image": nchw(picture), "detection": rows}))["image"]
    expected = picture.copy()
    expected[:12, :8] = cv2.GaussianBlur(picture, (7, 7), 0)[:12, :8]
    np.testing.assert_allclose(output[0], cv2.resize(expected, (10, 6)), rtol=1e-5)
    assert output.shape == node.outputs["image"].shape == (1, 6, 10, 3)
    assert node.inputs["detection"].shape == (1, 1, 200, 7)


# image_transformation


async def test_image_transformation_changes_layout_and_colours(picture: Array) -> None:
    node = await opened_builtin(
        "image_transformation", original_image_layout="NHWC", target_image_layout="NCHW", target_image_color_order="RGB"
    )
    output = (await node.execute({"image": picture[np.newaxis]}))["image"]
    np.testing.assert_array_equal(output, nchw(picture[:, :, ::-1]))
    assert node.inputs["image"].shape == (1, -1, -1, 3)
    assert node.outputs["image"].shape == (1, 3, -1, -1)
    assert node.inputs["image"].datatype == BY_NAME["FP32"]


async def test_image_transformation_to_and_from_grey(picture: Array) -> None:
    grey = cv2.cvtColor(picture, cv2.COLOR_RGB2GRAY)[:, :, np.newaxis]
    for source, target, image, expected in (
        ("RGB", "GRAY", picture, grey),
        ("RGB", "BGR", picture, picture[:, :, ::-1]),
        ("GRAY", "BGR", grey, np.repeat(grey, 3, axis=2)),
    ):
        orders = {"original_image_color_order": source, "target_image_color_order": target}
        node = await opened_builtin("image_transformation", original_image_layout="NHWC", **orders)
        np.testing.assert_array_equal((await node.execute({"image": image[np.newaxis]}))["image"][0], expected)


@pytest.mark.parametrize(("width", "height"), [(10, 6), (64, 48), (WIDTH, HEIGHT)])
async def test_image_transformation_normalises_and_resizes(picture: Array, width: int, height: int) -> None:
    node = await opened_builtin(
        "image_transformation",
        original_image_layout="NCHW",
        target_image_width=width,
        target_image_height=height,
        mean_values="[1, 2, 3]",
        scale_values="[2,4,8]",
        scale=100,
    )
    output = (await node.execute({"image": nchw(picture)}))["image"]
    expected = (cv2.resize(picture, (width, height)) - [1, 2, 3]) / [2, 4, 8]
    np.testing.assert_allclose(output, nchw(expected), rtol=1e-4, atol=1e-4)
    assert output.dtype == np.float32
    assert node.outputs["image"].shape == (1, 3, height, width)


async def test_image_transformation_with_one_scale(picture: Array) -> None:
    node = await opened_builtin("image_transformation", original_image_layout="NCHW", scale=2, target_image_height=12)
    output = (await node.execute({"image": nchw(picture)}))["image"]
    np.testing.assert_allclose(output, nchw(cv2.resize(picture, (WIDTH, 12)) / 2), rtol=1e-5)


# east_ocr


def inputs_of(*texts: tuple[int, int, float, tuple[float, ...]]) -> dict[str, Array]:
    scores = np.zeros((1, EAST_SIZE // 4, EAST_SIZE // 4, 1), np.float32)
    geometry = np.zeros((1, EAST_SIZE // 4, EAST_SIZE // 4, 5), np.float32)
    for row, column, score, values in texts:
        scores[0, row, column] = score
        geometry[0, row, column] = values
    return {"image": nchw(noise(EAST_SIZE, EAST_SIZE)), "scores": scores, "geometry": geometry}


async def test_east_ocr_crops_a_level_text() -> None:
    node = await opened_builtin("east_ocr", **EAST_SIZES)
    outputs = await node.execute(inputs_of((5, 6, 0.75, (8, 12, 4, 16, 0)), (1, 1, 0.4, (4, 4, 4, 4, 0))))
    assert outputs["text_coordinates"].tolist() == [[[24 - 16, 20 - 8, 28, 12]]]
    assert outputs["confidence_levels"].tolist() == [[[0.75]]]
    expected = cv2.resize(noise(EAST_SIZE, EAST_SIZE)[12:24, 8:36], (12, 8))
    np.testing.assert_array_equal(outputs["text_images"][0, 0].transpose(1, 2, 0), expected)
    assert node.inputs["scores"].shape == (1, 16, 16, 1)
    assert node.inputs["geometry"].shape == (1, 16, 16, 5)


async def test_east_ocr_widens_and_clamps_boxes() -> None:
    node = await opened_builtin("east_ocr", **EAST_SIZES, box_width_adjustment=0.5, box_height_adjustment=0.25)
    outputs = await node.execute(inputs_of((5, 6, 0.75, (8, 12, 8, 16, 0))))
    assert outputs["text_coordinates"].tolist() == [[[0, 8, 36 + 14, 24]]]


async def test_east_ocr_takes_the_best_of_overlapping_texts() -> None:
    texts = [
        (5, 6, 0.75, (8, 8, 8, 8, 0)),
        (5, 7, 0.9, (8, 8, 8, 8, 0)),
        (12, 12, 0.6, (4, 4, 4, 4, 0)),
        (2, 12, 0.8, (4, 4, 4, 4, 0)),
    ]  # fmt: skip
    for batch, scores in ((100, [0.9, 0.8, 0.6]), (2, [0.9, 0.8])):
        node = await opened_builtin("east_ocr", **EAST_SIZES, max_output_batch=batch)
        outputs = await node.execute(inputs_of(*texts))
        assert outputs["confidence_levels"].ravel().tolist() == pytest.approx(scores)
    loose = await opened_builtin("east_ocr", **EAST_SIZES, overlap_threshold=1)
    assert (await loose.execute(inputs_of(*texts)))["text_images"].shape == (4, 1, 3, 8, 12)


async def test_east_ocr_rotates_a_slanting_text() -> None:
    angle = math.radians(30)
    geometry = (4, 10, 4, 10, angle)
    node = await opened_builtin("east_ocr", **EAST_SIZES)
    outputs = await node.execute(inputs_of((8, 8, 0.75, geometry)))
    left, top, width, height = outputs["text_coordinates"][0, 0].tolist()
    part = np.ascontiguousarray(noise(EAST_SIZE, EAST_SIZE)[top : top + height, left : left + width])
    turned = cv2.warpAffine(part, cv2.getRotationMatrix2D((width / 2, height / 2), -30, 1), (width, height))
    start = (height - 8) // 2
    expected = cv2.resize(turned[start : start + 8], (12, 8))
    np.testing.assert_allclose(outputs["text_images"][0, 0].transpose(1, 2, 0), expected, atol=1e-3)
    across, down = 20 * math.cos(angle) + 8 * math.sin(angle), 20 * math.sin(angle) + 8 * math.cos(angle)
    assert (width, height) == (pytest.approx(across, abs=2), pytest.approx(down, abs=2))


async def test_east_ocr_has_a_rotation_threshold() -> None:
    inputs = inputs_of((8, 8, 0.75, (4, 10, 4, 10, math.radians(15))))
    plain = await (await opened_builtin("east_ocr", **EAST_SIZES)).execute(inputs)
    turned = await (await opened_builtin("east_ocr", **EAST_SIZES, rotation_angle_threshold=0)).execute(inputs)
    left, top, width, height = plain["text_coordinates"][0, 0].tolist()
    expected = cv2.resize(noise(EAST_SIZE, EAST_SIZE)[top : top + height, left : left + width], (12, 8))
    np.testing.assert_array_equal(plain["text_images"][0, 0].transpose(1, 2, 0), expected)
    assert not np.allclose(plain["text_images"], turned["text_images"])


async def test_east_ocr_without_text_has_no_rows() -> None:
    node = await opened_builtin("east_ocr", **EAST_SIZES)
    outputs = await node.execute(inputs_of())
    assert {name: array.shape for name, array in outputs.items()} == {
        "text_images": (0, 1, 3, 8, 12),
        "text_coordinates": (0, 1, 4),
        "confidence_levels": (0, 1, 1),
    }


@pytest.mark.parametrize(
    "geometry", [(0, 0, 0, 0, 0), (-70, 4, 80, 4, 0), (math.nan, 4, 4, 4, 0), (4, 4, 4, 4, math.inf)]
)
async def test_east_ocr_fails_on_invalid_geometry(geometry: tuple[float, ...]) -> None:
    node = await opened_builtin("east_ocr", **EAST_SIZES)
    with pytest.raises(CustomNodeFailure):
        await node.execute(inputs_of((5, 5, 0.75, geometry)))


sizes = st.integers(1, 30)
boxes = st.builds(
    lambda left, top, width, height: Box(left, top, left + width, top + height),
    st.integers(-20, 40),
    st.integers(-20, 40),
    sizes,
    sizes,
)
texts_found = st.lists(
    st.builds(DetectedText, boxes, st.floats(0, 1), st.just(0.0), st.just(1.0)),
    max_size=20,
    unique_by=lambda text: text.score,
)


def pixels(box: Box) -> set[tuple[int, int]]:
    return {(x, y) for x in range(box.left, box.right) for y in range(box.top, box.bottom)}


def overlap(one: Box, other: Box) -> float:
    return len(pixels(one) & pixels(other)) / len(pixels(one) | pixels(other))


@given(texts_found, st.floats(0, 1), st.integers(1, 20))
def test_suppression_removes_only_overlaps_of_better_texts(
    found: list[DetectedText], threshold: float, limit: int
) -> None:
    taken = suppress_overlaps(found, threshold, limit)
    scores = [text.score for text in taken]
    assert scores == sorted(scores, reverse=True)
    assert len(taken) <= limit
    for i, text in enumerate(taken):
        assert all(overlap(text.box, other.box) <= threshold for other in taken[:i])
    if len(taken) < limit:
        for text in found:
            better = [other for other in taken if other.score > text.score]
            assert text in taken or any(overlap(text.box, other.box) > threshold for other in better)


@given(boxes, sizes, sizes)
def test_clamped_box_has_the_pixels_in_the_image(box: Box, width: int, height: int) -> None:
    clamped = box.clamped(width, height)
    assert pixels(clamped) == pixels(box) & pixels(Box(0, 0, width, height))
    assert clamped.clamped(width, height) == clamped


# Parameters


async def problems_of(builtin: str, **params: object) -> dict[str, tuple[str, str]]:
    with pytest.raises(ConfigError) as raised:
        await opened_builtin(builtin, **params)
    return {problem.path: (problem.expected, problem.found) for problem in raised.value.problems}


async def test_problems_of_parameters_are_reported_together() -> None:
    assert await problems_of(
        "face_blur",
        original_image_height="0",
        target_image_width="x",
        gaussian_blur_kernel_size=4,
        original_image_layout="CHW",
    ) == {
        "params.original_image_width": ("a whole number from 1 on", ""),
        "params.original_image_height": ("a whole number from 1 on", "'0'"),
        "params.original_image_layout": ("NCHW or NHWC", "'CHW'"),
        "params.target_image_width": ("a whole number from 1 on", "'x'"),
        "params.target_image_height": ("a whole number from 1 on", ""),
        "params.confidence_threshold": ("a number from 0 to 1", ""),
        "params.gaussian_blur_kernel_size": ("an odd number from 1 to 32767", "'4'"),
    }


@pytest.mark.parametrize(
    ("builtin", "params", "path"),
    [
        ("add_one", {"add_number": -1}, "add_number"),
        ("add_one", {"sub_number": -1}, "sub_number"),
        ("add_one", {"output_queue_size": 0}, "output_queue_size"),
        ("horizontal_ocr", {**SIZES, "confidence_threshold": 1.5}, "confidence_threshold"),
        ("horizontal_ocr", {**SIZES, "max_output_batch": 0}, "max_output_batch"),
        ("east_ocr", {**SIZES, "original_image_width": 6}, "original_image_width"),
        ("east_ocr", {**SIZES, "overlap_threshold": "nan"}, "overlap_threshold"),
        ("model_zoo_intel_object_detection", {**SIZES, "filter_label_id": -2}, "filter_label_id"),
        ("image_transformation", {}, "original_image_layout"),
        ("image_transformation", {"original_image_layout": "NCHW", "scale": 0}, "scale"),
        ("image_transformation", {"original_image_layout": "NCHW", "scale_values": "[1,0,1]"}, "scale_values"),
        ("image_transformation", {"original_image_layout": "NCHW", "mean_values": "[1,2]"}, "mean_values"),
        ("image_transformation", {"original_image_layout": "NCHW", "mean_values": "1,2,3"}, "mean_values"),
        ("image_transformation", {"original_image_layout": "NCHW", "target_image_width": 0}, "target_image_width"),
        ("image_transformation", {"original_image_layout": "NCHW", "scale_values": "[]"}, "scale_values"),
    ],
)
async def test_parameters_out_of_bounds_are_refused(builtin: str, params: dict[str, object], path: str) -> None:
    assert list(await problems_of(builtin, **params)) == [f"params.{path}"]


async def test_invalid_optional_parameters_are_warnings() -> None:
    with capture_logs() as logs:
        await opened_builtin("horizontal_ocr", **SIZES, max_output_batch="many", debug="yes", overlap_treshold=1)
    assert [entry["problem"].partition(": ")[0] for entry in logs] == [
        "params.debug",
        "params.max_output_batch",
        "params.overlap_treshold",
    ]
    assert all(entry["log_level"] == "warning" for entry in logs)


async def test_nodes_for_images_need_opencv(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [name for name in sys.modules if name.startswith(PACKAGE)]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "cv2", None)
    await opened_builtin("add_one")
    with pytest.raises(ConfigError, match=r"face_blur needs OpenCV; install it: .* -m pip install .*\[vision\]"):
        await opened_builtin("face_blur")


def test_names_and_container_paths_of_built_in_nodes(tmp_path: Path) -> None:
    for name in BUILTIN_NAMES:
        assert builtin_name(Path(name)) == name
        assert builtin_name(Path(f"/ovms/lib/custom_nodes/libcustom_node_{name}.so")) == name
    for path in (Path("/ovms/lib/custom_nodes/libcustom_node_other.so"), tmp_path / "libcustom_node_add_one.so"):
        assert builtin_name(path) is None
