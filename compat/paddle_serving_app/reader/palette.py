"""Class colors of Pascal VOC."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["palette"]

_BITS: Final = 8


def palette(classes: int) -> NDArray[np.uint8]:
    """Return colors [classes, 3]: every third bit of a class number forms a channel, the lowest bit the brightest."""
    numbers = np.arange(classes)
    colours = np.zeros((classes, 3), np.uint8)
    for step in range(_BITS):
        for channel in range(3):
            colours[:, channel] |= ((numbers >> (3 * step + channel) & 1) << (_BITS - 1 - step)).astype(np.uint8)
    return colours
