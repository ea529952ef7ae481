"""Preprocessing and postprocessing of the PP-OCR models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

from ovmstrio import Array
from ovmstrio.samples import pictures
from ovmstrio.samples.ocr.regions import Box, regions

__all__ = ["cut", "detector_input", "fitted", "lines_in", "read_characters", "reader_input", "spell"]

_LINE_HEIGHT: Final = 48
_NARROWEST: Final = 320
_GROWTH: Final = 1.6


def read_characters(path: Path) -> list[str]:
    """Load the recognition model's classes: nothing, then the characters of the file, then a blank."""
    return ["", *path.read_text(encoding="utf-8").splitlines(), " "]


def _normalised(rgb: Array) -> Array:
    """Normalise to FP32 [3,height,width] between -1 and 1, in BGR order."""
    return ((rgb[..., ::-1].astype(np.float32) / 255 - 0.5) / 0.5).transpose(2, 0, 1)


def detector_input(rgb: Array, shorter_side: int = 320) -> Array:
    """Enlarge a picture for small text: FP32 [1,3,height,width]."""
    height, width = rgb.shape[:2]
    scale = max(1.0, shorter_side / min(height, width))
    rows, columns = (max(32, round(side * scale / 32) * 32) for side in (height, width))
    return _normalised(pictures.resized(rgb, columns, rows))[np.newaxis]


def lines_in(likely: Array, shape: tuple[int, ...]) -> list[Box]:
    """Return rectangles around the lines of text in a picture of the given shape, from top to bottom.

    The detector marks only the core of each line, so that lines do not touch; this function enlarges the rectangles.
    """
    height, width = shape[:2]
    rows, columns = likely.shape
    lines = []
    for box in regions(likely > 0.3):
        if min(box.width, box.height) < 3 or likely[box.top : box.bottom, box.left : box.right].mean() < 0.5:
            continue
        margin = box.width * box.height * _GROWTH / (2 * (box.width + box.height))
        left, right = ((side * width / columns) for side in (box.left - margin, box.right + margin))
        top, bottom = ((side * height / rows) for side in (box.top - margin, box.bottom + margin))
        lines.append(Box(max(0, round(left)), max(0, round(top)), min(width, round(right)), min(height, round(bottom))))
    return lines


def cut(rgb: Array, box: Box) -> Array:
    """Crop a rectangle of a picture."""
    return rgb[box.top : box.bottom, box.left : box.right]


def fitted(rgb: Array, width: int) -> Array:
    """Resize a line to the models' height and pad its end with grey: FP32 [3,48,width]."""
    room = np.zeros((3, _LINE_HEIGHT, width), np.float32)
    needed = min(width, max(1, round(_LINE_HEIGHT * rgb.shape[1] / rgb.shape[0])))
    room[:, :, :needed] = _normalised(pictures.resized(rgb, needed, _LINE_HEIGHT))
    return room


def reader_input(line: Array) -> Array:
    """Convert a line to the input of the recognition model: FP32 [1,3,48,width]."""
    return fitted(line, max(_NARROWEST, round(_LINE_HEIGHT * line.shape[1] / line.shape[0])))[np.newaxis]


def spell(likely: Array, characters: Sequence[str]) -> str:
    """Decode the likeliest character of each step, and merge repeated steps."""
    steps = likely.argmax(axis=1)
    changed = np.concatenate([[True], steps[1:] != steps[:-1]])
    return "".join(characters[step] for step in steps[changed])
