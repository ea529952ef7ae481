"""Read the text in pictures: ``python -m ovmstrio_samples.ocr.client CHARACTERS.txt [PICTURE...]``.

One picture takes three models: ``ocr_det`` finds the lines, ``ocr_cls`` tells which of them stand on their heads, and
``ocr_rec`` reads them.  Text has to run roughly from left to right.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from ovmstrio_samples import pictures
from ovmstrio_samples.asking import arguments, connect
from ovmstrio_samples.ocr.regions import Box, regions
from ovmstrio_samples.question import Array, Ask

__all__ = ["read_characters", "read_text"]

_SHORTER_SIDE: Final = 320
_LINE_HEIGHT: Final = 48
_GROWTH: Final = 1.6


def read_characters(path: Path) -> list[str]:
    """Read what the reader's outputs stand for: nothing, then the characters of the file, then a blank."""
    return ["", *path.read_text(encoding="utf-8").splitlines(), " "]


def _normalised(rgb: Array) -> Array:
    """Give FP32 [3,height,width] between -1 and 1, blue first."""
    return ((rgb[..., ::-1].astype(np.float32) / 255 - 0.5) / 0.5).transpose(2, 0, 1)


def _only(outputs: Iterable[Array]) -> Array:
    (values,) = outputs
    return values


def find_lines(ask: Ask, rgb: Array) -> list[Box]:
    """Give rectangles around the lines of text, from top to bottom."""
    height, width = rgb.shape[:2]
    scale = max(1.0, _SHORTER_SIDE / min(height, width))
    rows, columns = (max(32, round(side * scale / 32) * 32) for side in (height, width))
    enlarged = pictures.resized(rgb, columns, rows)
    likely = _only(ask("ocr_det", {"x": _normalised(enlarged)[np.newaxis]}).values())[0, 0]
    lines = []
    for box in regions(likely > 0.3):
        if min(box.width, box.height) < 3 or likely[box.top : box.bottom, box.left : box.right].mean() < 0.5:
            continue
        margin = box.width * box.height * _GROWTH / (2 * (box.width + box.height))
        left, right = ((side * width / columns) for side in (box.left - margin, box.right + margin))
        top, bottom = ((side * height / rows) for side in (box.top - margin, box.bottom + margin))
        lines.append(Box(max(0, round(left)), max(0, round(top)), min(width, round(right)), min(height, round(bottom))))
    return lines


def _fitted(rgb: Array, width: int) -> Array:
    """Make a line as high as the models expect, with grey behind its end."""
    room = np.zeros((3, _LINE_HEIGHT, width), np.float32)
    needed = min(width, max(1, round(_LINE_HEIGHT * rgb.shape[1] / rgb.shape[0])))
    room[:, :, :needed] = _normalised(pictures.resized(rgb, needed, _LINE_HEIGHT))
    return room


def _upright(ask: Ask, lines: Sequence[Array]) -> list[Array]:
    turned = _only(ask("ocr_cls", {"x": np.stack([_fitted(line, 192) for line in lines])}).values())[:, 1] > 0.9
    return [np.rot90(line, 2) if upside_down else line for line, upside_down in zip(lines, turned, strict=True)]


def _read_line(ask: Ask, line: Array, characters: Sequence[str]) -> str:
    """Read one line: the likeliest character of each step, where a step that repeats the last one adds nothing."""
    width = max(320, round(_LINE_HEIGHT * line.shape[1] / line.shape[0]))
    steps = _only(ask("ocr_rec", {"x": _fitted(line, width)[np.newaxis]}).values())[0].argmax(axis=1)
    changed = np.concatenate([[True], steps[1:] != steps[:-1]])
    return "".join(characters[step] for step in steps[changed])


def read_text(ask: Ask, rgb: Array, characters: Sequence[str]) -> list[str]:
    """Give the lines of text in a picture, UINT8 [height,width,3]."""
    boxes = find_lines(ask, rgb)
    if not boxes:
        return []
    lines = [rgb[box.top : box.bottom, box.left : box.right] for box in boxes]
    return [_read_line(ask, line, characters) for line in _upright(ask, lines)]


if __name__ == "__main__":
    options = arguments("What do these pictures say?", "CHARACTERS", required=True)
    known, *files = options.files
    with connect(options) as ask_server:
        drawn = [pictures.page(["Three models read this page", "one after the other."])]
        for picture in [pictures.read(file) for file in files] or drawn:
            print("\n".join(read_text(ask_server, picture, read_characters(known))))
