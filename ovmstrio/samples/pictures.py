"""Image helpers of the samples' clients: read, draw, resize, normalise."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from ovmstrio import Array

__all__ = ["imagenet_input", "page", "read", "resized"]

_MEAN: Final = np.array([0.485, 0.456, 0.406], np.float32)
_SCALE: Final = np.array([0.229, 0.224, 0.225], np.float32)


def read(path: Path) -> Array:
    """Read a picture file as RGB, UINT8 [height,width,3]."""
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"))


def resized(rgb: Array, width: int, height: int) -> Array:
    """Resize a picture with bilinear interpolation."""
    return np.asarray(Image.fromarray(rgb).resize((width, height), Image.Resampling.BILINEAR))


def page(lines: Sequence[str], size: int = 28) -> Array:
    """Draw lines of black text on a white page."""
    font = ImageFont.load_default(size)
    width = max(int(font.getlength(line)) for line in lines) + 4 * size
    image = Image.new("RGB", (width, (2 * len(lines) + 2) * size), "white")
    draw = ImageDraw.Draw(image)
    for number, line in enumerate(lines):
        draw.text((2 * size, (2 * number + 1) * size), line, font=font, fill="black")
    return np.asarray(image)


def imagenet_input(rgb: Array, side: int = 224, shorter_side: int = 256) -> Array:
    """Return the centre crop, normalised as classifiers trained on ImageNet expect it: FP32 [1,3,side,side]."""
    height, width = rgb.shape[:2]
    scale = shorter_side / min(height, width)
    rgb = resized(rgb, max(side, round(width * scale)), max(side, round(height * scale)))
    top, left = (rgb.shape[0] - side) // 2, (rgb.shape[1] - side) // 2
    middle = rgb[top : top + side, left : left + side].astype(np.float32) / 255
    return ((middle - _MEAN) / _SCALE).transpose(2, 0, 1)[np.newaxis]
