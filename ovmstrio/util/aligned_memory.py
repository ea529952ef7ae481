"""Memory whose end is aligned, for tensors at the end of a message."""

from __future__ import annotations

from typing import Final

import numpy as np

_ALIGNMENT: Final = 64
"""What no number and no vector of a processor needs more than."""


def memory_to_fill(size: int) -> memoryview:
    """Give so many bytes, of any values, whose end is aligned.

    Whatever stands before a message's tensors has any length, but the last of them, or several that follow each other,
    end where the message does; so each element of theirs is aligned as well.
    """
    whole = np.empty(size + _ALIGNMENT, np.uint8)
    start = -(whole.__array_interface__["data"][0] + size) % _ALIGNMENT
    return whole[start : start + size].data
