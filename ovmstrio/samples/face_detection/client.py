"""Client of the sample face_detection: ``python -m ovmstrio.samples.face_detection.client --input PICTURE...``."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Final

import numpy as np

from ovmstrio import Array
from ovmstrio.samples import pictures
from ovmstrio.samples.asking import arguments, main
from ovmstrio.samples.question import Arrays, Question

__all__ = ["Face", "ask_about", "faces"]

_SIDE: Final = 128
_GRIDS: Final = ((16, 2), (8, 6))
_OVERLAP: Final = 0.3


@dataclass(frozen=True, slots=True)
class Face:
    """Bounding box of one face in pixels, with the model's score."""

    score: float
    left: int
    top: int
    right: int
    bottom: int


@cache
def _anchors() -> Array:
    """Return the centres of the model's 896 anchor boxes, between 0 and 1."""
    rows = []
    for cells, boxes in _GRIDS:
        centres = (np.arange(cells) + 0.5) / cells
        y, x = np.meshgrid(centres, centres, indexing="ij")
        rows.append(np.repeat(np.stack([x.ravel(), y.ravel()], axis=1), boxes, axis=0))
    return np.concatenate(rows)


def _square(rgb: Array) -> Array:
    """Pad the picture with black to a square."""
    height, width = rgb.shape[:2]
    side = max(height, width)
    square = np.zeros((side, side, 3), np.uint8)
    top, left = (side - height) // 2, (side - width) // 2
    square[top : top + height, left : left + width] = rgb
    return square


def _overlap(boxes: Array, box: Array) -> Array:
    low, high = np.maximum(boxes[:, :2], box[:2]), np.minimum(boxes[:, 2:], box[2:])
    common = np.clip(high - low, 0, None).prod(axis=1)
    areas = (boxes[:, 2:] - boxes[:, :2]).prod(axis=1) + (box[2:] - box[:2]).prod()
    shared: Array = common / (areas - common)
    return shared


def faces(outputs: Arrays, height: int, width: int, threshold: float = 0.5) -> list[Face]:
    """Decode the outputs; overlapping boxes are averaged to one face."""
    scores = 1 / (1 + np.exp(-np.clip(outputs["classificators"].reshape(-1).astype(np.float64), -100, 100)))
    sure = scores >= threshold
    scores, places = scores[sure], outputs["regressors"].reshape(-1, 16)[sure, :4] / _SIDE
    centres = places[:, :2] + _anchors()[sure]
    boxes = np.concatenate([centres - places[:, 2:] / 2, centres + places[:, 2:] / 2], axis=1)
    side = max(height, width)
    margin = np.array([(side - width) / 2, (side - height) / 2] * 2)
    found = []
    order = scores.argsort()[::-1]
    while len(order):
        same = _overlap(boxes[order], boxes[order[0]]) > _OVERLAP
        group = order[same]
        box = np.average(boxes[group], axis=0, weights=scores[group]) * side - margin
        found.append(Face(float(scores[order[0]]), *(int(corner) for corner in box.round())))
        order = order[~same]
    return found


def ask_about(subject: str, rgb: Array, expected: str = "") -> Question:
    """Create the call for one picture, UINT8 [height,width,3]."""
    height, width = rgb.shape[:2]
    small = pictures.resized(_square(rgb), _SIDE, _SIDE).astype(np.float32)

    def read(outputs: Arrays) -> str:
        found = faces(outputs, height, width)
        return ", ".join(f"({face.left},{face.top})-({face.right},{face.bottom})" for face in found) or "no face"

    return Question("face_detection", subject, {"input": small[np.newaxis] / 127.5 - 1}, expected, read)


if __name__ == "__main__":
    options = arguments("Detect faces in pictures.", model="face_detection", file="PICTURE", required=True)
    main(options, [ask_about(str(path), pictures.read(path)) for path in options.input])
