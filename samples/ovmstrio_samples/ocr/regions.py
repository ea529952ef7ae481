"""Find the rectangles around the regions of a mask that hang together."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ovmstrio import Array

__all__ = ["Box", "regions"]


@dataclass(slots=True)
class Box:
    """A rectangle; ``right`` and ``bottom`` are the first column and row outside of it."""

    left: int
    top: int
    right: int
    bottom: int

    @property
    def width(self) -> int:
        """How many columns it has."""
        return self.right - self.left

    @property
    def height(self) -> int:
        """How many rows it has."""
        return self.bottom - self.top

    def swallow(self, other: Box) -> None:
        """Grow until ``other`` is inside."""
        self.left, self.top = min(self.left, other.left), min(self.top, other.top)
        self.right, self.bottom = max(self.right, other.right), max(self.bottom, other.bottom)


def _runs(row: Array) -> list[tuple[int, int]]:
    """List where the row is set: first column and the first one after."""
    edges = np.flatnonzero(np.diff(row.astype(np.int8), prepend=0, append=0))
    return [(int(start), int(end)) for start, end in edges.reshape(-1, 2)]


def regions(mask: Array) -> list[Box]:
    """Give the rectangle around each region of the mask, bool [height,width], from top to bottom.

    Goes through the rows from above; a run of set points belongs to the regions of the runs that it touches in the row
    above, and joins them where there are several.
    """
    found: dict[int, Box] = {}
    above: list[tuple[int, int, int]] = []
    for number, row in enumerate(mask):
        current: list[tuple[int, int, int]] = []
        for start, end in _runs(row):
            touched = {region for left, right, region in above + current if left <= end and start <= right}
            region = min(touched, default=len(found) + number * mask.shape[1] + start)
            box = found.setdefault(region, Box(start, number, end, number + 1))
            box.swallow(Box(start, number, end, number + 1))
            for other in touched - {region}:
                box.swallow(found.pop(other))
            above = [(left, right, region if old in touched else old) for left, right, old in above]
            current = [(left, right, region if old in touched else old) for left, right, old in current]
            current.append((start, end, region))
        above = current
    return sorted(found.values(), key=lambda box: (box.top, box.left))
