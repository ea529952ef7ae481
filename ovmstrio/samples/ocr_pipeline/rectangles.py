"""Rotated rectangles around the lines of text in a picture."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import cv2
import numpy as np
from numpy.typing import NDArray

Rectangle = tuple[tuple[float, float], tuple[float, float], float]
"""OpenCV's rotated rectangle: centre, size and angle."""

_SMALLEST: Final = 3
_JOINING: Final = np.ones((2, 2), np.uint8)
_TALL: Final = 1.5


def text_rectangles(likely: NDArray[Any], threshold: float, box_threshold: float, growth: float) -> Iterator[Rectangle]:
    """Return a rectangle around each region where text is likely.

    The detector marks only the core of each line, so that lines do not touch.  A rectangle is enlarged by its area
    times ``growth`` over its circumference, which is how much the cores were shrunk for training.
    """
    mask = cv2.dilate((likely > threshold).astype(np.uint8), _JOINING)
    contours, _ = cv2.findContours(mask, cv2.RETR_LIST, cv2.CHAIN_APPROX_SIMPLE)
    for contour in contours:
        (x, y), (width, height), angle = cv2.minAreaRect(contour)
        if min(width, height) < _SMALLEST or _mean(likely, ((x, y), (width, height), angle)) < box_threshold:
            continue
        margin = width * height * growth / (2 * (width + height))
        yield (x, y), (width + 2 * margin, height + 2 * margin), angle


def _mean(likely: NDArray[Any], rectangle: Rectangle) -> float:
    """Return the mean of the map inside a rectangle."""
    points = cv2.boxPoints(rectangle)
    left, top = np.maximum(np.floor(points.min(axis=0)), 0).astype(int)
    right, bottom = np.ceil(points.max(axis=0)).astype(int) + 1
    part = likely[top:bottom, left:right]
    inside = np.zeros(part.shape, np.uint8)
    cv2.fillPoly(inside, [(points - (left, top)).astype(np.int32)], 1)
    return float(cv2.mean(part, inside)[0])


def corners(rectangle: Rectangle, scale: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """Return a rectangle's corners in the picture: top left, top right, bottom right, bottom left."""
    points = cv2.boxPoints(rectangle) * scale
    by_x = points[np.argsort(points[:, 0], kind="stable")]
    left, right = (side[np.argsort(side[:, 1], kind="stable")] for side in (by_x[:2], by_x[2:]))
    ordered = np.array([left[0], right[0], right[1], left[1]])
    return np.clip(np.round(ordered), 0, (shape[1] - 1, shape[0] - 1)).astype(np.int32)


def in_reading_order(boxes: NDArray[Any]) -> NDArray[Any]:
    """Sort boxes from top to bottom, and boxes at about the same height from left to right."""
    if not len(boxes):
        return boxes
    middles = boxes.mean(axis=1)
    heights = np.linalg.norm(boxes[:, 3] - boxes[:, 0], axis=1)
    down = np.argsort(middles[:, 1], kind="stable")
    steps = np.diff(middles[down, 1]) > heights[down][1:] / 2
    rows = np.concatenate([[0], np.cumsum(steps)])
    return boxes[down[np.lexsort((middles[down, 0], rows))]]


def upright(picture: NDArray[Any], box: NDArray[Any], height: int, widest: int) -> NDArray[Any]:
    """Crop and straighten a box to the given height; a tall narrow box is turned to the left."""
    sides = np.linalg.norm(box - np.roll(box, 1, axis=0), axis=1)
    size = (max(1, int(sides[[1, 3]].max())), max(1, int(sides[[0, 2]].max())))
    target = np.array([[0, 0], [size[0], 0], size, [0, size[1]]], np.float32)
    matrix = cv2.getPerspectiveTransform(box.astype(np.float32), target)
    cut = cv2.warpPerspective(picture, matrix, size, flags=cv2.INTER_CUBIC, borderMode=cv2.BORDER_REPLICATE)
    if size[1] >= _TALL * size[0]:
        cut = np.rot90(cut)
    width = min(widest, max(1, int(np.ceil(height * cut.shape[1] / cut.shape[0]))))
    return np.asarray(cv2.resize(cut, (width, height)))
