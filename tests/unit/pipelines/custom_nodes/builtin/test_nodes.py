"""What the built-in nodes compute, against numpy and OpenCV used directly."""

from __future__ import annotations

import cv2
import numpy as np
import pytest

from ovmstrio.core.datatypes import BY_NAME
from ovmstrio.core.errors import CustomNodeFailure
from ovmstrio.core.tensor import Array
from tests.support.custom_nodes import opened_builtin

HEIGHT, WIDTH = 24, 32
SIZES: dict[str, object] = {
    "original_image_width": WIDTH,
    "original_image_height": HEIGHT,
    "target_image_width": 10,
    "target_image_height": 6,
    "confidence_threshold": 0.5,
}


@pytest.fixture
def picture() -> Array:
    """Give an image of noise: height, width, channels."""
    return np.random.default_rng(7).uniform(0, 255, (HEIGHT, WIDTH, 3)).astype(np.float32)


def nchw(image: Array) -> Array:
    """Make an image a tensor."""
    return np.ascontiguousarray(image.transpose(2, 0, 1)[np.newaxis])


def detections(*rows: tuple[float, ...], count: int | None = None) -> Array:
    """Make a tensor of detections, filled up with rows of image -1."""
    made = np.zeros((1, 1, len(rows) if count is None else count, 7), np.float32)
    made[..., 0] = -1
    if rows:
        made[0, 0, : len(rows)] = rows
    return made


# add_one


async def test_add_one_adds_and_subtracts() -> None:
    """By default it adds one."""
    numbers = np.arange(10, dtype=np.float32)[np.newaxis]
    plain = await opened_builtin("add_one")
    assert (await plain.execute({"input_numbers": numbers}))["output_numbers"].tolist() == [list(range(1, 11))]
    other = await opened_builtin("add_one", add_number=5, sub_number=2)
    made = (await other.execute({"input_numbers": numbers}))["output_numbers"]
    assert (made.dtype, made.tolist()) == (np.float32, [list(range(3, 13))])
    assert plain.inputs["input_numbers"].shape == plain.outputs["output_numbers"].shape == (1, 10)


async def test_inputs_of_another_kind_fail_the_call() -> None:
    """Type, shape and presence are looked at before the node runs."""
    node = await opened_builtin("add_one")
    for inputs, text in (
        ({}, "there is no input 'input_numbers'"),
        ({"input_numbers": np.zeros((1, 10))}, "Expected: FP32; Actual: float64"),
        ({"input_numbers": np.zeros((1, 9), np.float32)}, r"Expected: \(1, 10\); Actual: \(1, 9\)"),
    ):
        with pytest.raises(CustomNodeFailure, match=text):
            await node.execute(inputs)


# horizontal_ocr


async def test_horizontal_ocr_cuts_boxes_out(picture: Array) -> None:
    """Boxes that are too uncertain are left out; places are cut to whole numbers."""
    node = await opened_builtin("horizontal_ocr", **SIZES)
    boxes = np.array([[2.7, 3, 12, 9, 0.9], [0, 0, 5, 5, 0.4], [0, 0, WIDTH, HEIGHT, 0.5]], np.float32)
    outputs = await node.execute({"image": nchw(picture), "boxes": boxes})
    expected = [cv2.resize(picture[3:9, 2:12], (10, 6)), cv2.resize(picture, (10, 6))]
    assert outputs["text_images"].shape == (2, 1, 3, 6, 10)
    for made, wanted in zip(outputs["text_images"], expected, strict=True):
        np.testing.assert_array_equal(made[0].transpose(1, 2, 0), wanted)
    assert outputs["text_coordinates"].tolist() == [[[2, 3, 10, 6]], [[0, 0, WIDTH, HEIGHT]]]
    assert outputs["confidence_levels"].tolist() == [[[np.float32(0.9)]], [[0.5]]]


async def test_horizontal_ocr_turns_grey_and_changes_layout(picture: Array) -> None:
    """The description of the output says the same."""
    node = await opened_builtin(
        "horizontal_ocr",
        **SIZES,
        original_image_layout="NHWC",
        target_image_layout="NHWC",
        convert_to_gray_scale="true",
    )
    boxes = np.array([[0, 0, 20, 20, 1]], np.float32)
    made = (await node.execute({"image": picture[np.newaxis], "boxes": boxes}))["text_images"]
    wanted = cv2.cvtColor(cv2.resize(picture[:20, :20], (10, 6)), cv2.COLOR_BGR2GRAY)
    np.testing.assert_array_equal(made[0, 0, :, :, 0], wanted)
    assert node.outputs["text_images"].shape == (-1, 1, 6, 10, 1)
    assert node.inputs["image"].shape == (1, HEIGHT, WIDTH, 3)
    assert node.inputs["boxes"].shape == (-1, 5)


async def test_horizontal_ocr_gives_no_more_than_asked_for(picture: Array) -> None:
    """The first come; with none at all there are tensors without rows."""
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
        ((-1, 0, 5, 5), "does not lie in the image of 32 x 24 pixels"),
        ((0, 0, 33, 5), "does not lie in the image"),
        ((0, 0, np.nan, 5), "no places in an image"),
        ((0, 0, np.inf, 5), "no places in an image"),
    ],
)
async def test_horizontal_ocr_fails_on_boxes_that_are_none(picture: Array, box: tuple[float, ...], text: str) -> None:
    """A detector that gives such is wired wrongly."""
    node = await opened_builtin("horizontal_ocr", **SIZES)
    with pytest.raises(CustomNodeFailure, match=f"node 'node' of horizontal_ocr: .*{text}"):
        await node.execute({"image": nchw(picture), "boxes": np.array([[*box, 1]], np.float32)})


# model_zoo_intel_object_detection


async def test_object_detection_cuts_out_what_was_found(picture: Array) -> None:
    """Rows of other images, with low confidence or of other labels are left out; places are clamped to the image."""
    node = await opened_builtin("model_zoo_intel_object_detection", **SIZES, filter_label_id=3)
    rows = detections(
        (0, 3, 0.9, 0.25, 0.25, 0.5, 0.75),
        (0, 2, 0.9, 0, 0, 1, 1),
        (0, 3, 0.4, 0, 0, 1, 1),
        (1, 3, 0.9, 0, 0, 1, 1),
        (0, 3, 0.5, -0.5, 0.5, 1.5, 2),
    )
    outputs = await node.execute({"image": nchw(picture), "detection": rows})
    expected = [cv2.resize(picture[6:18, 8:16], (10, 6)), cv2.resize(picture[12:, :], (10, 6))]
    for made, wanted in zip(outputs["images"], expected, strict=True):
        np.testing.assert_array_equal(made[0].transpose(1, 2, 0), wanted)
    assert outputs["coordinates"].tolist() == [[[0.25, 0.25, 0.5, 0.75]], [[-0.5, 0.5, 1.5, 2]]]
    assert outputs["confidences"].tolist() == [[[np.float32(0.9)]], [[0.5]]]
    assert outputs["label_ids"].tolist() == [[[3]], [[3]]]
    assert outputs["label_ids"].dtype == np.int32


async def test_object_detection_cuts_all_outputs_to_the_batch(picture: Array) -> None:
    """They can be split together."""
    node = await opened_builtin("model_zoo_intel_object_detection", **SIZES, max_output_batch=2, buffer_queue_size=1)
    rows = detections(*((0, i, 0.9, 0, 0, 1, 1) for i in range(5)))
    outputs = await node.execute({"image": nchw(picture), "detection": rows})
    assert {name: array.shape[:2] for name, array in outputs.items()} == dict.fromkeys(node.outputs, (2, 1))
    assert outputs["label_ids"].ravel().tolist() == [0, 1]
    for name, info in node.outputs.items():
        assert info.shape[1:] == outputs[name].shape[1:]
        assert info.datatype is not None
        assert info.datatype.numpy == outputs[name].dtype


async def test_object_detection_without_detections_gives_no_rows(picture: Array) -> None:
    """A demultiplexer behind it has nothing to do then."""
    node = await opened_builtin("model_zoo_intel_object_detection", **SIZES)
    outputs = await node.execute({"image": nchw(picture), "detection": detections(count=3)})
    assert {array.shape[0] for array in outputs.values()} == {0}
    with pytest.raises(CustomNodeFailure, match="does not lie"):
        await node.execute({"image": nchw(picture), "detection": detections((0, 1, 1, 1.1, 0, 1.5, 1))})


# face_blur


async def test_face_blur_blurs_boxes_only(picture: Array) -> None:
    """Pixels around a box weigh in at its edges, and what is outside stays."""
    sizes = {**SIZES, "target_image_width": WIDTH, "target_image_height": HEIGHT}
    node = await opened_builtin("face_blur", **sizes, gaussian_blur_kernel_size=5)
    rows = detections((0, 1, 0.9, 0.25, 0.25, 0.5, 0.75), (0, 1, 0.1, 0, 0, 1, 1), count=200)
    before = picture.copy()
    made = (await node.execute({"image": nchw(picture), "detection": rows}))["image"][0].transpose(1, 2, 0)
    wanted = picture.copy()
    wanted[6:18, 8:16] = cv2.GaussianBlur(picture, (5, 5), 0)[6:18, 8:16]
    np.testing.assert_allclose(made, wanted, rtol=1e-5)
    np.testing.assert_array_equal(picture, before)


async def test_face_blur_clamps_boxes_and_resizes(picture: Array) -> None:
    """A face that is partly outside is blurred as far as it is seen."""
    node = await opened_builtin("face_blur", **SIZES, gaussian_blur_kernel_size=7, target_image_layout="NHWC")
    rows = detections((0, 1, 0.9, -1, -1, 0.25, 0.5), (0, 1, 0.9, 1, 1, 2, 2), count=200)
    made = (await node.execute({"image": nchw(picture), "detection": rows}))["image"]
    wanted = picture.copy()
    wanted[:12, :8] = cv2.GaussianBlur(picture, (7, 7), 0)[:12, :8]
    np.testing.assert_allclose(made[0], cv2.resize(wanted, (10, 6)), rtol=1e-5)
    assert made.shape == node.outputs["image"].shape == (1, 6, 10, 3)
    assert node.inputs["detection"].shape == (1, 1, 200, 7)


# image_transformation


async def test_image_transformation_changes_layout_and_colours(picture: Array) -> None:
    """The size stays where none is asked for."""
    node = await opened_builtin(
        "image_transformation", original_image_layout="NHWC", target_image_layout="NCHW", target_image_color_order="RGB"
    )
    made = (await node.execute({"image": picture[np.newaxis]}))["image"]
    np.testing.assert_array_equal(made, nchw(picture[:, :, ::-1]))
    assert node.inputs["image"].shape == (1, -1, -1, 3)
    assert node.outputs["image"].shape == (1, 3, -1, -1)
    assert node.inputs["image"].datatype == BY_NAME["FP32"]


@pytest.mark.parametrize(("order", "channels"), [("GRAY", 1), ("BGR", 3)])
async def test_image_transformation_to_and_from_grey(picture: Array, order: str, channels: int) -> None:
    """Channels follow the order of colours."""
    there = await opened_builtin(
        "image_transformation",
        original_image_layout="NHWC",
        original_image_color_order="RGB",
        target_image_color_order=order,
    )
    made = (await there.execute({"image": picture[np.newaxis]}))["image"]
    assert made.shape == (1, HEIGHT, WIDTH, channels)
    back = await opened_builtin(
        "image_transformation",
        original_image_layout="NHWC",
        original_image_color_order="GRAY",
        target_image_color_order="BGR",
    )
    if order == "GRAY":
        grey = cv2.cvtColor(picture, cv2.COLOR_RGB2GRAY)
        np.testing.assert_array_equal(made[0, :, :, 0], grey)
        again = (await back.execute({"image": made}))["image"]
        np.testing.assert_array_equal(again[0], np.repeat(grey[:, :, np.newaxis], 3, axis=2))


@pytest.mark.parametrize(("width", "height"), [(10, 6), (64, 48), (WIDTH, HEIGHT)])
async def test_image_transformation_normalises_and_resizes(picture: Array, width: int, height: int) -> None:
    """The mean is subtracted first; scales of channels win over the one scale."""
    node = await opened_builtin(
        "image_transformation",
        original_image_layout="NCHW",
        target_image_width=width,
        target_image_height=height,
        mean_values="[1, 2, 3]",
        scale_values="[2,4,8]",
        scale=100,
    )
    made = (await node.execute({"image": nchw(picture)}))["image"]
    wanted = (cv2.resize(picture, (width, height)) - [1, 2, 3]) / [2, 4, 8]
    np.testing.assert_allclose(made, nchw(wanted), rtol=1e-4, atol=1e-4)
    assert made.dtype == np.float32
    assert node.outputs["image"].shape == (1, 3, height, width)


async def test_image_transformation_with_one_scale(picture: Array) -> None:
    """One size alone may be changed too."""
    node = await opened_builtin("image_transformation", original_image_layout="NCHW", scale=2, target_image_height=12)
    made = (await node.execute({"image": nchw(picture)}))["image"]
    np.testing.assert_allclose(made, nchw(cv2.resize(picture, (WIDTH, 12)) / 2), rtol=1e-5)
