"""``east_ocr``: crops the texts found by an EAST detector and rotates them upright."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Final

import cv2
import numpy as np

from ovmstrio.core.errors import CustomNodeFailure
from ovmstrio.core.tensor import Array
from ovmstrio.pipelines.builtin.builtin_node import Parameters, describe_item
from ovmstrio.pipelines.builtin.images import Box, ImageSettings, crop, to_pixels

# Text boxes from EAST detectors: per cell a score, four distances and an angle

_CELL: Final = 4


@dataclass(frozen=True, slots=True)
class DetectedText:
    """A text: its upright bounding box, its height, and its angle in radians."""

    box: Box
    score: float
    angle: float
    height: float

    def grown(self, wider: float, higher: float, width: int, height: int) -> DetectedText:
        """Return the text with a box enlarged by fractions of its size, within an image."""
        box = self.box
        across, down = int(box.width * wider), int(box.height * higher)
        grown = Box(box.left - across, box.top - down, box.right + across, box.bottom + down).clamped(width, height)
        if grown.is_empty:
            raise CustomNodeFailure(f"the text at {box} is outside the image of {width} x {height} pixels")
        return replace(self, box=grown)


def _find_texts(scores: Array, geometry: Array, threshold: float) -> list[DetectedText]:
    """Return the text of each cell with a sufficient score, row by row."""
    rows, columns = np.nonzero(scores >= np.float32(threshold))
    found = geometry[rows, columns].astype(np.float64)
    up, right, down, left, angle = found.T
    if not np.isfinite(found).all():
        raise CustomNodeFailure("the geometry has values that are not image coordinates")
    heights, widths = up + down, right + left
    cos, sin = np.cos(angle), np.sin(angle)
    # The second corner is the lower end of the text; the others follow along the text's axes.
    second = to_pixels(
        np.stack([columns * _CELL + cos * right + sin * down, rows * _CELL - sin * right + cos * down]), "geometry"
    )
    first = second + np.stack([-sin * heights, -cos * heights])
    third = second + np.stack([-cos * widths, sin * widths])
    corners = np.stack([first, second, third, third + first - second])
    low, high = to_pixels(corners.min(axis=0), "geometry").T, to_pixels(corners.max(axis=0), "geometry").T
    return [
        DetectedText(Box(*start, *end), score, slant, height)
        for start, end, score, slant, height in zip(
            low.tolist(), high.tolist(), scores[rows, columns].tolist(), angle.tolist(), heights.tolist(), strict=True
        )
    ]


def suppress_overlaps(texts: Sequence[DetectedText], threshold: float, max_texts: int) -> list[DetectedText]:
    """Return the best texts by non-maximum suppression.

    Args:
        texts: all found texts; ties go to the first.
        threshold: the largest allowed intersection over union.
        max_texts: the largest number of results.
    """
    edges = np.array([(text.box.left, text.box.top, text.box.right, text.box.bottom) for text in texts], np.float64)
    waiting = np.argsort([-text.score for text in texts], kind="stable")
    taken: list[DetectedText] = []
    while waiting.size and len(taken) < max_texts:
        best, waiting = waiting[0], waiting[1:]
        taken.append(texts[best])
        waiting = waiting[_overlaps(edges[best], edges[waiting]) <= threshold]
    return taken


def _overlaps(box: Array, others: Array) -> Array:
    """Return the intersection over union of a box with each of the others."""
    sides = np.minimum(box[2:], others[:, 2:]) - np.maximum(box[:2], others[:, :2])
    common = np.clip(sides, 0, None).prod(axis=1)
    covered = (box[2:] - box[:2]).prod() + (others[:, 2:] - others[:, :2]).prod(axis=1) - common
    share: Array = common / covered
    return share


# Node

_DEFAULT_BATCH: Final = 100
_DEFAULT_OVERLAP: Final = 0.3
_DEFAULT_ANGLE: Final = 20


class EastOcr:
    """Inputs are the image, and the detector's scores and geometry for cells of 4x4 pixels."""

    is_instant: ClassVar = False

    def __init__(self, parameters: Parameters) -> None:
        self._pictures = pictures = ImageSettings.read(parameters)
        for name, size in (("original_image_width", pictures.width), ("original_image_height", pictures.height)):
            if parameters.is_given(name) and size % _CELL:
                parameters.refuse(name, f"a multiple of {_CELL}")
        self._threshold = parameters.number("confidence_threshold", low=0, high=1)
        self._overlap = parameters.number("overlap_threshold", default=_DEFAULT_OVERLAP, low=0, high=1)
        self._angle = parameters.number("rotation_angle_threshold", default=_DEFAULT_ANGLE)
        self._wider = parameters.number("box_width_adjustment", default=0, low=0)
        self._higher = parameters.number("box_height_adjustment", default=0, low=0)
        self._batch = parameters.integer("max_output_batch", default=_DEFAULT_BATCH)
        cells = (1, pictures.height // _CELL, pictures.width // _CELL)
        self.inputs = {
            "image": pictures.image,
            "scores": describe_item("scores", "FP32", *cells, 1),
            "geometry": describe_item("geometry", "FP32", *cells, 5),
        }
        self.outputs = pictures.texts

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Crop the best texts."""
        image = self._pictures.read_image(inputs["image"])
        height, width = image.shape[:2]
        texts = _find_texts(inputs["scores"][0, :, :, 0], inputs["geometry"][0], self._threshold)
        texts = [text.grown(self._wider, self._higher, width, height) for text in texts]
        texts = suppress_overlaps(texts, self._overlap, self._batch)
        parts = [self._crop_upright(image, text) for text in texts]
        confidences = np.array([text.score for text in texts], np.float32)
        return self._pictures.found_texts(parts, [text.box for text in texts], confidences)

    def _crop_upright(self, image: Array, text: DetectedText) -> Array:
        """Crop a text; rotate it upright if it slants too much."""
        part = crop(image, text.box)
        degrees = math.degrees(text.angle)
        if abs(degrees) <= self._angle:
            return part
        height, width = part.shape[:2]
        turn = cv2.getRotationMatrix2D((width / 2, height / 2), -degrees, 1)
        turned = cv2.warpAffine(part, turn, (width, height))
        wanted = min(max(int(text.height), 1), height)
        top = (height - wanted) // 2
        return np.ascontiguousarray(turned[top : top + wanted])
