"""Image transforms under the original's module name, and ``ImageReader``, the preprocessing of a classifier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paddle_serving_app.reader import functional
from paddle_serving_app.reader.decoding import Base64ToImage, File2Image, String2Image, URL2Image, decoded
from paddle_serving_app.reader.detection import (
    DetectionBGR2RGB,
    DetectionDiv,
    DetectionFile2Image,
    DetectionNormalize,
    DetectionPadStride,
    DetectionResize,
    DetectionSequential,
    DetectionTranspose,
)
from paddle_serving_app.reader.object_boxes import BlazeFacePostprocess, RCNNPostprocess
from paddle_serving_app.reader.palette import palette
from paddle_serving_app.reader.segmentation import SegPostprocess
from paddle_serving_app.reader.text_boxes import FilterBoxes, GetRotateCropImage, SortedBoxes
from paddle_serving_app.reader.text_regions import DBPostProcess
from paddle_serving_app.reader.transforms import (
    BGR2RGB,
    RGB2BGR,
    CenterCrop,
    Div,
    Lambda,
    Normalize,
    PadStride,
    Resize,
    ResizeByFactor,
    Sequential,
    Transpose,
)

__all__ = [
    "BGR2RGB",
    "RGB2BGR",
    "Base64ToImage",
    "BlazeFacePostprocess",
    "CenterCrop",
    "DBPostProcess",
    "DetectionBGR2RGB",
    "DetectionDiv",
    "DetectionFile2Image",
    "DetectionNormalize",
    "DetectionPadStride",
    "DetectionResize",
    "DetectionSequential",
    "DetectionTranspose",
    "Div",
    "File2Image",
    "FilterBoxes",
    "GetRotateCropImage",
    "ImageReader",
    "Lambda",
    "Normalize",
    "PadStride",
    "RCNNPostprocess",
    "Resize",
    "ResizeByFactor",
    "SegPostprocess",
    "Sequential",
    "SortedBoxes",
    "String2Image",
    "Transpose",
    "URL2Image",
    "generate_colormap",
]


def generate_colormap(num_classes: int) -> list[list[int]]:
    """Return an RGB color for each class."""
    colours: list[list[int]] = palette(num_classes).tolist()
    return colours


@dataclass
class ImageReader:
    """Creates a classifier's input [3, side, side] from the bytes of an image file.

    Resizes the shorter side to ``resize_short_size``, crops a square of ``image_shape[1]`` and normalizes RGB.
    With ``image_shape[1]`` 0 the image keeps its size.
    """

    image_shape: Sequence[int] = (3, 224, 224)
    image_mean: Sequence[float] = (0.485, 0.456, 0.406)
    image_std: Sequence[float] = (0.229, 0.224, 0.225)
    resize_short_size: int = 256
    interpolation: int | None = None
    crop_center: bool = True

    def process_image(self, sample: bytes) -> NDArray[np.float32] | None:
        """Return the FP32 input, or None if the bytes are not an image."""
        image: NDArray[Any] | None = decoded(sample)
        if image is None:
            return None
        side = self.image_shape[1]
        if side > 0:
            image = functional.resize(image, self.resize_short_size, interpolation=self.interpolation)
            image = functional.crop(image, side, self.crop_center)
        rgb = image[:, :, ::-1].transpose(2, 0, 1).astype(np.float32) / 255
        return functional.normalize(rgb, self.image_mean, self.image_std, channel_first=True)
