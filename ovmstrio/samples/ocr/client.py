"""Client of the sample ocr: ``python -m ovmstrio.samples.ocr.client --characters FILE [--input PICTURE...]``.

The client calls three models: ``ocr_det`` finds the lines, ``ocr_cls`` detects upside-down lines, and ``ocr_rec`` reads
them.  Text has to run roughly from left to right.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from ovmstrio import Array
from ovmstrio.samples import pictures
from ovmstrio.samples.asking import arguments, connect
from ovmstrio.samples.ocr.reading import cut, detector_input, fitted, lines_in, read_characters, reader_input, spell
from ovmstrio.samples.ocr.regions import Box
from ovmstrio.samples.question import Ask

__all__ = ["read_characters", "read_text"]


def _only(outputs: Iterable[Array]) -> Array:
    (values,) = outputs
    return values


def find_lines(ask: Ask, rgb: Array) -> list[Box]:
    """Return rectangles around the lines of text, from top to bottom."""
    return lines_in(_only(ask("ocr_det", {"x": detector_input(rgb)}).values())[0, 0], rgb.shape)


def _upright(ask: Ask, lines: Sequence[Array]) -> list[Array]:
    turned = _only(ask("ocr_cls", {"x": np.stack([fitted(line, 192) for line in lines])}).values())[:, 1] > 0.9
    return [np.rot90(line, 2) if upside_down else line for line, upside_down in zip(lines, turned, strict=True)]


def _read_line(ask: Ask, line: Array, characters: Sequence[str]) -> str:
    return spell(_only(ask("ocr_rec", {"x": reader_input(line)}).values())[0], characters)


def read_text(ask: Ask, rgb: Array, characters: Sequence[str]) -> list[str]:
    """Return the lines of text in a picture, UINT8 [height,width,3]."""
    boxes = find_lines(ask, rgb)
    if not boxes:
        return []
    lines = [cut(rgb, box) for box in boxes]
    return [_read_line(ask, line, characters) for line in _upright(ask, lines)]


if __name__ == "__main__":
    known = ("--characters", {"metavar": "FILE", "type": Path, "required": True, "help": "the models' characters.txt"})
    options = arguments("Read the text in pictures.", known, file="PICTURE")
    with connect(options) as ask_server:
        drawn = [pictures.page(["Three models read this page", "one after the other."])]
        for picture in [pictures.read(file) for file in options.input] or drawn:
            print("\n".join(read_text(ask_server, picture, read_characters(options.characters))))
