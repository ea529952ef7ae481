"""What a node says of its inputs and outputs, and from what ``execute`` gave to arrays.

Every buffer that ``execute`` gave is released exactly once:

==================================================  ============================================
what came                                            what becomes of it
==================================================  ============================================
a status other than 0                                ``EXECUTION_FAILED``; nothing is released
no array of outputs                                  ``OUTPUTS_CORRUPTED``
a count below 1 or absurdly high                     ``OUTPUTS_CORRUPTED_COUNT``; the array is released
an output that cannot be used                        its code; everything is released
else                                                 sizes and array are released, data with its last user
==================================================  ============================================
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping
from ctypes import byref, c_int, c_uint64, c_void_p
from typing import Any, Final, NamedTuple

import numpy as np

from ovmstrio.core.errors import ConfigError, CustomNodeFailure
from ovmstrio.core.tensor import Array
from ovmstrio.runtimes.pipelines.custom_nodes.custom_node import ItemInfo
from ovmstrio.runtimes.pipelines.custom_nodes.native.abi import DATATYPES, NodeTensor, NodeTensorInfo
from ovmstrio.runtimes.pipelines.custom_nodes.native.initialized import InitializedNode, LibraryBuffer, Memory
from ovmstrio.runtimes.pipelines.custom_nodes.native.native_inputs import CallInputs

__all__ = ["MOST_DIMENSIONS", "MOST_ITEMS", "OutputTaker", "ask_items", "shape_at"]

MOST_ITEMS: Final = 4096
"""A higher number of inputs or outputs is taken for a mistake, before memory behind the array is read."""

MOST_DIMENSIONS: Final = 32
"""The same for dimensions."""


def shape_at(address: int | None, count: int) -> tuple[int, ...] | None:
    """Read the sizes that a library gave; None if there cannot be such."""
    if count == 0:
        return ()
    if address is None or count > MOST_DIMENSIONS:
        return None
    return tuple((c_uint64 * count).from_address(address))


class _UsableOutput(NamedTuple):
    """An output that can be used."""

    name: str
    address: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]


class OutputTaker:
    """Takes over the outputs of one call."""

    def __init__(self, node: InitializedNode, inputs: CallInputs) -> None:
        self._node = node
        self._inputs = inputs
        self._outputs: list[_UsableOutput] = []
        self._data: set[int] = set()
        self._failure: CustomNodeFailure | None = None

    def take(self, status: int, address: int | None, count: int) -> dict[str, Array]:
        """Check what ``execute`` returned, and give the arrays; of several outputs of one name the first.

        Raises:
            CustomNodeFailure: see above; of several failures the first.
        """
        failed = self._node.identity.failed
        if status:
            raise failed("NODE_LIBRARY_EXECUTION_FAILED", f"execute returned {status}")
        if address is None:
            raise failed("NODE_LIBRARY_OUTPUTS_CORRUPTED", "the pointer to the outputs is null")
        if not 0 < count <= MOST_ITEMS:
            self._node.release(address)
            raise failed("NODE_LIBRARY_OUTPUTS_CORRUPTED_COUNT", f"{count} outputs, expected 1 to {MOST_ITEMS}")
        self._check_all((NodeTensor * count).from_address(address))
        self._node.release(address)
        if self._failure is not None:
            self._release_all(self._data)
            raise self._failure
        return self._arrays()

    def _check_all(self, tensors: Iterable[NodeTensor]) -> None:
        sizes: set[int] = set()
        for index, tensor in enumerate(tensors):
            if tensor.data is not None:
                self._data.add(tensor.data)
            if tensor.dims is not None:
                sizes.add(tensor.dims)
            self._check(index, tensor)
        self._release_all(sizes)

    def _check(self, index: int, tensor: NodeTensor) -> None:
        datatype = DATATYPES.get(tensor.precision)
        shape = shape_at(tensor.dims, tensor.dims_count)
        if tensor.name is None:
            self._fail("NODE_LIBRARY_OUTPUT_MISSING_NAME", f"output {index} has none")
            return
        name = tensor.name.decode(errors="replace")
        if datatype is None:
            self._fail("NODE_LIBRARY_INVALID_PRECISION", f"output {name!r} has precision {tensor.precision}")
        elif shape is None:
            detail = (
                f"output {name!r} has {tensor.dims_count} dimensions at {tensor.dims}, expected 0 to {MOST_DIMENSIONS}"
            )
            self._fail("NODE_LIBRARY_INVALID_SHAPE", detail)
        elif tensor.data is None:
            self._fail("NODE_LIBRARY_INVALID_CONTENT_SIZE", f"the data of output {name!r} is null")
        elif tensor.data_bytes != (needed := math.prod(shape) * datatype.itemsize):
            detail = (
                f"output {name!r} of {datatype.name} {list(shape)} has {tensor.data_bytes} bytes, expected {needed}"
            )
            self._fail("NODE_LIBRARY_INVALID_CONTENT_SIZE", detail)
        elif math.prod(size for size in shape if size) * datatype.itemsize > sys.maxsize:
            self._fail("NODE_LIBRARY_INVALID_SHAPE", f"output {name!r} of {list(shape)} is too large for any array")
        else:
            self._outputs.append(_UsableOutput(name, tensor.data, datatype.numpy, shape))

    def _fail(self, code: str, detail: str) -> None:
        self._failure = self._failure or self._node.identity.failed(code, detail)

    def _arrays(self) -> dict[str, Array]:
        arrays: dict[str, Array] = {}
        lent: set[int] = set()
        for name, address, dtype, shape in self._outputs:
            if name in arrays:
                continue
            if address in lent or self._inputs.holds(address):
                # No two arrays may stand on the same memory, for who has one of them may write into it.
                arrays[name] = np.array(Memory(address, dtype, shape))
            else:
                arrays[name] = np.asarray(LibraryBuffer(self._node, address, dtype, shape))
                lent.add(address)
        self._release_all(self._data - lent)
        return arrays

    def _release_all(self, addresses: Iterable[int]) -> None:
        for address in addresses:
            self._node.release(address)


def ask_items(node: InitializedNode, function: Callable[..., int], symbol: str) -> Mapping[str, ItemInfo]:
    """Ask a node for its inputs or outputs, by the function that tells them; blocking.

    Raises:
        ConfigError: it failed (``NODE_LIBRARY_METADATA_FAILED``), or what it gave cannot be used
            (``NODE_LIBRARY_OUTPUTS_CORRUPTED``, ``NODE_LIBRARY_OUTPUTS_CORRUPTED_COUNT``).
    """
    address, count = c_void_p(), c_int()
    status = function(byref(address), byref(count), node.params, len(node.params), node.manager)
    unusable = node.identity.unusable
    if status:
        raise unusable("NODE_LIBRARY_METADATA_FAILED", f"{symbol} returned {status}")
    if address.value is None:
        raise unusable("NODE_LIBRARY_OUTPUTS_CORRUPTED", f"the pointer that {symbol} gave is null")
    try:
        if not 0 < count.value <= MOST_ITEMS:
            detail = f"{symbol} gave {count.value}, expected 1 to {MOST_ITEMS}"
            raise unusable("NODE_LIBRARY_OUTPUTS_CORRUPTED_COUNT", detail)
        return _items(node, symbol, list((NodeTensorInfo * count.value).from_address(address.value)))
    finally:
        node.release(address.value)


def _items(node: InitializedNode, symbol: str, rows: list[NodeTensorInfo]) -> Mapping[str, ItemInfo]:
    failure: ConfigError | None = None
    items: dict[str, ItemInfo] = {}
    for index, row in enumerate(rows):
        shape = shape_at(row.dims, row.dims_count)
        if row.name is None or shape is None:
            detail = f"entry {index} that {symbol} gave has no name, or no shape"
            failure = failure or node.identity.unusable("NODE_LIBRARY_METADATA_FAILED", detail)
            continue
        name = row.name.decode(errors="replace")
        items[name] = ItemInfo(name, DATATYPES.get(row.precision), tuple(size or -1 for size in shape))
    for address in {row.dims for row in rows if row.dims is not None}:
        node.release(address)
    if failure is not None:
        raise failure
    return items
