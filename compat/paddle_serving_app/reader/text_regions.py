"""``DBPostProcess``: text regions from a probability map."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from paddle_serving_app.reader.opencv import cv2
from paddle_serving_app.reader.outlines import grown

__all__ = ["DBPostProcess"]

_MIN_GROWTH: Final = 2


class DBPostProcess:
    """Finds text rectangles by differentiable binarization.

    Args:
        params: ``thresh``, minimum of a text pixel; ``box_thresh``, minimum mean of a region; ``max_candidates``, most
            regions; ``unclip_ratio``, growth of regions.
    """

    def __init__(self, params: Mapping[str, Any]) -> None:
        self.thresh: float = params["thresh"]
        self.box_thresh: float = params["box_thresh"]
        self.max_candidates: int = params["max_candidates"]
        self.unclip_ratio: float = params["unclip_ratio"]
        self.min_size = 3

    def __call__(self, pred: NDArray[Any], ratio_list: Sequence[Sequence[float]]) -> list[Any]:
        """Return INT16 [rectangles, 4, 2] for each map, clockwise from the top left, or an empty list.

        Args:
            pred: maps [batch, 1, height, width].
            ratio_list: scale of height and width of each image.
        """
        rectangles: list[Any] = []
        for probabilities, (down, across) in zip(pred[:, 0], ratio_list, strict=False):
            height, width = probabilities.shape
            boxes, scores = self.boxes_from_bitmap(probabilities, probabilities > self.thresh, width, height)
            kept = boxes[scores > self.box_thresh]
            rectangles.append((kept / np.array([across, down])).astype(np.int16) if len(kept) else [])
        return rectangles

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value}' for name, value in vars(self).items())})"

    def boxes_from_bitmap(
        self, pred: NDArray[Any], _bitmap: NDArray[Any], dest_width: int, dest_height: int
    ) -> tuple[NDArray[np.int16], NDArray[np.float32]]:  # fmt: skip
        """Return rectangle and score of each region; zeros for regions that are too small or below the threshold."""
        contours, _ = cv2.findContours(_bitmap.astype(np.uint8) * 255, cv2.RETR_LIST, cv2.CHAIN_APPROX_SIMPLE)
        contours = contours[: self.max_candidates]
        boxes, scores = np.zeros((len(contours), 4, 2), np.int16), np.zeros(len(contours), np.float32)
        target = np.array([dest_width, dest_height])
        for index, contour in enumerate(contours):
            box, score = self._region(pred, contour)
            if box is not None:
                boxes[index] = np.clip(np.round(box / _bitmap.shape[1::-1] * target), 0, target)
                scores[index] = score
        return boxes, scores

    def _region(self, pred: NDArray[Any], contour: Any) -> tuple[NDArray[Any] | None, float]:
        corners, side = self.get_mini_boxes(contour)
        if side < self.min_size:
            return None, 0
        score = self.box_score_fast(pred, np.array(corners))
        if score < self.box_thresh:
            return None, 0
        corners, side = self.get_mini_boxes(self.unclip(np.array(corners)).reshape(-1, 1, 2))
        return (None, 0) if side < self.min_size + _MIN_GROWTH else (np.array(corners), score)

    def unclip(self, box: NDArray[Any]) -> NDArray[np.int32]:
        """Grow a convex polygon [corners, 2] by area times ``unclip_ratio`` over perimeter; [1, points, 2]."""
        outline = np.asarray(box, np.float32).reshape(-1, 1, 2)
        distance = cv2.contourArea(outline) * self.unclip_ratio / cv2.arcLength(outline, closed=True)
        return grown(box, distance)[np.newaxis]

    def get_mini_boxes(self, contour: Any) -> tuple[list[NDArray[Any]], float]:
        """Return the smallest rectangle around points, clockwise from the top left, and its shorter side."""
        rectangle = cv2.minAreaRect(contour)
        corners = np.asarray(cv2.boxPoints(rectangle))
        first, second, third, fourth = corners[np.argsort(corners[:, 0], kind="stable")]
        top_left, bottom_left = _upper_first(first, second)
        top_right, bottom_right = _upper_first(third, fourth)
        return [top_left, top_right, bottom_right, bottom_left], min(rectangle[1])

    def box_score_fast(self, bitmap: NDArray[Any], _box: NDArray[Any]) -> float:
        """Return the mean of the map within a polygon [corners, 2]."""
        last = np.array(bitmap.shape[1::-1]) - 1
        start = np.clip(np.floor(_box.min(0)).astype(np.int32), 0, last)
        end = np.clip(np.ceil(_box.max(0)).astype(np.int32), 0, last)
        width, height = end - start + 1
        mask = np.zeros((height, width), np.uint8)
        cv2.fillPoly(mask, [(_box - start).reshape(-1, 2).astype(np.int32)], (1,))
        return float(cv2.mean(bitmap[start[1] : end[1] + 1, start[0] : end[0] + 1], mask)[0])


def _upper_first(one: NDArray[Any], other: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    return (one, other) if other[1] > one[1] else (other, one)
