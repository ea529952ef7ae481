"""``horizontal_ocr``: crops the texts found by a detector of horizontal text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Final

import numpy as np

from ovmstrio.core.errors import CustomNodeFailure
from ovmstrio.core.tensor import Array
from ovmstrio.pipelines.builtin.builtin_node import Parameters, describe_item
from ovmstrio.pipelines.builtin.images import Box, ImageSettings, crop, to_pixels

_DEFAULT_BATCH: Final = 100


class HorizontalOcr:
    """Boxes are left, top, right, bottom in pixels and a confidence."""

    is_instant: ClassVar = False

    def __init__(self, parameters: Parameters) -> None:
        self._pictures = pictures = ImageSettings.read(parameters)
        self._threshold = parameters.number("confidence_threshold", low=0, high=1)
        self._batch = parameters.integer("max_output_batch", default=_DEFAULT_BATCH)
        self.inputs = {"image": pictures.image, "boxes": describe_item("boxes", "FP32", -1, 5)}
        self.outputs = pictures.texts

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Crop the first boxes with sufficient confidence."""
        rows = inputs["boxes"]
        rows = rows[rows[:, 4] >= np.float32(self._threshold)]
        places = to_pixels(rows[:, :4], "boxes")
        boxes = [Box(*place) for place in places.tolist()]
        empty = next((box for box in boxes if box.is_empty), None)
        if empty is not None:
            raise CustomNodeFailure(f"{empty} is empty: the right and lower edges must be beyond the left and upper")
        boxes = boxes[: self._batch]
        image = self._pictures.read_image(inputs["image"])
        parts = [crop(image, box) for box in boxes]
        return self._pictures.found_texts(parts, boxes, rows[: self._batch, 4].copy())
