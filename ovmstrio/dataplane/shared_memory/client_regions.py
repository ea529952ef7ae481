"""Regions of POSIX shared memory that clients have made and registered by name.

A region is mapped for reading: inputs are views of it.  Outputs are written through its descriptor, which cannot fault.
Reading can: whoever shrinks the file under a call that reads it ends the process with SIGBUS, which the kernel gives no
way to prevent for files of others.  The size is looked at before each use, so that only a file that shrinks within a
call is left; regions are for clients that the server trusts.

::

    register ─> /dev/shm/<key> ── opened, mapped ──> ClientRegion ─┬─> view ─> InferRequest.raw_inputs
                                                                   └─> write <─ InferResponse.outputs
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ovmstrio.core.errors import (
    AlreadyExists,
    FailedPrecondition,
    InvalidRequest,
    NotFound,
    NotSupported,
    Overloaded,
    PermissionDenied,
)
from ovmstrio.core.texts import cut

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ovmstrio.core.request import Buffer

__all__ = ["ClientRegion", "ClientRegions"]

_FOLDER: Final = Path("/dev/shm")  # noqa: S108 - where the system keeps what `shm_open` makes, not a scratch folder
_FLAGS: Final = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_MOST_REGIONS: Final = 1_024
_MOST_CHARACTERS: Final = 255
"""The length of a file's name, and what is enough for a region's."""
_OFF: Final = "shared memory is not served; --allow_shared_memory turns it on"


class ClientRegion:
    """One region: ``byte_size`` bytes from ``offset`` on in the shared memory object ``key``.

    Mapping and descriptor go with the last view of the region and the last call that writes to it.

    Raises:
        InvalidRequest: the key names no shared memory object, or the region does not lie within it.
        NotFound: there is no such object.
        PermissionDenied: it is not the server's to read and write.
    """

    def __init__(self, name: str, key: str, offset: int, byte_size: int, folder: Path = _FOLDER) -> None:
        self.name = name
        self.key = key
        self.offset = offset
        self.byte_size = byte_size
        self._file = _open(name, folder / _file_name(name, key))
        self._finalizer = weakref.finalize(self, os.close, self._file)
        self._check_size()
        begin = offset - offset % mmap.ALLOCATIONGRANULARITY
        self._skipped = offset - begin
        try:
            length = self._skipped + byte_size
            self._mapping = mmap.mmap(self._file, length, mmap.MAP_SHARED, mmap.PROT_READ, offset=begin)
        except (OSError, ValueError) as error:
            raise InvalidRequest(f"{self}: it cannot be mapped: {error}") from None

    def __str__(self) -> str:
        return f'shared memory region "{cut(self.name, 80)}"'

    def view(self, offset: int, byte_size: int, whose: str = "") -> memoryview:
        """Give bytes of the region as they are, to be read and not written; ``whose`` begins a refusal.

        Raises:
            InvalidRequest: they are not all within the region.
            FailedPrecondition: the object has gone or has become smaller.
        """
        self.check(offset, byte_size, whose)
        begin = self._skipped + offset
        return memoryview(self._mapping)[begin : begin + byte_size]

    def write(self, offset: int, data: Sequence[Buffer]) -> None:
        """Write bytes that :meth:`check` has found to have room; blocking, for as long as copying takes.

        Raises:
            FailedPrecondition: the object has gone or has become smaller, or there is no memory left for it.
        """
        self._check_alive()
        at = self.offset + offset
        for part in data:
            rest = memoryview(part)
            while rest:
                try:
                    written = os.pwrite(self._file, rest, at)
                except OSError as error:
                    raise FailedPrecondition(f"{self}: outputs cannot be written to it: {error.strerror}") from None
                rest = rest[written:]
                at += written

    def check(self, offset: int, byte_size: int, whose: str = "") -> None:
        """See that bytes are within the region, and that its object is still what it was; ``whose`` begins a refusal.

        Raises:
            InvalidRequest: they are not all within the region.
            FailedPrecondition: the object has gone or has become smaller.
        """
        if offset < 0 or byte_size < 0 or offset + byte_size > self.byte_size:
            raise InvalidRequest(
                f"{whose}{self}: expected an offset and a size within its {self.byte_size} bytes, "
                f"got shared_memory_offset {offset} and shared_memory_byte_size {byte_size}"
            )
        self._check_alive()

    def _check_alive(self) -> None:
        found = os.fstat(self._file)
        if not found.st_nlink:
            raise FailedPrecondition(f"{self}: its object {self.key!r} has been removed; unregister it")
        if found.st_size < self.offset + self.byte_size:
            raise FailedPrecondition(
                f"{self}: expected {self.offset + self.byte_size} bytes in {self.key!r}, found {found.st_size}: "
                "it has become smaller since it was registered; unregister it"
            )

    def _check_size(self) -> None:
        found = os.fstat(self._file)
        if not stat.S_ISREG(found.st_mode):
            raise InvalidRequest(f"{self}: {self.key!r} is no shared memory object")
        if self.offset < 0 or self.byte_size < 1 or self.offset + self.byte_size > found.st_size:
            raise InvalidRequest(
                f"{self}: expected an offset and a size of 1 or more within the {found.st_size} bytes of {self.key!r}, "
                f"got offset {self.offset} and byte_size {self.byte_size}"
            )


def _file_name(name: str, key: str) -> str:
    """Give the file's name behind a key, which may begin with a slash and has no other."""
    file = key.removeprefix("/")
    if not file or "/" in file or "\0" in file or file in {".", ".."} or len(os.fsencode(file)) > _MOST_CHARACTERS:
        raise InvalidRequest(
            f'shared memory region "{cut(name, 80)}": expected a key such as "/my_region", with no other slash, '
            f"got {cut(key, 80)!r}"
        )
    return file


def _open(name: str, path: Path) -> int:
    try:
        return os.open(path, _FLAGS)
    except OSError as error:
        text = f'shared memory region "{cut(name, 80)}": {cut(path.name, 80)!r} cannot be opened: {error.strerror}'
        if error.errno in {errno.EACCES, errno.EPERM}:
            raise PermissionDenied(text) from None
        missing = NotFound if error.errno == errno.ENOENT else InvalidRequest
        raise missing(text) from None


class ClientRegions:
    """The regions of one server, by name.

    Args:
        is_allowed: whether there may be any.
        folder: where the system has shared memory objects as files.
    """

    def __init__(self, *, is_allowed: bool = False, folder: Path = _FOLDER) -> None:
        self.is_allowed = is_allowed
        self._folder = folder
        self._regions: dict[str, ClientRegion] = {}

    def register(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Make a region known.

        Raises:
            NotSupported: shared memory is not served.
            InvalidRequest: the name is empty or too long, or as :class:`ClientRegion`.
            AlreadyExists: a region has that name.
            Overloaded: as many are registered as may be.
            NotFound: as :class:`ClientRegion`.
            PermissionDenied: likewise.
        """
        self._check_allowed()
        if not name or len(name) > _MOST_CHARACTERS:
            raise InvalidRequest(f"the name of a region: expected 1 to {_MOST_CHARACTERS} characters, got {len(name)}")
        if name in self._regions:
            raise AlreadyExists(f'shared memory region "{name}" is registered already; unregister it first')
        if len(self._regions) >= _MOST_REGIONS:
            raise Overloaded(f"expected at most {_MOST_REGIONS} shared memory regions; unregister some")
        self._regions[name] = ClientRegion(name, key, offset, byte_size, self._folder)

    def listed(self, name: str = "") -> list[ClientRegion]:
        """Give one region, or all of them, by name.

        Raises:
            NotFound: no region has that name.
        """
        return [self.find(name)] if name else [self._regions[each] for each in sorted(self._regions)]

    def unregister(self, name: str = "") -> None:
        """Forget one region, or all; calls that use it go on, and a name that no region has is no error."""
        if name:
            self._regions.pop(name, None)
        else:
            self._regions.clear()

    def find(self, name: str) -> ClientRegion:
        """Give a region.

        Raises:
            NotSupported: shared memory is not served.
            NotFound: no region has that name.
        """
        self._check_allowed()
        region = self._regions.get(name)
        if region is None:
            raise NotFound(
                f'shared memory region "{cut(name, 80)}" is not registered; '
                "regions of system shared memory can be, those of CUDA cannot"
            )
        return region

    def _check_allowed(self) -> None:
        if not self.is_allowed:
            raise NotSupported(_OFF)
