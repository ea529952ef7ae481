"""``DBPostProcess``: where text is, out of a map of how likely it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from paddle_serving_app.reader.opencv import cv2
from paddle_serving_app.reader.outlines import grown

__all__ = ["DBPostProcess"]

_LEAST_GROWTH: Final = 2


class DBPostProcess:
    """Finds rectangles of text as differentiable binarization does.

    Args:
        params: ``thresh`` above which a pixel is text, ``box_thresh`` above which a region is, on the average,
            ``max_candidates`` regions at the most, and ``unclip_ratio``, by which regions are enlarged.
    """

    def __init__(self, params: Mapping[str, Any]) -> None:
        self.thresh: float = params["thresh"]
        self.box_thresh: float = params["box_thresh"]
        self.max_candidates: int = params["max_candidates"]
        self.unclip_ratio: float = params["unclip_ratio"]
        self.min_size = 3

    def __call__(self, pred: NDArray[Any], ratio_list: Sequence[Sequence[float]]) -> list[Any]:
        """Give for each of a batch INT16 [rectangles, 4, 2], clockwise from the top left, or an empty list.

        Args:
            pred: the map [batch, 1, height, width].
            ratio_list: for each of the batch by how much the image's height and width were multiplied.
        """
        found: list[Any] = []
        for likely, (down, across) in zip(pred[:, 0], ratio_list, strict=False):
            height, width = likely.shape
            boxes, scores = self.boxes_from_bitmap(likely, likely > self.thresh, width, height)
            kept = boxes[scores > self.box_thresh]
            found.append((kept / np.array([across, down])).astype(np.int16) if len(kept) else [])
        return found

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value}' for name, value in vars(self).items())})"

    def boxes_from_bitmap(
        self, pred: NDArray[Any], _bitmap: NDArray[Any], dest_width: int, dest_height: int
    ) -> tuple[NDArray[np.int16], NDArray[np.float32]]:  # fmt: skip
        """Give a rectangle and a score for each region, zeros for regions that are too small or not likely enough."""
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
        return (None, 0) if side < self.min_size + _LEAST_GROWTH else (np.array(corners), score)

    def unclip(self, box: NDArray[Any]) -> NDArray[np.int32]:
        """Enlarge a convex polygon [corners, 2] by a share of its area to its outline; [1, points, 2]."""
        outline = np.asarray(box, np.float32).reshape(-1, 1, 2)
        distance = cv2.contourArea(outline) * self.unclip_ratio / cv2.arcLength(outline, closed=True)
        return grown(box, distance)[np.newaxis]

    def get_mini_boxes(self, contour: Any) -> tuple[list[NDArray[Any]], float]:
        """Give the smallest rectangle around points, as corners clockwise from the top left, and its shorter side."""
        rectangle = cv2.minAreaRect(contour)
        corners = np.asarray(cv2.boxPoints(rectangle))
        first, second, third, fourth = corners[np.argsort(corners[:, 0], kind="stable")]
        top_left, bottom_left = _upper_first(first, second)
        top_right, bottom_right = _upper_first(third, fourth)
        return [top_left, top_right, bottom_right, bottom_left], min(rectangle[1])

    def box_score_fast(self, bitmap: NDArray[Any], _box: NDArray[Any]) -> float:
        """Give the average of the map within a polygon [corners, 2]."""
        last = np.array(bitmap.shape[1::-1]) - 1
        start = np.clip(np.floor(_box.min(0)).astype(np.int32), 0, last)
        end = np.clip(np.ceil(_box.max(0)).astype(np.int32), 0, last)
        width, height = end - start + 1
        mask = np.zeros((height, width), np.uint8)
        cv2.fillPoly(mask, [(_box - start).reshape(-1, 2).astype(np.int32)], (1,))
        return float(cv2.mean(bitmap[start[1] : end[1] + 1, start[0] : end[0] + 1], mask)[0])


def _upper_first(one: NDArray[Any], other: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    return (one, other) if other[1] > one[1] else (other, one)
