"""Image transforms and their sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paddle_serving_app.reader import functional
from paddle_serving_app.reader.opencv import cv2

__all__ = [
    "BGR2RGB",
    "RGB2BGR",
    "CenterCrop",
    "Div",
    "Lambda",
    "Normalize",
    "PadStride",
    "Resize",
    "ResizeByFactor",
    "Sequential",
    "Transpose",
    "padded",
]


@dataclass
class Sequential:
    """Applies transforms in order."""

    transforms: Sequence[Callable[[Any], Any]]

    def __call__(self, img: Any) -> Any:
        for transform in self.transforms:
            img = transform(img)
        return img


@dataclass
class Lambda:
    """Applies a function."""

    lambd: Callable[[Any], Any]

    def __post_init__(self) -> None:
        if not callable(self.lambd):
            raise TypeError(f"Lambda takes a function, got {type(self.lambd).__name__}")

    def __call__(self, img: Any) -> Any:
        return self.lambd(img)


@dataclass
class RGB2BGR:
    """Reverses the channels; a view."""

    def __call__(self, img: NDArray[Any]) -> NDArray[Any]:
        return img[:, :, ::-1]


@dataclass
class BGR2RGB(RGB2BGR):
    """Reverses the channels; a view."""


@dataclass
class Div:
    """Divides, in FP32."""

    value: float

    def __call__(self, img: NDArray[Any]) -> NDArray[Any]:
        return img.astype(np.float32) / self.value


@dataclass
class Normalize:
    """Subtracts the mean and divides by the deviation of each channel; FP32 copy."""

    mean: Sequence[float]
    std: Sequence[float]
    channel_first: bool = False

    def __call__(self, img: NDArray[Any]) -> NDArray[np.float32]:
        return functional.normalize(img, self.mean, self.std, self.channel_first)


@dataclass
class CenterCrop:
    """Crops a square at the center; a view."""

    size: int

    def __call__(self, img: NDArray[Any]) -> NDArray[Any]:
        return functional.crop(img, self.size)


@dataclass
class Resize:
    """Resizes to (width, height), or the shorter side to ``size``; no side exceeds ``max_size``."""

    size: int | tuple[int, int]
    max_size: int = 2**31 - 1
    interpolation: int | None = None

    def __call__(self, img: NDArray[Any]) -> NDArray[Any]:
        return functional.resize(img, self.size, self.max_size, self.interpolation)


@dataclass
class Transpose:
    """Permutes axes; a view."""

    transpose_target: Sequence[int]

    def __call__(self, img: NDArray[Any]) -> NDArray[Any]:
        return functional.transpose(img, self.transpose_target)


def padded(img: NDArray[Any], stride: int) -> NDArray[Any]:
    """Zero-pad [channels, height, width] at bottom and right to multiples of ``stride``; FP32; 0 changes nothing."""
    if stride <= 0:
        return img
    channels, height, width = img.shape
    result = np.zeros((channels, -(-height // stride) * stride, -(-width // stride) * stride), np.float32)
    result[:, :height, :width] = img
    return result


@dataclass
class PadStride:
    """Zero-pads [channels, height, width] at bottom and right to multiples of ``stride``; FP32."""

    stride: int

    def __call__(self, img: NDArray[Any]) -> NDArray[Any]:
        return padded(img, self.stride)


@dataclass
class ResizeByFactor:
    """Resizes both sides to multiples of ``factor``, rounded down, the longer side to at most ``max_side_len``.

    As in the original, a side that is not a multiple also loses one ``factor``.
    """

    factor: int = 32
    max_side_len: int = 2400

    def __call__(self, img: NDArray[Any]) -> NDArray[Any]:
        ratio = min(1.0, self.max_side_len / max(img.shape[:2]))
        height, width = (self._round_down(int(side * ratio)) for side in img.shape[:2])
        return cv2.resize(img, (width, height))

    def _round_down(self, side: int) -> int:
        if side > 0 and side % self.factor == 0:
            return side
        return max(1, side // self.factor - 1) * self.factor
