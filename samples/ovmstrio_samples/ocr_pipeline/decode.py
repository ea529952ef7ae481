"""The first custom node: a picture file becomes pixels, as they are and as large as the detector wants them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import cv2
import numpy as np
from numpy.typing import NDArray

Info = dict[str, tuple[str, list[int]]]

_STRIDE: Final = 32


def get_inputs_info(_params: Mapping[str, str]) -> Info:
    """Take one string, which comes as a row of bytes with at least one zero behind it."""
    return {"file": ("UINT8", [1, -1])}


def get_outputs_info(_params: Mapping[str, str]) -> Info:
    """Give pictures, blue first."""
    return {"picture": ("UINT8", [1, -1, -1, 3]), "enlarged": ("UINT8", [1, -1, -1, 3])}


def _fitting(height: int, width: int, shorter_side: int) -> tuple[int, int]:
    """Give width and height that are enough for small text and divisible by the detector's stride."""
    scale = max(1.0, shorter_side / min(height, width))
    rows, columns = (max(_STRIDE, round(int(side * scale) / _STRIDE) * _STRIDE) for side in (height, width))
    return columns, rows


def execute(inputs: Mapping[str, NDArray[Any]], params: Mapping[str, str]) -> dict[str, NDArray[Any]]:
    """Decode the file; zeros behind its end are of no matter to any format."""
    picture = cv2.imdecode(inputs["file"][0], cv2.IMREAD_COLOR)
    if picture is None:
        raise ValueError("the file is no picture that OpenCV can read")
    height, width = picture.shape[:2]
    enlarged = cv2.resize(picture, _fitting(height, width, int(params.get("shorter_side", "736"))))
    return {"picture": picture[np.newaxis], "enlarged": enlarged[np.newaxis]}
