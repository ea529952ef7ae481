"""Bounding rectangles of the connected regions of a mask."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ovmstrio import Array

__all__ = ["Box", "regions"]


@dataclass(slots=True)
class Box:
    """Rectangle; ``right`` and ``bottom`` are exclusive."""

    left: int
    top: int
    right: int
    bottom: int

    @property
    def width(self) -> int:
        """Return the number of columns."""
        return self.right - self.left

    @property
    def height(self) -> int:
        """Return the number of rows."""
        return self.bottom - self.top

    def swallow(self, other: Box) -> None:
        """Enlarge the rectangle to include ``other``."""
        self.left, self.top = min(self.left, other.left), min(self.top, other.top)
        self.right, self.bottom = max(self.right, other.right), max(self.bottom, other.bottom)


def _runs(row: Array) -> list[tuple[int, int]]:
    """List the runs of set points in a row: first column and end column, exclusive."""
    edges = np.flatnonzero(np.diff(row.astype(np.int8), prepend=0, append=0))
    return [(int(start), int(end)) for start, end in edges.reshape(-1, 2)]


def regions(mask: Array) -> list[Box]:
    """Return the bounding rectangle of each region of the mask, bool [height,width], from top to bottom.

    Scans rows from the top.  A run of set points joins the regions of all runs that it touches in the previous row.
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
