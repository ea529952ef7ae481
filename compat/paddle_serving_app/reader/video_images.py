"""Transforms of sampled video images: each takes a dictionary, replaces its ``imgs`` and returns it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from paddle_serving_app.reader.opencv import cv2

__all__ = ["Image2Array", "Normalization", "Results", "Scale", "TenCrop"]

Results = dict[str, Any]
"""Video data: ``filename``, ``format``, ``backend``, ``frames``, ``frames_len`` and ``imgs``."""


@dataclass
class Scale:
    """Resizes the shorter side to ``short_size``, the other side to 4/3 of it, proportionally, or to the same length.

    Args:
        short_size: pixels.
        fixed_ratio: resize to a ratio of 4 to 3.
        keep_ratio: keep the image's ratio; excludes ``fixed_ratio``.
        do_round: round the longer side instead of truncating it.
        backend: ``pillow`` or ``cv2``.

    Raises:
        ValueError: both ratios are set, or the backend is unknown.
    """

    short_size: int
    fixed_ratio: bool = True
    keep_ratio: bool | None = None
    do_round: bool = False
    backend: str = "pillow"

    def __post_init__(self) -> None:
        if self.fixed_ratio and self.keep_ratio:
            raise ValueError("fixed_ratio and keep_ratio cannot be true together")
        if self.backend not in {"pillow", "cv2"}:
            raise ValueError(f"backend must be pillow or cv2, got {self.backend!r}")

    def __call__(self, results: Results) -> Results:
        results["imgs"] = [self._resize(img) for img in results["imgs"]]
        return results

    def _resize(self, img: Any) -> Any:
        width, height = (img.shape[1], img.shape[0]) if isinstance(img, np.ndarray) else img.size
        longer = self._longer_side(max(width, height) / min(width, height))
        size = (self.short_size, longer) if width <= height else (longer, self.short_size)
        if self.backend == "pillow":
            return img.resize(size, Image.Resampling.BILINEAR)
        resized = cv2.resize(np.asarray(img), size, interpolation=cv2.INTER_LINEAR)
        return resized if self.keep_ratio is not None else Image.fromarray(resized)

    def _longer_side(self, ratio: float) -> int:
        if self.fixed_ratio:
            return int(self.short_size * 4 / 3)
        if not self.keep_ratio:
            return self.short_size
        return int(self.short_size * ratio + (0.5 if self.do_round else 0))


@dataclass
class TenCrop:
    """Crops the four corners and the center of Pillow images as squares, each followed by its mirror image."""

    target_size: int

    def __call__(self, results: Results) -> Results:
        images, side = results["imgs"], self.target_size
        across, down = ((length - side) // 4 for length in images[0].size)
        crops: list[Any] = []
        for column, row in ((0, 0), (4, 0), (0, 4), (4, 4), (2, 2)):
            left, top = column * across, row * down
            cut = [image.crop((left, top, left + side, top + side)) for image in images]
            crops += [*cut, *(image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) for image in cut)]
        results["imgs"] = crops
        return results


@dataclass
class Image2Array:
    """Stacks images to FP32 [time, channels, height, width] or channels first; without ``transpose`` axes are kept.

    Raises:
        ValueError: ``data_format`` is neither ``tchw`` nor ``cthw``.
    """

    transpose: bool = True
    data_format: str = "tchw"

    def __post_init__(self) -> None:
        if self.data_format not in {"tchw", "cthw"}:
            raise ValueError(f"data_format must be tchw or cthw, got {self.data_format!r}")

    def __call__(self, results: Results) -> Results:
        images = np.stack([np.asarray(image) for image in results["imgs"]]).astype(np.float32)
        if self.transpose:
            images = images.transpose((0, 3, 1, 2) if self.data_format == "tchw" else (3, 0, 1, 2))
        results["imgs"] = images
        return results


class Normalization:
    """Subtracts the mean and divides by the deviation, after division by 255 unless ``inplace``.

    Args:
        mean: mean of each channel.
        std: deviation of each channel.
        tensor_shape: shape of mean and deviation for broadcasting.
        inplace: images are a list [height, width, channels], with mean and deviation of 0 to 255.

    Raises:
        TypeError: mean or deviation is not a list.
    """

    def __init__(
        self,
        mean: Sequence[float],
        std: Sequence[float],
        tensor_shape: Sequence[int] = (3, 1, 1),
        inplace: bool = False,
    ) -> None:
        for name, value in (("mean", mean), ("std", std)):
            if not isinstance(value, Sequence):
                raise TypeError(f"{name} must be a list or a tuple, got {type(value).__name__}")
        self.inplace = inplace
        shape = (-1,) if inplace else tuple(tensor_shape)
        self.mean = np.array(mean, np.float32).reshape(shape)
        self.std = np.array(std, np.float32).reshape(shape)

    def __call__(self, results: Results) -> Results:
        images = np.asarray(results["imgs"], np.float32)
        results["imgs"] = ((images if self.inplace else images / np.float32(255)) - self.mean) / self.std
        return results
