"""``image_transformation``: changes layout, color order, size and value range of an image."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Final

import cv2
import numpy as np

from ovmstrio.core.tensor import Array
from ovmstrio.pipelines.builtin.builtin_node import Parameters, describe_item
from ovmstrio.pipelines.builtin.images import COLOR_CHANNELS, LAYOUTS, from_tensor, image_shape, resize, to_tensor
from ovmstrio.pipelines.custom_node import ItemInfo

_ORDERS: Final = ("BGR", "RGB", "GRAY")
_CONVERSIONS: Final[Mapping[tuple[str, str], int]] = {
    ("BGR", "RGB"): cv2.COLOR_BGR2RGB,
    ("BGR", "GRAY"): cv2.COLOR_BGR2GRAY,
    ("RGB", "BGR"): cv2.COLOR_RGB2BGR,
    ("RGB", "GRAY"): cv2.COLOR_RGB2GRAY,
    ("GRAY", "BGR"): cv2.COLOR_GRAY2BGR,
    ("GRAY", "RGB"): cv2.COLOR_GRAY2RGB,
}
_ANY: Final = -1


class ImageTransformation:
    """Properties without a parameter stay unchanged."""

    is_instant: ClassVar = False

    def __init__(self, parameters: Parameters) -> None:
        parameters.flag("debug")
        self._layout = parameters.choice("original_image_layout", LAYOUTS)
        self._target_layout = parameters.choice("target_image_layout", LAYOUTS, self._layout)
        self._width = _optional(parameters, "target_image_width")
        self._height = _optional(parameters, "target_image_height")
        order = parameters.choice("original_image_color_order", _ORDERS, "BGR")
        target_order = parameters.choice("target_image_color_order", _ORDERS, order)
        self._conversion = _CONVERSIONS.get((order, target_order))
        self._channels = _channels(target_order)
        self._means = _per_channel(parameters, "mean_values", self._channels)
        self._divisors = _divisors(parameters, self._channels)
        self.inputs = {"image": _info(self._layout, _channels(order), _ANY, _ANY)}
        self.outputs = {"image": _info(self._target_layout, self._channels, self._height, self._width)}

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Transform the image; values are normalized at the smaller of the two sizes."""
        image = from_tensor(inputs["image"], self._layout)
        if self._conversion is not None:
            image = cv2.cvtColor(image, self._conversion).reshape(*image.shape[:2], self._channels)
        height = image.shape[0] if self._height == _ANY else self._height
        width = image.shape[1] if self._width == _ANY else self._width
        if height * width > image.shape[0] * image.shape[1]:
            image = resize(self._normalized(image), width, height)
        else:
            image = self._normalized(resize(image, width, height))
        return {"image": to_tensor(image, self._target_layout)}

    def _normalized(self, image: Array) -> Array:
        if self._means is not None:
            image = image - self._means
        return image if self._divisors is None else image / self._divisors


def _optional(parameters: Parameters, name: str) -> int:
    return parameters.integer(name) if parameters.is_given(name) else parameters.integer(name, default=_ANY, low=_ANY)


def _channels(order: str) -> int:
    return 1 if order == "GRAY" else COLOR_CHANNELS


def _info(layout: str, channels: int, height: int, width: int) -> ItemInfo:
    return describe_item("image", "FP32", 1, *image_shape(layout, channels, height, width))


def _per_channel(parameters: Parameters, name: str, channels: int) -> Array | None:
    values = parameters.numbers(name)
    if values and len(values) != channels:
        parameters.refuse(name, f"{channels} numbers, one per target channel")
    return np.array(values, np.float32) if len(values) == channels else None


def _divisors(parameters: Parameters, channels: int) -> Array | None:
    """Return the divisors of values: one per channel, or one for all channels."""
    values = _per_channel(parameters, "scale_values", channels)
    scale = parameters.number("scale", default=1)
    if values is not None and not values.all():
        parameters.refuse("scale_values", "numbers other than 0")
    if scale == 0:
        parameters.refuse("scale", "a number other than 0")
    if values is not None:
        return values
    return None if scale == 1 else np.array([scale], np.float32)
