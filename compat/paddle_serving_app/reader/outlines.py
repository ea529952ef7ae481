"""Polygon offsetting."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["grown"]

_TOLERANCE: Final = 0.25
"""Largest distance in pixels between a round corner and its polygon."""
_FULL_CIRCLE: Final = 2 * np.pi


def grown(polygon: NDArray[Any], distance: float) -> NDArray[np.int32]:
    """Offset a convex polygon [corners, 2] in pixels outwards; [points, 2] with round corners.

    Corners are truncated to integers first and points rounded last, as in the original's library, with which models'
    thresholds were chosen.
    """
    corners = np.trunc(np.asarray(polygon, np.float64))
    corners = corners[np.any(corners != np.roll(corners, 1, 0), 1)]
    edges = np.roll(corners, -1, 0) - corners
    if np.sum(corners[:, 0] * edges[:, 1] - corners[:, 1] * edges[:, 0]) < 0:
        corners = corners[::-1]
        edges = np.roll(corners, -1, 0) - corners
    outwards = np.arctan2(-edges[:, 0], edges[:, 1])
    step = _angle_step(distance)
    points = [
        corner + distance * np.array([np.cos(angle), np.sin(angle)])
        for corner, start, end in zip(corners, np.roll(outwards, 1), outwards, strict=True)
        for angle in (*(start + step * np.arange(max(1, round((end - start) % _FULL_CIRCLE / step)))), end)
    ]
    return np.rint(points).astype(np.int32)


def _angle_step(distance: float) -> float:
    tolerance = min(_TOLERANCE, _TOLERANCE * distance)
    return float(max(2 * np.arccos(1 - tolerance / distance), 2 / distance))
