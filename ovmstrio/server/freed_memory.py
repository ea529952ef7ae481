"""What becomes of the memory that tensors leave behind."""

from __future__ import annotations

import ctypes
from typing import Final

__all__ = ["KEPT_BYTES", "keep_freed_memory"]

KEPT_BYTES: Final = 128 * 2**20
_LARGEST_FROM_HEAP: Final = 32 * 2**20
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3


def keep_freed_memory() -> bool:
    """Have the C library keep what this process lets go, up to ``KEPT_BYTES``; False where it knows no such thing.

    By itself, glibc gives the end of its heap back to the system whenever some megabytes are free, so that the tensors
    of each request are put into pages that the kernel has to find and clear anew.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST_FROM_HEAP) and mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES))
