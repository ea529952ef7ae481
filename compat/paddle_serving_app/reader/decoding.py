"""Transforms from files, URLs and text to BGR UINT8 images; None for data that is not an image."""

from __future__ import annotations

from base64 import b64decode
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
from numpy.typing import NDArray

from paddle_serving_app.reader.opencv import cv2

__all__ = ["Base64ToImage", "File2Image", "String2Image", "URL2Image", "decoded"]


def decoded(file: bytes) -> NDArray[np.uint8] | None:
    """Decode an image file; None if OpenCV does not recognise it.

    Raises:
        cv2.error: the file is empty.
    """
    image: Any = cv2.imdecode(np.frombuffer(file, np.uint8), cv2.IMREAD_COLOR)
    found: NDArray[np.uint8] | None = image
    return found


@dataclass
class String2Image:
    """Decodes the bytes of an image file."""

    def __call__(self, img_buffer: bytes) -> NDArray[np.uint8] | None:
        return decoded(img_buffer)


@dataclass
class File2Image:
    """Reads an image file; blocking."""

    def __call__(self, img_path: str | Path) -> NDArray[np.uint8] | None:
        return decoded(Path(img_path).read_bytes())


@dataclass
class URL2Image:
    """Reads an image from a URL; blocking, with a socket timeout in seconds.

    The caller must check untrusted URLs: any address, including ``file:``, is opened.
    """

    timeout: float = 60

    def __call__(self, img_url: str) -> NDArray[np.uint8] | None:
        with urlopen(img_url, timeout=self.timeout) as answer:  # noqa: S310 - file URLs are supported
            return decoded(answer.read())


@dataclass
class Base64ToImage:
    """Decodes a base64 image file."""

    def __call__(self, img_base64: str | bytes) -> NDArray[np.uint8] | None:
        return decoded(b64decode(img_base64))
