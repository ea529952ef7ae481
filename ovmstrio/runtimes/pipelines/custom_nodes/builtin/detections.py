"""The rows that detectors of OpenVINO's model zoo give: image, label, confidence, left, top, right, bottom."""

from __future__ import annotations

from typing import Final

import numpy as np

from ovmstrio.core.tensor import Array
from ovmstrio.runtimes.pipelines.custom_nodes.builtin.pictures import Box, PictureSettings, to_pixels

__all__ = ["CONFIDENCE", "LABEL", "PLACE", "ROW", "boxes_of", "chosen_rows"]

LABEL: Final = 1
CONFIDENCE: Final = 2
PLACE: Final = slice(3, 7)
ROW: Final = 7


def chosen_rows(detection: Array, threshold: float, label: int = -1) -> Array:
    """Give the rows of the first image that are certain enough and, unless ``label`` is -1, of this label."""
    rows = detection.reshape(-1, ROW)
    is_chosen = (np.abs(rows[:, 0]) < 1) & (rows[:, CONFIDENCE] >= np.float32(threshold))
    if label != -1:
        is_chosen &= np.trunc(rows[:, LABEL]) == label
    return rows[is_chosen]


def boxes_of(rows: Array, pictures: PictureSettings) -> list[Box]:
    """Give the boxes of rows, within the image.

    Raises:
        CustomNodeFailure: a place is not finite.
    """
    sizes = np.array([pictures.width, pictures.height] * 2, np.float32)
    places = to_pixels(rows[:, PLACE] * sizes, "detections")
    return [Box(*place).clamped(pictures.width, pictures.height) for place in places.tolist()]
