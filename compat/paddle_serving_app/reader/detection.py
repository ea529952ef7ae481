"""Image transforms of object detection models; each takes and returns an image and its info.

The info holds ``im_shape``, the current height and width, and ``scale_factor``, their scale; both FP32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paddle_serving_app.reader import functional
from paddle_serving_app.reader.opencv import cv2
from paddle_serving_app.reader.transforms import padded

__all__ = [
    "DetectionBGR2RGB",
    "DetectionDiv",
    "DetectionFile2Image",
    "DetectionNormalize",
    "DetectionPadStride",
    "DetectionResize",
    "DetectionSequential",
    "DetectionTranspose",
    "Info",
]

Info = dict[str, Any]
"""Info of an image."""

_Pair = tuple[NDArray[Any], Info | None]


@dataclass
class DetectionSequential:
    """Applies transforms in order to a file name or image."""

    transforms: Sequence[Callable[[Any, Info], tuple[Any, Info]]]

    def __call__(self, im: Any) -> tuple[Any, Info]:
        info: Info = {"scale_factor": np.ones(2, np.float32), "im_shape": None}
        for transform in self.transforms:
            im, info = transform(im, info)
        return im, info


@dataclass
class DetectionFile2Image:
    """Reads an image file as RGB; blocking.

    Raises:
        ValueError: the file is not an image.
    """

    def __call__(self, img_path: str | Path, im_info: Info | None = None) -> _Pair:
        file = np.frombuffer(Path(img_path).read_bytes(), np.uint8)
        found: Any = cv2.imdecode(file, cv2.IMREAD_COLOR)
        if found is None:
            raise ValueError(f"{img_path} is not an image that OpenCV can read")
        if im_info is not None:
            im_info["im_shape"] = np.array(found.shape[:2], np.float32)
            im_info["scale_factor"] = np.ones(2, np.float32)
        return cv2.cvtColor(found, cv2.COLOR_BGR2RGB), im_info


@dataclass
class DetectionBGR2RGB:
    """Reverses the channels; a view."""

    def __call__(self, img: NDArray[Any], img_info: Info | None = None) -> _Pair:
        return img[:, :, ::-1], img_info


@dataclass
class DetectionDiv:
    """Divides, in FP32."""

    value: float

    def __call__(self, img: NDArray[Any], img_info: Info | None = None) -> _Pair:
        return img.astype(np.float32) / self.value, img_info


@dataclass
class DetectionNormalize:
    """Subtracts the mean and divides by the deviation of each channel, after division by 255 if ``is_scale``."""

    mean: Sequence[float]
    std: Sequence[float]
    is_scale: bool = True

    def __call__(self, im: NDArray[Any], im_info: Info | None = None) -> _Pair:
        scaled = im.astype(np.float32) / np.float32(255 if self.is_scale else 1)
        return functional.normalize(scaled, self.mean, self.std), im_info


@dataclass
class DetectionResize:
    """Resizes to (height, width); with ``keep_ratio`` proportionally within them."""

    target_size: int | Sequence[int]
    keep_ratio: bool = True
    interpolation: int = cv2.INTER_LINEAR

    def __post_init__(self) -> None:
        if isinstance(self.target_size, int):
            self.target_size = [self.target_size, self.target_size]

    def __call__(self, im: NDArray[Any], im_info: Info | None = None) -> _Pair:
        down, across = self.generate_scale(im)
        result = cv2.resize(im, None, None, fx=across, fy=down, interpolation=self.interpolation)
        if im_info is not None:
            im_info["im_shape"] = np.array(result.shape[:2], np.float32)
            im_info["scale_factor"] = np.array([down, across], np.float32)
        return result, im_info

    def generate_scale(self, im: NDArray[Any]) -> tuple[float, float]:
        """Return the scale of height and width."""
        height, width = im.shape[:2]
        first, second = np.asarray(self.target_size).tolist()
        if not self.keep_ratio:
            return first / height, second / width
        shortest, longest = min(first, second), max(first, second)
        ratio = shortest / min(height, width)
        if np.round(ratio * max(height, width)) > longest:
            ratio = longest / max(height, width)
        return ratio, ratio


@dataclass
class DetectionTranspose:
    """Permutes axes; a view."""

    transpose_target: Sequence[int]

    def __call__(self, im: NDArray[Any], im_info: Info | None = None) -> _Pair:
        return functional.transpose(im, self.transpose_target), im_info


@dataclass
class DetectionPadStride:
    """Zero-pads [channels, height, width] at bottom and right to multiples of ``stride``; FP32."""

    stride: int = 0

    def __call__(self, im: NDArray[Any], im_info: Info | None = None) -> _Pair:
        return padded(im, self.stride), im_info
