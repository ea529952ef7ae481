"""System shared memory: regions that clients register, and tensors in them.

A region is mapped read-only: inputs are views of it.  Outputs are written through the file descriptor, which cannot
fault.  A client that shrinks the file during a read ends the process with SIGBUS, which cannot be prevented for files
of others.  The size is checked before each use; enable shared memory for trusted clients only.

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
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import trio

from ovmstrio.core.errors import (
    AlreadyExists,
    ErrorList,
    FailedPrecondition,
    InvalidRequest,
    NotFound,
    NotSupported,
    Overloaded,
    PermissionDenied,
)
from ovmstrio.core.tensor import RawTensor, SharedMemoryLocation
from ovmstrio.encoding.raw_contents import buffer_of
from ovmstrio.util.truncation import cut, shown

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ovmstrio.core.request import Buffer, InferRequest, InferResponse, ParameterValue
    from ovmstrio.core.tensor import Tensor, TensorSpec

_FOLDER: Final = Path("/dev/shm")  # noqa: S108 - the folder of `shm_open`, not a temporary folder
_FLAGS: Final = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_MAX_REGIONS: Final = 1_024
_MAX_NAME_CHARACTERS: Final = 255
"""File-name limit of the kernel; also used for region names."""
_DISABLED: Final = "shared memory is not served; --allow-shared-memory turns it on"


class ClientRegion:
    """One region: ``byte_size`` bytes from ``offset`` in the shared memory object ``key``.

    Mapping and descriptor live until the last view and the last write of the region end.

    Raises:
        InvalidRequest: the key is not a shared memory object, or the region exceeds it.
        NotFound: the object does not exist.
        PermissionDenied: the server may not read and write it.
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
        self._map_offset = offset - begin
        try:
            length = self._map_offset + byte_size
            self._mapping = mmap.mmap(self._file, length, mmap.MAP_SHARED, mmap.PROT_READ, offset=begin)
        except (OSError, ValueError) as error:
            raise InvalidRequest(f"{self}: it cannot be mapped: {error}") from None

    def __str__(self) -> str:
        return f'shared memory region "{cut(self.name, 80)}"'

    def view(self, offset: int, byte_size: int, error_prefix: str = "") -> memoryview:
        """Return a read-only view of bytes; error messages begin with ``error_prefix``.  Raises as :meth:`check`."""
        self.check(offset, byte_size, error_prefix)
        begin = self._map_offset + offset
        return memoryview(self._mapping)[begin : begin + byte_size]

    def write(self, offset: int, data: Sequence[Buffer]) -> None:
        """Write bytes at an offset that :meth:`check` accepted; blocking.

        Raises:
            FailedPrecondition: the object was removed, has shrunk, or has no memory left.
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

    def check(self, offset: int, byte_size: int, error_prefix: str = "") -> None:
        """Check that bytes are within the region, whose object must exist; error messages begin with ``error_prefix``.

        Raises:
            InvalidRequest: the bytes are not within the region.
            FailedPrecondition: the object was removed or has shrunk.
        """
        if offset < 0 or byte_size < 0 or offset + byte_size > self.byte_size:
            raise InvalidRequest(
                f"{error_prefix}{self}: expected an offset and a size within its {self.byte_size} bytes, "
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
    file = key.removeprefix("/")
    if not file or "/" in file or "\0" in file or file in {".", ".."} or len(os.fsencode(file)) > _MAX_NAME_CHARACTERS:
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
    """The shared-memory regions of one server, by name.

    Args:
        is_allowed: whether clients may register regions.
        folder: the folder of shared memory objects.
    """

    def __init__(self, *, is_allowed: bool = False, folder: Path = _FOLDER) -> None:
        self.is_allowed = is_allowed
        self._folder = folder
        self._regions: dict[str, ClientRegion] = {}

    def register(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Register a region; raises also as :class:`ClientRegion`.

        Raises:
            NotSupported: shared memory is disabled.
            InvalidRequest: the name is empty or too long.
            AlreadyExists: a region has that name.
            Overloaded: too many regions are registered.
        """
        self._check_allowed()
        if not name or len(name) > _MAX_NAME_CHARACTERS:
            raise InvalidRequest(f"region name: expected 1 to {_MAX_NAME_CHARACTERS} characters, got {len(name)}")
        if name in self._regions:
            raise AlreadyExists(f'shared memory region "{name}" is registered already; unregister it first')
        if len(self._regions) >= _MAX_REGIONS:
            raise Overloaded(f"expected at most {_MAX_REGIONS} shared memory regions; unregister some")
        self._regions[name] = ClientRegion(name, key, offset, byte_size, self._folder)

    def listed(self, name: str = "") -> list[ClientRegion]:
        """Return one region, or all of them sorted by name.  Raises as :meth:`find`."""
        return [self.find(name)] if name else [self._regions[each] for each in sorted(self._regions)]

    def unregister(self, name: str = "") -> None:
        """Unregister one region, or all; calls in flight go on, an unknown name is ignored."""
        if name:
            self._regions.pop(name, None)
        else:
            self._regions.clear()

    def find(self, name: str) -> ClientRegion:
        """Return a region.

        Raises:
            NotSupported: shared memory is disabled.
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
            raise NotSupported(_DISABLED)


# ----------------------------------------------------------------------
# Tensors in regions
# ----------------------------------------------------------------------

_REGION: Final = "shared_memory_region"
_OFFSET: Final = "shared_memory_offset"
_SIZE: Final = "shared_memory_byte_size"
_ON_LOOP_BYTES: Final = 2 * 2**20
"""Output size that is copied within a millisecond or two; larger ones are written in a thread."""


class _Place(NamedTuple):
    region: ClientRegion
    offset: int
    byte_size: int


OutputDestinations = dict[str, _Place]
"""Destinations of outputs in regions, by output name."""


def uses_regions(request: InferRequest) -> bool:
    """Return True if any tensor of a request is in a region."""
    for given in request.inputs:
        if _REGION in given.parameters:
            return True
    return bool(request.outputs) and any(_REGION in wanted.parameters for wanted in request.outputs)


def map_tensors(request: InferRequest, regions: ClientRegions) -> OutputDestinations:
    """Map the request's inputs that are in regions, and return the destinations of its outputs.

    Raises as :func:`map_inputs` and :func:`output_destinations`.
    """
    if not uses_regions(request):
        return {}
    map_inputs(request, regions)
    return output_destinations(request, regions)


def map_inputs(request: InferRequest, regions: ClientRegions) -> None:
    """Replace the raw contents of inputs in regions by zero-copy views.

    Raises:
        NotSupported: shared memory is disabled.
        NotFound: a region is not registered.
        InvalidRequest: an input also has contents, or exceeds its region.
        FailedPrecondition: a region's object was removed or has shrunk.
    """
    placed = [number for number, given in enumerate(request.inputs) if _REGION in given.parameters]
    if not placed:
        return
    raws = [*request.raw_inputs] or [None] * len(request.inputs)
    errors = ErrorList()
    for number in placed:
        given = request.inputs[number]
        has_bytes = number < len(raws) and raws[number] is not None
        with errors:
            if has_bytes or (given.contents is not None and len(given.contents.values)):
                raise InvalidRequest(f"input {given.name}: it has contents besides {_REGION}")
            place = _place_of(f"input {given.name}", given.parameters, regions)
            given.contents = None
            if number < len(raws):
                raws[number] = place.region.view(place.offset, place.byte_size, f"input {given.name}: ")
    errors.raise_if_any()
    request.raw_inputs = raws


def output_destinations(request: InferRequest, regions: ClientRegions) -> OutputDestinations:
    """Return the destinations of outputs in regions, checked before inference; raises as :func:`map_inputs`."""
    places: OutputDestinations = {}
    for wanted in request.outputs:
        if _REGION in wanted.parameters:
            place = _place_of(f"output {wanted.name}", wanted.parameters, regions)
            place.region.check(place.offset, place.byte_size, f"output {wanted.name}: ")
            places[wanted.name] = place
    return places


def check_room(request: InferRequest, places: OutputDestinations, known: Sequence[TensorSpec]) -> None:
    """Check before inference that destinations have room for the smallest outputs that a model can return.

    Raises:
        InvalidRequest: a destination is smaller.
    """
    classified = {wanted.name for wanted in request.outputs if wanted.parameters.get("classification")}
    for spec in known:
        if spec.name in places and spec.name not in classified:
            _check_size(spec.name, prod(dim.low for dim in spec.shape) * spec.datatype.itemsize, places[spec.name])


def _check_size(name: str, size: int, place: _Place) -> None:
    if size > place.byte_size:
        raise InvalidRequest(
            f"output {name}: expected room for {size} bytes in {place.region}, got {_SIZE} {place.byte_size}"
        )


async def write_outputs(response: InferResponse, places: OutputDestinations) -> None:
    """Write outputs to their destinations and replace them in the response by references; large ones in a thread.

    Raises:
        InvalidRequest: a destination is smaller than its output; nothing has been written.
        FailedPrecondition: a region's object was removed or has shrunk.
    """
    if not places:
        return
    for tensor in response.outputs:
        place = places.get(tensor.name)
        if place is not None:
            _check_size(tensor.name, tensor.nbytes, place)
    for number, tensor in enumerate(response.outputs):
        place = places.get(tensor.name)
        if place is None:
            continue
        data, size = _bytes_of(tensor), tensor.nbytes
        if size <= _ON_LOOP_BYTES:
            place.region.write(place.offset, (data,))
        else:
            await trio.to_thread.run_sync(place.region.write, place.offset, (data,))
        where = SharedMemoryLocation(place.region.name, place.offset, size)
        response.outputs[number] = RawTensor(tensor.name, tensor.datatype_name, tensor.shape, b"", where)


def _bytes_of(tensor: Tensor | RawTensor) -> Buffer:
    if not isinstance(tensor, RawTensor):
        return buffer_of(tensor.array)
    data = tensor.data
    return data.cast("B") if isinstance(data, memoryview) and data.nbytes else data


def _place_of(what: str, parameters: Mapping[str, ParameterValue], regions: ClientRegions) -> _Place:
    name = parameters[_REGION]
    if not isinstance(name, str):
        raise InvalidRequest(f"{what}: {_REGION}: expected the name of a region, got {shown(name, 40)}")
    region = regions.find(name)
    if _SIZE not in parameters:
        raise InvalidRequest(f"{what}: {_REGION} needs {_SIZE}")
    return _Place(region, *(_number(what, key, parameters.get(key, 0)) for key in (_OFFSET, _SIZE)))


def _number(what: str, key: str, value: ParameterValue) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"{what}: {key}: expected a whole number of bytes, got {shown(value, 40)}")
    return value
