"""Where texts are, as EAST detectors tell it: for each cell a score, four distances and an angle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from ovmstrio.core.errors import CustomNodeFailure
from ovmstrio.core.tensor import Array
from ovmstrio.runtimes.pipelines.custom_nodes.builtin.pictures import Box, to_pixels

__all__ = ["FoundText", "find_texts", "suppress_overlaps"]

_CELL: Final = 4


@dataclass(frozen=True, slots=True)
class FoundText:
    """A text: the upright box around it, how high it is itself, and by how much (in radians) it slants."""

    box: Box
    score: float
    angle: float
    height: float

    def grown(self, wider: float, higher: float, width: int, height: int) -> FoundText:
        """Widen the box on each side by a share of its size, within an image.

        Raises:
            CustomNodeFailure: nothing of the box lies in the image.
        """
        box = self.box
        across, down = int(box.width * wider), int(box.height * higher)
        grown = Box(box.left - across, box.top - down, box.right + across, box.bottom + down).clamped(width, height)
        if grown.is_empty:
            raise CustomNodeFailure(f"nothing of the text at {box} lies in the image of {width} x {height} pixels")
        return replace(self, box=grown)


def find_texts(scores: Array, geometry: Array, threshold: float) -> list[FoundText]:
    """Give the text of every cell whose score is high enough, row by row.

    Raises:
        CustomNodeFailure: a distance or an angle is not finite.
    """
    rows, columns = np.nonzero(scores >= np.float32(threshold))
    found = geometry[rows, columns].astype(np.float64)
    up, right, down, left, angle = found.T
    if not np.isfinite(found).all():
        raise CustomNodeFailure("the geometry has values that are no places in an image")
    heights, widths = up + down, right + left
    cos, sin = np.cos(angle), np.sin(angle)
    # The second corner is where the text ends below; the others follow from it along the text's own axes.
    second = to_pixels(
        np.stack([columns * _CELL + cos * right + sin * down, rows * _CELL - sin * right + cos * down]), "geometry"
    )
    first = second + np.stack([-sin * heights, -cos * heights])
    third = second + np.stack([-cos * widths, sin * widths])
    corners = np.stack([first, second, third, third + first - second])
    low, high = to_pixels(corners.min(axis=0), "geometry").T, to_pixels(corners.max(axis=0), "geometry").T
    return [
        FoundText(Box(*start, *end), score, slant, height)
        for start, end, score, slant, height in zip(
            low.tolist(), high.tolist(), scores[rows, columns].tolist(), angle.tolist(), heights.tolist(), strict=True
        )
    ]


def suppress_overlaps(texts: Sequence[FoundText], threshold: float, limit: int) -> list[FoundText]:
    """Take the best text again and again, leaving out those that overlap with one that was taken.

    Args:
        texts: all that were found; of equal ones the first is the best.
        threshold: the largest share of two boxes that may be common to both.
        limit: how many are taken at most.
    """
    edges = np.array([(text.box.left, text.box.top, text.box.right, text.box.bottom) for text in texts], np.float64)
    waiting = np.argsort([-text.score for text in texts], kind="stable")
    taken: list[FoundText] = []
    while waiting.size and len(taken) < limit:
        best, waiting = waiting[0], waiting[1:]
        taken.append(texts[best])
        waiting = waiting[_overlaps(edges[best], edges[waiting]) <= threshold]
    return taken


def _overlaps(box: Array, others: Array) -> Array:
    """Give what a box and each of others have in common as a share of what both cover."""
    sides = np.minimum(box[2:], others[:, 2:]) - np.maximum(box[:2], others[:, :2])
    common = np.clip(sides, 0, None).prod(axis=1)
    covered = (box[2:] - box[:2]).prod() + (others[:, 2:] - others[:, :2]).prod(axis=1) - common
    share: Array = common / covered
    return share
