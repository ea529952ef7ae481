"""Custom node that decodes a picture file, in its original size and in the detector's size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import cv2
import numpy as np
from numpy.typing import NDArray

Info = dict[str, tuple[str, list[int]]]

_STRIDE: Final = 32


def get_inputs_info(_params: Mapping[str, str]) -> Info:
    """Describe the input: one string, as a row of bytes with at least one trailing zero."""
    return {"file": ("UINT8", [1, -1])}


def get_outputs_info(_params: Mapping[str, str]) -> Info:
    """Describe the outputs: pictures in BGR order."""
    return {"picture": ("UINT8", [1, -1, -1, 3]), "enlarged": ("UINT8", [1, -1, -1, 3])}


def _fitting(height: int, width: int, shorter_side: int) -> tuple[int, int]:
    """Return width and height that are large enough for small text and divisible by the detector's stride."""
    scale = max(1.0, shorter_side / min(height, width))
    rows, columns = (max(_STRIDE, round(int(side * scale) / _STRIDE) * _STRIDE) for side in (height, width))
    return columns, rows


def execute(inputs: Mapping[str, NDArray[Any]], params: Mapping[str, str]) -> dict[str, NDArray[Any]]:
    """Decode the file; every format ignores trailing zeros."""
    picture = cv2.imdecode(inputs["file"][0], cv2.IMREAD_COLOR)
    if picture is None:
        raise ValueError("the file is no picture that OpenCV can read")
    height, width = picture.shape[:2]
    enlarged = cv2.resize(picture, _fitting(height, width, int(params.get("shorter_side", "736"))))
    return {"picture": picture[np.newaxis], "enlarged": enlarged[np.newaxis]}
