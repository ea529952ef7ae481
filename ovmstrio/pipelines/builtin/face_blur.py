"""``face_blur``: blurs the faces found by a detector."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Final

import cv2
import numpy as np

from ovmstrio.core.tensor import Array
from ovmstrio.pipelines.builtin.builtin_node import Parameters, describe_item
from ovmstrio.pipelines.builtin.images import (
    ROW_LENGTH,
    Box,
    ImageSettings,
    boxes_of,
    resize,
    select_detections,
    to_tensor,
)

_DETECTIONS: Final = 200
_LARGEST_KERNEL: Final = 2**15 - 1


class FaceBlur:
    """Blurs the part of each detection that is inside the image."""

    is_instant: ClassVar = False

    def __init__(self, parameters: Parameters) -> None:
        self._pictures = pictures = ImageSettings.read(parameters, can_be_grey=False)
        self._threshold = parameters.number("confidence_threshold", low=0, high=1)
        self._kernel = parameters.integer("gaussian_blur_kernel_size", high=_LARGEST_KERNEL, must_be_odd=True)
        self.inputs = {
            "image": pictures.image,
            "detection": describe_item("detection", "FP32", 1, 1, _DETECTIONS, ROW_LENGTH),
        }
        self.outputs = {"image": pictures.target("image", 1)}

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Blur all detections, then resize the image."""
        pictures = self._pictures
        image = pictures.read_image(inputs["image"]).copy()
        for box in boxes_of(select_detections(inputs["detection"], self._threshold), pictures):
            if not box.is_empty:
                self._blur(image, box)
        made = resize(image, pictures.target_width, pictures.target_height)
        return {"image": to_tensor(made, pictures.target_layout)}

    def _blur(self, image: Array, box: Box) -> None:
        """Blur a box, including the influence of surrounding pixels, as OpenCV does for a submatrix."""
        reach = self._kernel // 2
        around = Box(box.left - reach, box.top - reach, box.right + reach, box.bottom + reach)
        around = around.clamped(image.shape[1], image.shape[0])
        surroundings = np.ascontiguousarray(image[around.top : around.bottom, around.left : around.right])
        blurred = cv2.GaussianBlur(surroundings, (self._kernel, self._kernel), 0)
        left, top = box.left - around.left, box.top - around.top
        image[box.top : box.bottom, box.left : box.right] = blurred[top : top + box.height, left : left + box.width]
