"""Calls whose tensors lie in regions of clients: inputs become views of them, outputs are written there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import trio

from ovmstrio.core.errors import InvalidRequest
from ovmstrio.core.gathered import Gathered
from ovmstrio.core.tensor import MemoryPlace, RawTensor
from ovmstrio.core.texts import shown
from ovmstrio.runtimes.models.buffers import buffer_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ovmstrio.core.request import Buffer, InferRequest, InferResponse, ParameterValue
    from ovmstrio.core.tensor import Tensor
    from ovmstrio.dataplane.shared_memory.client_regions import ClientRegion, ClientRegions

__all__ = ["OutputPlaces", "names_regions", "output_places", "place_tensors", "view_inputs", "write_outputs"]

_REGION: Final = "shared_memory_region"
_OFFSET: Final = "shared_memory_offset"
_SIZE: Final = "shared_memory_byte_size"
_WRITTEN_AT_ONCE: Final = 2 * 2**20
"""Bytes that are copied within a millisecond or two."""


class _Place(NamedTuple):
    region: ClientRegion
    offset: int
    byte_size: int


OutputPlaces = dict[str, _Place]
"""Where the outputs of a call go that do not go to its client, by name."""


def names_regions(request: InferRequest) -> bool:
    """Tell whether any tensor of a call lies in a region."""
    for given in request.inputs:
        if _REGION in given.parameters:
            return True
    return bool(request.outputs) and any(_REGION in wanted.parameters for wanted in request.outputs)


def place_tensors(request: InferRequest, regions: ClientRegions) -> OutputPlaces:
    """Give a request its inputs that lie in regions of its client, and tell where its outputs are to go.

    Raises:
        ServerError: as :func:`view_inputs` and :func:`output_places`.
    """
    if not names_regions(request):
        return {}
    view_inputs(request, regions)
    return output_places(request, regions)


def view_inputs(request: InferRequest, regions: ClientRegions) -> None:
    """Let those inputs of a request that name a region be views of it, which nothing is copied into or out of.

    Raises:
        NotSupported: shared memory is not served.
        NotFound: a region is not registered.
        InvalidRequest: an input has contents as well, or does not lie within its region.
        FailedPrecondition: a region has gone or has become smaller.
    """
    placed = [number for number, given in enumerate(request.inputs) if _REGION in given.parameters]
    if not placed:
        return
    raws = [*request.raw_inputs] or [None] * len(request.inputs)
    wrong = Gathered()
    for number in placed:
        given = request.inputs[number]
        has_bytes = number < len(raws) and raws[number] is not None
        with wrong:
            if has_bytes or (given.contents is not None and len(given.contents.values)):
                raise InvalidRequest(f"input {given.name}: it has contents besides {_REGION}")
            place = _place_of(f"input {given.name}", given.parameters, regions)
            given.contents = None
            if number < len(raws):
                raws[number] = place.region.view(place.offset, place.byte_size, f"input {given.name}: ")
    wrong.tell()
    request.raw_inputs = raws


def output_places(request: InferRequest, regions: ClientRegions) -> OutputPlaces:
    """Find where the outputs of a call are to go, before it is made.

    Raises:
        NotSupported: shared memory is not served.
        NotFound: a region is not registered.
        InvalidRequest: the place does not lie within its region.
        FailedPrecondition: a region has gone or has become smaller.
    """
    places: OutputPlaces = {}
    for wanted in request.outputs:
        if _REGION in wanted.parameters:
            place = _place_of(f"output {wanted.name}", wanted.parameters, regions)
            place.region.check(place.offset, place.byte_size, f"output {wanted.name}: ")
            places[wanted.name] = place
    return places


async def write_outputs(response: InferResponse, places: OutputPlaces) -> None:
    """Write outputs to their places; the answer tells where they are.

    Raises:
        InvalidRequest: there is less room than an output has bytes; nothing has been written then.
        FailedPrecondition: a region has gone or has become smaller.

    Cancellation: not while it writes; before that where an output is large, which is written in a thread.
    """
    if not places:
        return
    for tensor in response.outputs:
        place = places.get(tensor.name)
        if place is not None and (size := tensor.nbytes) > place.byte_size:
            raise InvalidRequest(
                f"output {tensor.name}: expected room for {size} bytes in {place.region}, got {_SIZE} {place.byte_size}"
            )
    for number, tensor in enumerate(response.outputs):
        place = places.get(tensor.name)
        if place is None:
            continue
        data, size = _bytes_of(tensor), tensor.nbytes
        if size <= _WRITTEN_AT_ONCE:
            place.region.write(place.offset, (data,))
        else:
            await trio.to_thread.run_sync(place.region.write, place.offset, (data,))
        where = MemoryPlace(place.region.name, place.offset, size)
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
