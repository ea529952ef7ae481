"""Image functions on arrays [height, width, channels]."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from paddle_serving_app.reader.opencv import cv2

__all__ = ["crop", "normalize", "resize", "transpose"]

_NO_LIMIT: Final = 2**31 - 1


def transpose(img: NDArray[Any], transpose_target: Sequence[int]) -> NDArray[Any]:
    """Permute axes; a view."""
    return img.transpose(transpose_target)


def normalize(
    img: NDArray[Any], mean: Sequence[float], std: Sequence[float], channel_first: bool = False
) -> NDArray[np.float32]:  # fmt: skip
    """Subtract the mean and divide by the deviation of each of three channels; FP32 copy."""
    shape = (3, 1, 1) if channel_first else (1, 1, 3)
    result = np.array(img, np.float32)
    result -= np.reshape(mean, shape)
    result /= np.reshape(std, shape)
    return result


def crop(img: NDArray[Any], target_size: int, center: bool = True) -> NDArray[Any]:
    """Crop a square at the center or at a random place; a view."""
    height, width = img.shape[:2]
    if center:
        top, left = (height - target_size) // 2, (width - target_size) // 2
    else:
        generator = np.random.default_rng()
        top, left = (int(generator.integers(0, side - target_size + 1)) for side in (height, width))
    return img[top : top + target_size, left : left + target_size, :]


def resize(
    img: NDArray[Any],
    target_size: int | tuple[int, int],
    max_size: int = _NO_LIMIT,
    interpolation: int | None = None,
) -> NDArray[Any]:
    """Resize an image.

    Args:
        img: the image.
        target_size: width and height, or the length of the shorter side for proportional scaling.
        max_size: limit of both sides.
        interpolation: OpenCV's interpolation number; default linear.
    """
    if isinstance(target_size, tuple):
        width, height = (min(side, max_size) for side in target_size)
    else:
        shorter, longer = sorted(img.shape[:2])
        ratio = target_size / shorter
        if np.round(ratio * longer) > max_size:
            ratio = max_size / longer
        height, width = (round(side * ratio) for side in img.shape[:2])
    return cv2.resize(img, (width, height), interpolation=interpolation or cv2.INTER_LINEAR)
