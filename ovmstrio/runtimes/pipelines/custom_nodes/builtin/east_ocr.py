"""``east_ocr``: cuts the texts out of an image that an EAST detector has found, and turns them level."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar, Final

import cv2
import numpy as np

from ovmstrio.core.tensor import Array
from ovmstrio.runtimes.pipelines.custom_nodes.builtin.builtin_node import described
from ovmstrio.runtimes.pipelines.custom_nodes.builtin.east_boxes import FoundText, find_texts, suppress_overlaps
from ovmstrio.runtimes.pipelines.custom_nodes.builtin.parameters import Parameters
from ovmstrio.runtimes.pipelines.custom_nodes.builtin.pictures import PictureSettings, cut

__all__ = ["EastOcr"]

_CELL: Final = 4
_DEFAULT_BATCH: Final = 100
_DEFAULT_OVERLAP: Final = 0.3
_DEFAULT_ANGLE: Final = 20


class EastOcr:
    """Takes the scores and the geometry that the detector gives for every four by four pixels."""

    is_instant: ClassVar = False

    def __init__(self, parameters: Parameters) -> None:
        self._pictures = pictures = PictureSettings.read(parameters)
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
            "scores": described("scores", "FP32", *cells, 1),
            "geometry": described("geometry", "FP32", *cells, 5),
        }
        self.outputs = pictures.texts

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Cut out the best texts.

        Raises:
            CustomNodeFailure: nothing of a text lies in the image.
        """
        image = self._pictures.read_image(inputs["image"])
        height, width = image.shape[:2]
        texts = find_texts(inputs["scores"][0, :, :, 0], inputs["geometry"][0], self._threshold)
        texts = [text.grown(self._wider, self._higher, width, height) for text in texts]
        texts = suppress_overlaps(texts, self._overlap, self._batch)
        parts = [self._level(image, text) for text in texts]
        confidences = np.array([text.score for text in texts], np.float32)
        return self._pictures.found_texts(parts, [text.box for text in texts], confidences)

    def _level(self, image: Array, text: FoundText) -> Array:
        """Cut out a text; one that slants too much is turned, and what is above and below it is cut off."""
        part = cut(image, text.box)
        degrees = math.degrees(text.angle)
        if abs(degrees) <= self._angle:
            return part
        height, width = part.shape[:2]
        turn = cv2.getRotationMatrix2D((width / 2, height / 2), -degrees, 1)
        turned = cv2.warpAffine(part, turn, (width, height))
        wanted = min(max(int(text.height), 1), height)
        top = (height - wanted) // 2
        return np.ascontiguousarray(turned[top : top + wanted])
