"""Memory with an aligned end, for messages that end with tensors."""

from __future__ import annotations

from typing import Final

import numpy as np

_ALIGNMENT: Final = 64
"""Bytes: the largest alignment that a CPU number or vector needs."""


def memory_to_fill(size: int) -> memoryview:
    """Return ``size`` uninitialised bytes whose end is aligned.

    The part before a message's tensors can have any length, but the last tensors end where the message ends.  An
    aligned end therefore aligns their elements.
    """
    buffer = np.empty(size + _ALIGNMENT, np.uint8)
    start = -(buffer.__array_interface__["data"][0] + size) % _ALIGNMENT
    return buffer[start : start + size].data
