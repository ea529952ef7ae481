"""The demultiplexer: a map of where text is likely becomes one small picture for each line of text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from .rectangles import corners, in_reading_order, text_rectangles, upright

Info = dict[str, tuple[str, list[int]]]

_HEIGHT: Final = 48
_NARROWEST: Final = 320
_WIDEST: Final = 3200
_WIDTH_STEP: Final = 16
_GREY: Final = 128


def get_inputs_info(_params: Mapping[str, str]) -> Info:
    """Take the picture, and the map of whatever size the detector gives it."""
    return {"picture": ("UINT8", [1, -1, -1, 3]), "likely": ("FP32", [1, 1, -1, -1])}


def get_outputs_info(_params: Mapping[str, str]) -> Info:
    """Give as many of each as there are lines: pictures of one size, how much of it is in use, and four corners."""
    return {
        "lines": ("UINT8", [-1, 1, _HEIGHT, -1, 3]),
        "widths": ("INT32", [-1, 1, 1]),
        "boxes": ("INT32", [-1, 4, 2]),
    }


def _stacked(pictures: Sequence[NDArray[Any]], widths: NDArray[Any]) -> NDArray[Any]:
    """Put pictures of different widths into one array, with grey behind their ends."""
    stack = np.full((len(pictures), 1, _HEIGHT, int(widths.max(initial=_NARROWEST)), 3), _GREY, np.uint8)
    for place, picture in zip(stack, pictures, strict=True):
        place[0, :, : picture.shape[1]] = picture
    return stack


def execute(inputs: Mapping[str, NDArray[Any]], params: Mapping[str, str]) -> dict[str, NDArray[Any]]:
    """Find the lines and cut them out; with no line at all the pipeline ends here."""
    picture, likely = inputs["picture"][0], inputs["likely"][0, 0]
    threshold, box_threshold = float(params["threshold"]), float(params["box_threshold"])
    scale = np.array(picture.shape[1::-1]) / likely.shape[::-1]
    found = [
        corners(rectangle, scale, picture.shape)
        for rectangle in text_rectangles(likely, threshold, box_threshold, float(params["growth"]))
    ]
    boxes = in_reading_order(np.array(found, np.int32).reshape(-1, 4, 2))
    lines = [upright(picture, box, _HEIGHT, _WIDEST) for box in boxes]
    needed = np.array([max(_NARROWEST, line.shape[1]) for line in lines], np.int32)
    widths = -(-needed // _WIDTH_STEP) * _WIDTH_STEP
    return {"lines": _stacked(lines, widths), "widths": widths.reshape(-1, 1, 1), "boxes": boxes}
