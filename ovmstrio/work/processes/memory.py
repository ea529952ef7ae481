"""Files in memory, which carry what is large from one process to another."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Callable

__all__ = ["make_file", "map_file"]


def make_file(name: str, size: int, fill: Callable[[mmap.mmap], object]) -> int:
    """Make a file of ``size`` bytes, at least one, that ``fill`` writes; give its descriptor, which the caller closes.

    Raises:
        OSError: there is no memory, or no descriptor, left.
    """
    file = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(file, size)
        fill(mmap.mmap(file, size))
    except BaseException:
        os.close(file)
        raise
    return file


def map_file(file: int) -> mmap.mmap:
    """Map a file that another process has made, and close its descriptor.

    Raises:
        OSError: it is no such file, or there is no memory left.
        ValueError: it is empty.
    """
    try:
        # Whoever has written it may go mad, and must not take memory away that is in use.
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        return mmap.mmap(file, os.fstat(file).st_size)
    finally:
        os.close(file)
