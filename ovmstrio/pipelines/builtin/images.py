"""Shared image operations of the built-in nodes.

Inside the nodes an image is an array of height, width, channels, whatever the tensor layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import cv2
import numpy as np

from ovmstrio.core.errors import CustomNodeFailure
from ovmstrio.core.tensor import Array
from ovmstrio.pipelines.builtin.builtin_node import Parameters, describe_item
from ovmstrio.pipelines.custom_node import ItemInfo

LAYOUTS: Final = ("NCHW", "NHWC")
COLOR_CHANNELS: Final = 3
_COORDINATE_LIMIT: Final = 2.0**31


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle in pixels; right and bottom are exclusive."""

    left: int
    top: int
    right: int
    bottom: int

    @property
    def is_empty(self) -> bool:
        """True if the box has no pixels."""
        return self.right <= self.left or self.bottom <= self.top

    @property
    def width(self) -> int:
        """The width in pixels."""
        return self.right - self.left

    @property
    def height(self) -> int:
        """The height in pixels."""
        return self.bottom - self.top

    def clamped(self, width: int, height: int) -> Box:
        """Return the part inside an image of this size."""
        return Box(
            min(max(self.left, 0), width),
            min(max(self.top, 0), height),
            min(max(self.right, 0), width),
            min(max(self.bottom, 0), height),
        )


@dataclass(frozen=True, slots=True)
class ImageSettings:
    """Parameters of input and output images."""

    width: int
    height: int
    layout: str
    target_width: int
    target_height: int
    target_layout: str
    is_grey: bool = False

    @classmethod
    def read(cls, parameters: Parameters, *, can_be_grey: bool = True) -> ImageSettings:
        """Parse the parameters."""
        parameters.flag("debug")
        return cls(
            parameters.integer("original_image_width"),
            parameters.integer("original_image_height"),
            parameters.choice("original_image_layout", LAYOUTS, "NCHW"),
            parameters.integer("target_image_width"),
            parameters.integer("target_image_height"),
            parameters.choice("target_image_layout", LAYOUTS, "NCHW"),
            can_be_grey and parameters.flag("convert_to_gray_scale"),
        )

    @property
    def image(self) -> ItemInfo:
        """Description of the input ``image``."""
        return describe_item("image", "FP32", 1, *image_shape(self.layout, COLOR_CHANNELS, self.height, self.width))

    def target(self, name: str, *before: int) -> ItemInfo:
        """Return the description of an image output."""
        channels = 1 if self.is_grey else COLOR_CHANNELS
        shape = image_shape(self.target_layout, channels, self.target_height, self.target_width)
        return describe_item(name, "FP32", *before, *shape)

    @property
    def texts(self) -> dict[str, ItemInfo]:
        """Descriptions of the outputs of OCR nodes."""
        return {
            "text_images": self.target("text_images", -1, 1),
            "text_coordinates": describe_item("text_coordinates", "INT32", -1, 1, 4),
            "confidence_levels": describe_item("confidence_levels", "FP32", -1, 1, 1),
        }

    def found_texts(self, images: Sequence[Array], boxes: Sequence[Box], confidences: Array) -> dict[str, Array]:
        """Return the outputs of OCR nodes for image crops and their boxes."""
        coordinates = [(box.left, box.top, box.width, box.height) for box in boxes]
        return {
            "text_images": self.finished(images),
            "text_coordinates": np.array(coordinates, np.int32).reshape(-1, 1, 4),
            "confidence_levels": confidences.reshape(-1, 1, 1),
        }

    def read_image(self, tensor: Array) -> Array:
        """Return the image of the input ``image``."""
        return from_tensor(tensor, self.layout)

    def finished(self, images: Sequence[Array]) -> Array:
        """Resize the crops, convert them to grayscale if configured, and return them as a tensor [N,1,...]."""
        made = [self._finish(image) for image in images]
        if not made:
            return np.empty((0, 1, *self.target("").shape), np.float32)
        return np.stack([to_tensor(image, self.target_layout) for image in made])

    def _finish(self, image: Array) -> Array:
        image = resize(image, self.target_width, self.target_height)
        return _to_grayscale(image) if self.is_grey else image


def image_shape(layout: str, channels: int, height: int, width: int) -> tuple[int, int, int]:
    """Return the shape of one image in a layout."""
    return (channels, height, width) if layout == "NCHW" else (height, width, channels)


def from_tensor(tensor: Array, layout: str) -> Array:
    """Return the only image of a tensor, as a read-only array."""
    image = tensor[0]
    return np.ascontiguousarray(image.transpose(1, 2, 0)) if layout == "NCHW" else image


def to_tensor(image: Array, layout: str) -> Array:
    """Return a tensor with one image."""
    return np.ascontiguousarray(image.transpose(2, 0, 1) if layout == "NCHW" else image)[np.newaxis]


def resize(image: Array, width: int, height: int) -> Array:
    """Resize an image with bilinear interpolation."""
    if image.shape[:2] == (height, width):
        return image
    try:
        made = cv2.resize(image, (width, height), interpolation=cv2.INTER_LINEAR)
    except cv2.error as error:
        raise CustomNodeFailure(f"OpenCV cannot resize {image.shape} to {width} x {height}: {error}") from None
    return made.reshape(height, width, image.shape[2])


def _to_grayscale(image: Array) -> Array:
    """Convert a BGR image to grayscale; keep three dimensions."""
    return cv2.cvtColor(image, cv2.COLOR_BGR2GRAY)[:, :, np.newaxis]


def crop(image: Array, box: Box) -> Array:
    """Return a crop of an image as a new array."""
    height, width = image.shape[:2]
    if box.is_empty or box != box.clamped(width, height):
        raise CustomNodeFailure(f"{box} is not inside the image of {width} x {height} pixels")
    return np.ascontiguousarray(image[box.top : box.bottom, box.left : box.right])


def to_pixels(values: Array, what: str) -> Array:
    """Truncate numbers to integers."""
    if not np.all(np.abs(values) < _COORDINATE_LIMIT):
        raise CustomNodeFailure(f"the {what} have values that are not image coordinates")
    return values.astype(np.int64)


LABEL: Final = 1
CONFIDENCE: Final = 2
COORDINATES: Final = slice(3, 7)
ROW_LENGTH: Final = 7


def select_detections(detection: Array, threshold: float, label: int = -1) -> Array:
    """Return the rows of the first image with sufficient confidence and, unless ``label`` is -1, with this label."""
    rows = detection.reshape(-1, ROW_LENGTH)
    is_chosen = (np.abs(rows[:, 0]) < 1) & (rows[:, CONFIDENCE] >= np.float32(threshold))
    if label != -1:
        is_chosen &= np.trunc(rows[:, LABEL]) == label
    return rows[is_chosen]


def boxes_of(rows: Array, pictures: ImageSettings) -> list[Box]:
    """Return the boxes of rows, clamped to the image."""
    sizes = np.array([pictures.width, pictures.height] * 2, np.float32)
    places = to_pixels(rows[:, COORDINATES] * sizes, "detections")
    return [Box(*place).clamped(pictures.width, pictures.height) for place in places.tolist()]
