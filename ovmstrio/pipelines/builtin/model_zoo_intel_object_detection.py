"""``model_zoo_intel_object_detection``: crops the objects found by a detector of OpenVINO's model zoo."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Final

import numpy as np

from ovmstrio.core.tensor import Array
from ovmstrio.pipelines.builtin.builtin_node import Parameters, describe_item
from ovmstrio.pipelines.builtin.images import (
    CONFIDENCE,
    COORDINATES,
    LABEL,
    ROW_LENGTH,
    ImageSettings,
    boxes_of,
    crop,
    select_detections,
    to_pixels,
)

_DEFAULT_BATCH: Final = 100
_DEFAULT_QUEUE: Final = 24
_ALL_LABELS: Final = -1


class ObjectDetection:
    """All outputs have one row per crop; OVMS cuts only some of them to ``max_output_batch``.

    ``buffer_queue_size`` is checked and otherwise ignored.
    """

    is_instant: ClassVar = False

    def __init__(self, parameters: Parameters) -> None:
        self._pictures = pictures = ImageSettings.read(parameters)
        self._threshold = parameters.number("confidence_threshold", low=0, high=1)
        self._batch = parameters.integer("max_output_batch", default=_DEFAULT_BATCH)
        self._label = parameters.integer("filter_label_id", default=_ALL_LABELS, low=_ALL_LABELS)
        parameters.integer("buffer_queue_size", default=_DEFAULT_QUEUE)
        self.inputs = {"image": pictures.image, "detection": describe_item("detection", "FP32", 1, 1, -1, ROW_LENGTH)}
        self.outputs = {
            "images": pictures.target("images", -1, 1),
            "coordinates": describe_item("coordinates", "FP32", -1, 1, 4),
            "confidences": describe_item("confidences", "FP32", -1, 1, 1),
            "label_ids": describe_item("label_ids", "INT32", -1, 1, 1),
        }

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Crop the first detections with sufficient confidence and the configured label."""
        rows = select_detections(inputs["detection"], self._threshold, self._label)[: self._batch]
        image = self._pictures.read_image(inputs["image"])
        parts = [crop(image, box) for box in boxes_of(rows, self._pictures)]
        return {
            "images": self._pictures.finished(parts),
            "coordinates": rows[:, COORDINATES].reshape(-1, 1, 4),
            "confidences": rows[:, CONFIDENCE].reshape(-1, 1, 1),
            "label_ids": to_pixels(rows[:, LABEL], "labels").astype(np.int32).reshape(-1, 1, 1),
        }
