"""Requests, results and service protocol of image-generation models."""

from __future__ import annotations

import math
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, Protocol, TypeAlias

from ovmstrio.core.generation import GenerativeService


class ImageFormat(Enum):
    """File formats of generated images; values are those of ``output_format``."""

    PNG = "png"
    JPEG = "jpeg"
    WEBP = "webp"


ImageOptions: TypeAlias = Mapping[str, str | int | float]
"""Generation options by openvino-genai's names, such as ``num_inference_steps``."""


Resolution: TypeAlias = tuple[int, int]
"""Width and height in pixels."""

_RESOLUTION: Final = re.compile(r"([1-9]\d{0,4})x([1-9]\d{0,4})", re.ASCII)


def parse_resolution(text: str) -> Resolution:
    """Parse a resolution such as ``512x512``; raise ``ValueError`` if it is invalid."""
    found = _RESOLUTION.fullmatch(text)
    if found is None:
        raise ValueError("WIDTHxHEIGHT such as 512x512")
    return int(found[1]), int(found[2])


@dataclass(frozen=True, slots=True)
class ImageRequest:
    """One request for images.

    Attributes:
        image: file of the image to change; empty for an image from the prompt alone.
        mask: file of the area to repaint, of the image's size; empty to change the entire image.
        options: absent options have the defaults of the model.
        compression: quality of JPEG and WebP from 0 to 100; None for the default.
        partial_images: number of images that are sent before the final one.
        deadline: on trio's clock, queueing included.
    """

    prompt: str
    image: bytes = b""
    mask: bytes = b""
    options: ImageOptions = field(default_factory=dict)
    form: ImageFormat = ImageFormat.PNG
    compression: int | None = None
    partial_images: int = 0
    deadline: float = math.inf


@dataclass(frozen=True, slots=True)
class ImagePart:
    """Image files, all of a request or the first one at an earlier step, with their width and height in pixels."""

    files: tuple[bytes, ...]
    size: Resolution
    is_partial: bool = False


class ImageGeneration(Protocol):
    """A running image request."""

    def __aiter__(self) -> AsyncIterator[ImagePart]:
        """Iterate over partial images, then the final part.

        Raises:
            ServerError: the model or its process failed.

        Cancellation: leaving the block that opened the generation cancels the request.
        """


class ImageGenerator(GenerativeService, Protocol):
    """A service with ``Task.IMAGE_GENERATION``."""

    def generate_images(self, request: ImageRequest) -> AbstractAsyncContextManager[ImageGeneration]:
        """Start a request; entering returns when its files have been decoded.

        Leaving early cancels the request within one denoising step.

        Raises:
            InvalidField: on entering or from the iteration: options or files that the model does not accept.
            Overloaded: on entering: the queue is full.
            ServerError: on entering or from the iteration, such as a process exit.
        """
