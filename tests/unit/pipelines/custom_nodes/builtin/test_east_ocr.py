"""Where the node east_ocr finds texts, and how it cuts them out."""

from __future__ import annotations

import math

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ovmstrio.core.errors import CustomNodeFailure
from ovmstrio.core.tensor import Array
from ovmstrio.runtimes.pipelines.custom_nodes.builtin.east_boxes import FoundText, suppress_overlaps
from ovmstrio.runtimes.pipelines.custom_nodes.builtin.pictures import Box
from tests.support.custom_nodes import opened_builtin

SIZE = 64
SIZES: dict[str, object] = {
    "original_image_width": SIZE,
    "original_image_height": SIZE,
    "target_image_width": 12,
    "target_image_height": 8,
    "confidence_threshold": 0.5,
}


def inputs_of(*texts: tuple[int, int, float, tuple[float, ...]]) -> dict[str, Array]:
    """Make the inputs of texts of row, column, score and geometry."""
    scores = np.zeros((1, SIZE // 4, SIZE // 4, 1), np.float32)
    geometry = np.zeros((1, SIZE // 4, SIZE // 4, 5), np.float32)
    for row, column, score, values in texts:
        scores[0, row, column] = score
        geometry[0, row, column] = values
    return {"image": nchw(), "scores": scores, "geometry": geometry}


def image() -> Array:
    """Give an image of noise: height, width, channels."""
    return np.random.default_rng(5).uniform(0, 255, (SIZE, SIZE, 3)).astype(np.float32)


def nchw() -> Array:
    """Give the same as a tensor."""
    return np.ascontiguousarray(image().transpose(2, 0, 1)[np.newaxis])


async def test_a_level_text_is_cut_out_as_it_is() -> None:
    """Distances up, right, down and left lead from the cell's corner to the edges."""
    node = await opened_builtin("east_ocr", **SIZES)
    outputs = await node.execute(inputs_of((5, 6, 0.75, (8, 12, 4, 16, 0)), (1, 1, 0.4, (4, 4, 4, 4, 0))))
    assert outputs["text_coordinates"].tolist() == [[[24 - 16, 20 - 8, 28, 12]]]
    assert outputs["confidence_levels"].tolist() == [[[0.75]]]
    wanted = cv2.resize(image()[12:24, 8:36], (12, 8))
    np.testing.assert_array_equal(outputs["text_images"][0, 0].transpose(1, 2, 0), wanted)
    assert node.inputs["scores"].shape == (1, 16, 16, 1)
    assert node.inputs["geometry"].shape == (1, 16, 16, 5)


async def test_boxes_are_widened_and_clamped() -> None:
    """By a share of their size on each side."""
    node = await opened_builtin("east_ocr", **SIZES, box_width_adjustment=0.5, box_height_adjustment=0.25)
    outputs = await node.execute(inputs_of((5, 6, 0.75, (8, 12, 8, 16, 0))))
    assert outputs["text_coordinates"].tolist() == [[[0, 8, 36 + 14, 24]]]


async def test_the_best_of_overlapping_texts_is_taken() -> None:
    """Texts come in the order of their scores, at most as many as asked for."""
    texts = [
        (5, 6, 0.75, (8, 8, 8, 8, 0)),
        (5, 7, 0.9, (8, 8, 8, 8, 0)),
        (12, 12, 0.6, (4, 4, 4, 4, 0)),
        (2, 12, 0.8, (4, 4, 4, 4, 0)),
    ]  # fmt: skip
    for batch, scores in ((100, [0.9, 0.8, 0.6]), (2, [0.9, 0.8])):
        node = await opened_builtin("east_ocr", **SIZES, max_output_batch=batch)
        outputs = await node.execute(inputs_of(*texts))
        assert outputs["confidence_levels"].ravel().tolist() == pytest.approx(scores)
    loose = await opened_builtin("east_ocr", **SIZES, overlap_threshold=1)
    assert (await loose.execute(inputs_of(*texts)))["text_images"].shape == (4, 1, 3, 8, 12)


async def test_a_slanting_text_is_turned() -> None:
    """Its upright box is the coordinates; its own height is what is left of it."""
    angle = math.radians(30)
    geometry = (4, 10, 4, 10, angle)
    node = await opened_builtin("east_ocr", **SIZES)
    outputs = await node.execute(inputs_of((8, 8, 0.75, geometry)))
    left, top, width, height = outputs["text_coordinates"][0, 0].tolist()
    part = np.ascontiguousarray(image()[top : top + height, left : left + width])
    turned = cv2.warpAffine(part, cv2.getRotationMatrix2D((width / 2, height / 2), -30, 1), (width, height))
    start = (height - 8) // 2
    wanted = cv2.resize(turned[start : start + 8], (12, 8))
    np.testing.assert_allclose(outputs["text_images"][0, 0].transpose(1, 2, 0), wanted, atol=1e-3)
    across, down = 20 * math.cos(angle) + 8 * math.sin(angle), 20 * math.sin(angle) + 8 * math.cos(angle)
    assert (width, height) == (pytest.approx(across, abs=2), pytest.approx(down, abs=2))


async def test_a_text_that_slants_little_is_left_as_it_is() -> None:
    """The threshold is in degrees."""
    inputs = inputs_of((8, 8, 0.75, (4, 10, 4, 10, math.radians(15))))
    plain = await (await opened_builtin("east_ocr", **SIZES)).execute(inputs)
    turned = await (await opened_builtin("east_ocr", **SIZES, rotation_angle_threshold=0)).execute(inputs)
    left, top, width, height = plain["text_coordinates"][0, 0].tolist()
    wanted = cv2.resize(image()[top : top + height, left : left + width], (12, 8))
    np.testing.assert_array_equal(plain["text_images"][0, 0].transpose(1, 2, 0), wanted)
    assert not np.allclose(plain["text_images"], turned["text_images"])


async def test_no_text_gives_no_rows() -> None:
    """A demultiplexer behind it has nothing to do then."""
    node = await opened_builtin("east_ocr", **SIZES)
    outputs = await node.execute(inputs_of())
    assert {name: array.shape for name, array in outputs.items()} == {
        "text_images": (0, 1, 3, 8, 12),
        "text_coordinates": (0, 1, 4),
        "confidence_levels": (0, 1, 1),
    }


@pytest.mark.parametrize(
    "geometry", [(0, 0, 0, 0, 0), (-70, 4, 80, 4, 0), (math.nan, 4, 4, 4, 0), (4, 4, 4, 4, math.inf)]
)
async def test_texts_that_are_nowhere_fail(geometry: tuple[float, ...]) -> None:
    """An empty box, one outside, and what is no number."""
    node = await opened_builtin("east_ocr", **SIZES)
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
    st.builds(FoundText, boxes, st.floats(0, 1), st.just(0.0), st.just(1.0)),
    max_size=20,
    unique_by=lambda text: text.score,
)


def pixels(box: Box) -> set[tuple[int, int]]:
    """Give every pixel of a box."""
    return {(x, y) for x in range(box.left, box.right) for y in range(box.top, box.bottom)}


def overlap(one: Box, other: Box) -> float:
    """Give the share of common pixels, counted one by one."""
    return len(pixels(one) & pixels(other)) / len(pixels(one) | pixels(other))


@given(texts_found, st.floats(0, 1), st.integers(1, 20))
def test_suppression_takes_the_best_and_leaves_out_only_their_overlaps(
    found: list[FoundText], threshold: float, limit: int
) -> None:
    """What was taken does not overlap too much; what was not overlaps with something better, or came too late."""
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
def test_clamping_keeps_exactly_the_pixels_in_the_image(box: Box, width: int, height: int) -> None:
    """Clamping twice changes nothing."""
    clamped = box.clamped(width, height)
    assert pixels(clamped) == pixels(box) & pixels(Box(0, 0, width, height))
    assert clamped.clamped(width, height) == clamped
