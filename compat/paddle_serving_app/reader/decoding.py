"""Transforms from files, addresses and texts to images, which are BGR of UINT8, and None where it is no image."""

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
    """Read the bytes of an image file; None if OpenCV knows them for no image.

    Raises:
        cv2.error: there are no bytes.
    """
    image: Any = cv2.imdecode(np.frombuffer(file, np.uint8), cv2.IMREAD_COLOR)
    found: NDArray[np.uint8] | None = image
    return found


@dataclass
class String2Image:
    """Reads the bytes of an image file."""

    def __call__(self, img_buffer: bytes) -> NDArray[np.uint8] | None:
        return decoded(img_buffer)


@dataclass
class File2Image:
    """Reads an image file, blocking; a file that is missing raises."""

    def __call__(self, img_path: str | Path) -> NDArray[np.uint8] | None:
        return decoded(Path(img_path).read_bytes())


@dataclass
class URL2Image:
    """Reads what is at an address, blocking, for ``timeout`` seconds of silence at the most.

    Whoever may choose the address chooses what this machine asks: check it before.
    """

    timeout: float = 60

    def __call__(self, img_url: str) -> NDArray[np.uint8] | None:
        with urlopen(img_url, timeout=self.timeout) as answer:  # noqa: S310 - files are addresses here, too
            return decoded(answer.read())


@dataclass
class Base64ToImage:
    """Reads an image file that is in base64."""

    def __call__(self, img_base64: str | bytes) -> NDArray[np.uint8] | None:
        return decoded(b64decode(img_base64))
