"""Memory that two processes see: regions that one end writes messages to, and the other end's views of them.

::

    sender    RegionPool.take ──> Region ── its descriptor, once ──>  MappedFile ──> views under a RegionLease  receiver
              RegionPool.give_back <──────── when the last view has gone ───────────────── RegionLease ends
"""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import numpy as np

__all__ = ["MOST_KEPT", "MappedFile", "Region", "RegionLease", "RegionPool", "SharedPart", "find_shared"]

MOST_KEPT: Final = 64 * 2**20
"""How many bytes of regions a pool keeps at most that nobody uses."""

_SMALLEST: Final = 128 * 1024

Array = np.ndarray[Any, Any]


class MappedFile:
    """A file in memory that is mapped here, whoever has made it; both go with the last view of it.

    Args:
        file: its descriptor, which belongs to this object from now on, also if it cannot be mapped.

    Raises:
        OSError: it is no such file, or there is no memory left.
        ValueError: it is empty.
    """

    def __init__(self, file: int) -> None:
        self.file = file
        # Whoever has made it may go mad, and must not take memory away that is in use.
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        self.size = os.fstat(file).st_size
        self.bytes: Array = np.frombuffer(mmap.mmap(file, self.size), np.uint8)
        self.address: int = self.bytes.__array_interface__["data"][0]
        _mapped.add(self)

    def __del__(self) -> None:
        # There may be more than one error in code that is being torn down.
        with suppress(Exception):
            os.close(self.file)


_mapped: Final[weakref.WeakSet[MappedFile]] = weakref.WeakSet()
"""All files of others that are mapped here: what the address of a buffer is looked up in."""


class SharedPart:
    """Where a buffer lies that another process can see, too."""

    __slots__ = ("mapped", "offset")

    def __init__(self, mapped: MappedFile, offset: int) -> None:
        self.mapped = mapped
        self.offset = offset


def find_shared(array: Array) -> SharedPart | None:
    """Tell in which mapped file an array lies, if it does so in one piece."""
    if not _mapped or not array.flags.c_contiguous:
        return None
    start = array.__array_interface__["data"][0]
    for mapped in list(_mapped):
        if mapped.address <= start and start + array.nbytes <= mapped.address + mapped.size:
            return SharedPart(mapped, start - mapped.address)
    return None


class _LeasedBytes(np.ndarray[Any, Any]):
    """Bytes of a mapped file, of which all views of one message are made, so that they keep its lease."""

    lease: RegionLease
    mapped: MappedFile


class RegionLease:
    """The right of one message's views to its memory; ends with the last of them.

    Args:
        ended: is called then, in whichever thread.
    """

    __slots__ = ("_ended",)

    def __init__(self, ended: Callable[[], None]) -> None:
        self._ended = ended

    def __del__(self) -> None:
        # As the interpreter ends, there may be nothing left to tell it to.
        with suppress(Exception):
            self._ended()

    def view(self, mapped: MappedFile, offset: int, size: int) -> memoryview:
        """Give a part of a mapped file.

        Raises:
            ValueError: the file is shorter.
        """
        if offset < 0 or size < 0 or offset + size > mapped.size:
            raise ValueError(f"{size} bytes from {offset} of a file of {mapped.size}")
        made = mapped.bytes[offset : offset + size].view(_LeasedBytes)
        made.lease = self
        made.mapped = mapped
        return memoryview(made)  # type: ignore[arg-type]  # an array offers its buffer in C


class Region:
    """A file in memory that this end has made and writes to.

    Attributes:
        is_known: whether the other end has its descriptor.
    """

    __slots__ = ("bytes", "file", "is_known", "number", "size")

    def __init__(self, number: int, size: int) -> None:
        self.number = number
        self.size = size
        self.is_known = False
        self.file = os.memfd_create("message", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.file, size)
            self.bytes = memoryview(mmap.mmap(self.file, size))
        except BaseException:
            os.close(self.file)
            raise

    def close(self) -> None:
        """Give the memory back, as far as this end is concerned."""
        file, self.file = self.file, -1
        if file >= 0:
            os.close(file)
            self.bytes.release()


class RegionPool:
    """The regions of one end: those in use, and some that wait for the next message.  Not for several threads at once.

    Args:
        most_kept: how many bytes wait at most.
    """

    def __init__(self, most_kept: int = MOST_KEPT) -> None:
        self._most_kept = most_kept
        self._numbers = 0
        self._kept: list[Region] = []

    @property
    def kept_bytes(self) -> int:
        """How much waits."""
        return sum(region.size for region in self._kept)

    def take(self, size: int) -> Region:
        """Give a region of at least that many bytes.

        Raises:
            OSError: there is no memory, or no descriptor, left.
        """
        fitting = [region for region in self._kept if size <= region.size <= 4 * max(size, _SMALLEST)]
        if fitting:
            region = min(fitting, key=lambda one: one.size)
            self._kept.remove(region)
            return region
        self._numbers += 1
        return Region(self._numbers, max(_SMALLEST, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE))

    def give_back(self, region: Region) -> list[Region]:
        """Let a region wait for another message; give those that there is no room for any more, which are closed."""
        self._kept.append(region)
        dropped = []
        while self.kept_bytes > self._most_kept:
            dropped.append(self._kept.pop(0))
            dropped[-1].close()
        return dropped

    def close(self) -> None:
        """Give back what waits."""
        for region in self._kept:
            region.close()
        self._kept.clear()
