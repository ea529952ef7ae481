"""Filtering, sorting and cropping of text boxes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from paddle_serving_app.reader.opencv import cv2

__all__ = ["FilterBoxes", "GetRotateCropImage", "SortedBoxes"]

_MAX_LINE_DISTANCE: Final = 10
"""Largest vertical distance in pixels of boxes in one line."""
_MIN_ROTATED_RATIO: Final = 1.5
"""Ratio of height to width from which a box is rotated."""


@dataclass
class FilterBoxes:
    """Removes boxes not wider than ``width`` or not higher than ``height``, and clips the others."""

    width: int
    height: int

    def __call__(self, dt_boxes: Any, image_shape: Sequence[int]) -> NDArray[Any]:
        """Return FP32 [boxes, 4, 2], clockwise from the top left; empty if no box remains."""
        kept = [self.clip_det_res(self.order_points_clockwise(np.asarray(box)), *image_shape[:2]) for box in dt_boxes]
        return np.array([box for box in kept if self._is_large(box)])

    def _is_large(self, box: NDArray[Any]) -> bool:
        width, height = (int(np.linalg.norm(box[0] - box[corner])) for corner in (1, 3))
        return width > self.width and height > self.height

    def order_points_clockwise(self, pts: NDArray[Any]) -> NDArray[np.float32]:
        """Order four corners: top left, top right, bottom right, bottom left."""
        by_column = pts[np.argsort(pts[:, 0])]
        left, right = (half[np.argsort(half[:, 1])] for half in (by_column[:2], by_column[2:]))
        return np.array([left[0], right[0], right[1], left[1]], np.float32)

    def clip_det_res(self, points: NDArray[Any], img_height: int, img_width: int) -> NDArray[Any]:
        """Move corners to whole pixels of the image, in index."""
        points[:] = np.trunc(np.clip(points, 0, [img_width - 1, img_height - 1]))
        return points


@dataclass
class SortedBoxes:
    """Sorts boxes in reading order: from the top, within a line from the left."""

    def __call__(self, dt_boxes: Any) -> list[Any]:
        boxes = sorted(dt_boxes, key=lambda box: (box[0][1], box[0][0]))
        for index, following in pairwise(range(len(boxes))):
            box, after = boxes[index], boxes[following]
            if abs(after[0][1] - box[0][1]) < _MAX_LINE_DISTANCE and after[0][0] < box[0][0]:
                boxes[index], boxes[following] = after, box
        return boxes


@dataclass
class GetRotateCropImage:
    """Crops and straightens a box; a box much higher than wide is rotated left by 90 degrees."""

    def __call__(self, img: NDArray[Any], points: NDArray[Any]) -> NDArray[Any]:
        """Return the content of a box [4, 2], clockwise from the top left, of an image [height, width, 3]."""
        left, top = np.trunc(points.min(0)).astype(int)
        right, bottom = np.trunc(points.max(0)).astype(int)
        box = (points - [left, top]).astype(np.float32)
        width, height = (int(np.linalg.norm(box[0] - box[corner])) for corner in (1, 3))
        target = np.array([[0, 0], [width, 0], [width, height], [0, height]], np.float32)
        matrix = cv2.getPerspectiveTransform(box, target)
        part = np.ascontiguousarray(img[top:bottom, left:right])
        straight = cv2.warpPerspective(part, matrix, (width, height), borderMode=cv2.BORDER_REPLICATE)
        return np.rot90(straight) if height >= _MIN_ROTATED_RATIO * width else straight
