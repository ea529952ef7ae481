"""Transforms from image to image, and their sequence."""

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
    """Applies transforms one after the other."""

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
    """Turns the order of channels round; a view."""

    def __call__(self, img: NDArray[Any]) -> NDArray[Any]:
        return img[:, :, ::-1]


@dataclass
class BGR2RGB(RGB2BGR):
    """Turns the order of channels round; a view."""


@dataclass
class Div:
    """Divides, in FP32."""

    value: float

    def __call__(self, img: NDArray[Any]) -> NDArray[Any]:
        return img.astype(np.float32) / self.value


@dataclass
class Normalize:
    """Takes the mean of each channel off, and divides by its deviation; a copy in FP32."""

    mean: Sequence[float]
    std: Sequence[float]
    channel_first: bool = False

    def __call__(self, img: NDArray[Any]) -> NDArray[np.float32]:
        return functional.normalize(img, self.mean, self.std, self.channel_first)


@dataclass
class CenterCrop:
    """Cuts a square out of the middle; a view."""

    size: int

    def __call__(self, img: NDArray[Any]) -> NDArray[Any]:
        return functional.crop(img, self.size)


@dataclass
class Resize:
    """Makes an image (width, height) large, or its shorter side ``size`` long; no side longer than ``max_size``."""

    size: int | tuple[int, int]
    max_size: int = 2**31 - 1
    interpolation: int | None = None

    def __call__(self, img: NDArray[Any]) -> NDArray[Any]:
        return functional.resize(img, self.size, self.max_size, self.interpolation)


@dataclass
class Transpose:
    """Puts axes into another order; a view."""

    transpose_target: Sequence[int]

    def __call__(self, img: NDArray[Any]) -> NDArray[Any]:
        return functional.transpose(img, self.transpose_target)


def padded(img: NDArray[Any], stride: int) -> NDArray[Any]:
    """Add zeros below and to the right of [channels, height, width] up to multiples; FP32, or all as it is without."""
    if stride <= 0:
        return img
    channels, height, width = img.shape
    result = np.zeros((channels, -(-height // stride) * stride, -(-width // stride) * stride), np.float32)
    result[:, :height, :width] = img
    return result


@dataclass
class PadStride:
    """Adds zeros below and to the right of [channels, height, width] up to multiples of ``stride``; FP32."""

    stride: int

    def __call__(self, img: NDArray[Any]) -> NDArray[Any]:
        return padded(img, self.stride)


@dataclass
class ResizeByFactor:
    """Makes both sides multiples of ``factor``, rather smaller than larger, and the longer ``max_side_len`` at most.

    A side that is no multiple loses a whole ``factor`` besides what is over it, as models that find text are used to.
    """

    factor: int = 32
    max_side_len: int = 2400

    def __call__(self, img: NDArray[Any]) -> NDArray[Any]:
        ratio = min(1.0, self.max_side_len / max(img.shape[:2]))
        height, width = (self._fitted(int(side * ratio)) for side in img.shape[:2])
        return cv2.resize(img, (width, height))

    def _fitted(self, side: int) -> int:
        if side > 0 and side % self.factor == 0:
            return side
        return max(1, side // self.factor - 1) * self.factor
