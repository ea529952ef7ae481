"""Demultiplexer that crops a picture for each line of text in the detector's map."""

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
    """Describe the inputs: the picture, and the detector's map of any size."""
    return {"picture": ("UINT8", [1, -1, -1, 3]), "likely": ("FP32", [1, 1, -1, -1])}


def get_outputs_info(_params: Mapping[str, str]) -> Info:
    """Describe the outputs, one of each per line: a padded picture, its used width, and four corners."""
    return {
        "lines": ("UINT8", [-1, 1, _HEIGHT, -1, 3]),
        "widths": ("INT32", [-1, 1, 1]),
        "boxes": ("INT32", [-1, 4, 2]),
    }


def _stacked(pictures: Sequence[NDArray[Any]], widths: NDArray[Any]) -> NDArray[Any]:
    """Pad pictures of different widths with grey and stack them."""
    stack = np.full((len(pictures), 1, _HEIGHT, int(widths.max(initial=_NARROWEST)), 3), _GREY, np.uint8)
    for place, picture in zip(stack, pictures, strict=True):
        place[0, :, : picture.shape[1]] = picture
    return stack


def execute(inputs: Mapping[str, NDArray[Any]], params: Mapping[str, str]) -> dict[str, NDArray[Any]]:
    """Find and crop the lines; without lines, the pipeline ends here."""
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
