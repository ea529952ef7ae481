"""Custom nodes in shared libraries, called in threads of this process."""

from __future__ import annotations

import ctypes
import math
import queue
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from ctypes import byref, c_int, c_uint64, c_void_p, cast
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import structlog
import trio

from ovmstrio.core.errors import ConfigError, CustomNodeFailure
from ovmstrio.core.tensor import Array
from ovmstrio.isolation.thread_pool import WorkerThreads
from ovmstrio.pipelines.custom_node import MAX_CONCURRENT_CALLS, ItemInfo, create_node_threads
from ovmstrio.pipelines.native.library import (
    DATATYPES,
    PRECISIONS,
    NativeLibrary,
    NodeIdentity,
    NodeParam,
    NodeTensor,
    NodeTensorInfo,
    load_library,
)

# Initialized nodes and library memory

log = structlog.get_logger(__name__)


class _InitializedNode:
    """A node between ``initialize`` and ``deinitialize``.

    Attributes:
        is_closing: whether new holders are rejected.

    Raises:
        ConfigError: ``initialize`` failed (``NODE_LIBRARY_INITIALIZE_FAILED``).
    """

    def __init__(self, library: NativeLibrary, identity: NodeIdentity, params: ctypes.Array[NodeParam]) -> None:
        manager = c_void_p()
        status = library.initialize(byref(manager), params, len(params))
        if status:
            raise identity.unusable("NODE_LIBRARY_INITIALIZE_FAILED", f"initialize returned {status}")
        self.library = library
        self.identity = identity
        self.params = params
        self.manager = manager.value
        self._holders: set[object] = set()
        self._idle: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.is_closing = False
        self._is_deferred = False
        self._claim = threading.Lock()
        self._failed_releases = 0

    def release(self, address: int) -> None:
        self._failed_releases += bool(self.library.release(address, self.manager))

    def acquire(self) -> object | None:
        holder = object()
        self._holders.add(holder)
        if not self.is_closing:
            return holder
        self.release_hold(holder)
        return None

    def acquire_again(self) -> object:
        holder = object()
        self._holders.add(holder)
        return holder

    def release_hold(self, holder: object) -> None:
        self._holders.discard(holder)
        if self.is_closing and not self._holders:
            self._idle.put(None)
            if self._is_deferred:
                self._deinitialize()

    def close(self, seconds: float) -> None:
        """Deinitialize the node when no holds are left. Blocks; thread-safe; logs failures.

        If that takes longer than ``seconds``, the thread that releases the last hold deinitializes the node.
        """
        self.is_closing = True
        if self._holders:
            try:
                self._idle.get(timeout=seconds)
            except queue.Empty:
                log.warning("custom node deinitialization deferred: still in use", node=str(self.identity))
        self._is_deferred = True
        if not self._holders:
            self._deinitialize()

    def _deinitialize(self) -> None:
        if not self._claim.acquire(blocking=False):
            return
        status = self.library.deinitialize(self.manager)
        if status or self._failed_releases:
            failed = self._failed_releases
            log.warning(
                "custom node cleanup failed", node=str(self.identity), deinitialize=status, failed_releases=failed
            )


class _ArrayMemory:
    """Packed elements at an address; a numpy array over them keeps this object alive."""

    __slots__ = ("__array_interface__",)

    def __init__(self, address: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        self.__array_interface__ = {"version": 3, "shape": shape, "typestr": dtype.str, "data": (address, False)}


class _LibraryBuffer(_ArrayMemory):
    """Memory of a library, released when the array over it and all its views are deleted."""

    __slots__ = ("_address", "_holder", "_node")

    def __init__(self, node: _InitializedNode, address: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        super().__init__(address, dtype, shape)
        self._node = node
        self._address = address
        self._holder = node.acquire_again()

    def __del__(self) -> None:
        self._node.release(self._address)
        self._node.release_hold(self._holder)


# Inputs


def _as_node_params(params: Mapping[str, str]) -> ctypes.Array[NodeParam]:
    return (NodeParam * len(params))(*(NodeParam(key.encode(), value.encode()) for key, value in params.items()))


def _exclusive(array: Array) -> Array:
    """Return an array that the library may write to: the same one if it is exclusive, else a copy.

    Exclusive arrays are writeable. Arrays that are not packed or not aligned are copied too.
    """
    return array if array.flags.carray else array.copy(order="C")


def check_dtypes(identity: NodeIdentity, inputs: Mapping[str, Array]) -> None:
    """Raise ``CustomNodeFailure`` if an input has a dtype that the C interface does not support."""
    for name, array in inputs.items():
        if array.dtype not in PRECISIONS:
            detail = f"input {name!r} has unsupported dtype {array.dtype}"
            raise CustomNodeFailure(f"Invalid precision; {identity}: {detail}")


class _CallInputs:
    """Inputs of one call as a C array over the numpy arrays; must be kept until the library has returned.

    Args:
        inputs: arrays by name, of supported dtypes; not copied.
    """

    def __init__(self, inputs: Mapping[str, Array]) -> None:
        self._arrays = [inputs[name] for name in sorted(inputs)]
        self._sizes = [(c_uint64 * max(array.ndim, 1))(*array.shape) for array in self._arrays]
        self.array: ctypes.Array[NodeTensor] = (NodeTensor * len(inputs))(
            *map(self._tensor, sorted(inputs), range(len(inputs)))
        )
        self.count = len(inputs)

    def _tensor(self, name: str, index: int) -> NodeTensor:
        array = self._arrays[index]
        return NodeTensor(
            name=name.encode(),
            data=array.__array_interface__["data"][0],
            data_bytes=array.nbytes,
            dims=cast(self._sizes[index], c_void_p).value,
            dims_count=array.ndim,
            precision=PRECISIONS[array.dtype],
        )

    def holds(self, address: int) -> bool:
        return any(0 <= address - array.__array_interface__["data"][0] < array.nbytes for array in self._arrays)


# Outputs and descriptions

_MAX_ITEMS: Final = 4096
"""Limit of inputs or outputs; a higher count is treated as corrupt before the array is read."""

_MAX_DIMENSIONS: Final = 32
"""Limit of dimensions, for the same reason."""


def _read_shape(address: int | None, count: int) -> tuple[int, ...] | None:
    """Read a shape from the library's memory; None if it is invalid."""
    if count == 0:
        return ()
    if address is None or count > _MAX_DIMENSIONS:
        return None
    return tuple((c_uint64 * count).from_address(address))


class _ValidOutput(NamedTuple):
    name: str
    address: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]


class _OutputConverter:
    def __init__(self, node: _InitializedNode, inputs: _CallInputs) -> None:
        self._node = node
        self._inputs = inputs
        self._outputs: list[_ValidOutput] = []
        self._data: set[int] = set()
        self._failure: CustomNodeFailure | None = None

    def convert(self, status: int, address: int | None, count: int) -> dict[str, Array]:
        failed = self._node.identity.failed
        if status:
            raise failed("NODE_LIBRARY_EXECUTION_FAILED", f"execute returned {status}")
        if address is None:
            raise failed("NODE_LIBRARY_OUTPUTS_CORRUPTED", "the pointer to the outputs is null")
        if not 0 < count <= _MAX_ITEMS:
            self._node.release(address)
            raise failed("NODE_LIBRARY_OUTPUTS_CORRUPTED_COUNT", f"{count} outputs, expected 1 to {_MAX_ITEMS}")
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
        shape = _read_shape(tensor.dims, tensor.dims_count)
        if tensor.name is None:
            self._fail("NODE_LIBRARY_OUTPUT_MISSING_NAME", f"output {index} has no name")
            return
        name = tensor.name.decode(errors="replace")
        if datatype is None:
            self._fail("NODE_LIBRARY_INVALID_PRECISION", f"output {name!r} has precision {tensor.precision}")
        elif shape is None:
            detail = (
                f"output {name!r} has {tensor.dims_count} dimensions at {tensor.dims}, expected 0 to {_MAX_DIMENSIONS}"
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
            self._outputs.append(_ValidOutput(name, tensor.data, datatype.numpy, shape))

    def _fail(self, code: str, detail: str) -> None:
        self._failure = self._failure or self._node.identity.failed(code, detail)

    def _arrays(self) -> dict[str, Array]:
        arrays: dict[str, Array] = {}
        exported: set[int] = set()
        for name, address, dtype, shape in self._outputs:
            if name in arrays:
                continue
            if address in exported or self._inputs.holds(address):
                # Copy shared memory: the owner of an array may write to it.
                arrays[name] = np.array(_ArrayMemory(address, dtype, shape))
            else:
                arrays[name] = np.asarray(_LibraryBuffer(self._node, address, dtype, shape))
                exported.add(address)
        self._release_all(self._data - exported)
        return arrays

    def _release_all(self, addresses: Iterable[int]) -> None:
        for address in addresses:
            self._node.release(address)


def _describe_items(node: _InitializedNode, function: Callable[..., int], symbol: str) -> Mapping[str, ItemInfo]:
    """Return the inputs or outputs that a library function describes. Blocks.

    Raises:
        ConfigError: the function failed (``NODE_LIBRARY_METADATA_FAILED``), or its result is invalid
            (``NODE_LIBRARY_OUTPUTS_CORRUPTED``, ``NODE_LIBRARY_OUTPUTS_CORRUPTED_COUNT``).
    """
    address, count = c_void_p(), c_int()
    status = function(byref(address), byref(count), node.params, len(node.params), node.manager)
    unusable = node.identity.unusable
    if status:
        raise unusable("NODE_LIBRARY_METADATA_FAILED", f"{symbol} returned {status}")
    if address.value is None:
        raise unusable("NODE_LIBRARY_OUTPUTS_CORRUPTED", f"{symbol} returned a null pointer")
    try:
        if not 0 < count.value <= _MAX_ITEMS:
            detail = f"{symbol} returned {count.value} entries, expected 1 to {_MAX_ITEMS}"
            raise unusable("NODE_LIBRARY_OUTPUTS_CORRUPTED_COUNT", detail)
        return _items(node, symbol, list((NodeTensorInfo * count.value).from_address(address.value)))
    finally:
        node.release(address.value)


def _items(node: _InitializedNode, symbol: str, rows: list[NodeTensorInfo]) -> Mapping[str, ItemInfo]:
    failure: ConfigError | None = None
    items: dict[str, ItemInfo] = {}
    for index, row in enumerate(rows):
        shape = _read_shape(row.dims, row.dims_count)
        if row.name is None or shape is None:
            detail = f"entry {index} of {symbol} has no name or no shape"
            failure = failure or node.identity.unusable("NODE_LIBRARY_METADATA_FAILED", detail)
            continue
        name = row.name.decode(errors="replace")
        items[name] = ItemInfo(name, DATATYPES.get(row.precision), tuple(size or -1 for size in shape))
    for address in {row.dims for row in rows if row.dims is not None}:
        node.release(address)
    if failure is not None:
        raise failure
    return items


# Node

GRACE_SECONDS: Final = 5.0
"""Time limit for abandoned calls and arrays in use when a node is closed."""


class NativeNode:
    """A custom node in a shared library, created by :func:`open_native_node`; see :class:`CustomNode`."""

    def __init__(
        self,
        node: _InitializedNode,
        inputs: Mapping[str, ItemInfo],
        outputs: Mapping[str, ItemInfo],
        threads: WorkerThreads,
    ) -> None:
        self.identity = node.identity
        self.inputs = inputs
        self.outputs = outputs
        self._node = node
        self._threads = threads

    @property
    def abandoned_calls(self) -> int:
        """Number of calls in progress whose callers have left."""
        return self._threads.abandoned

    async def execute(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Run the node once; calls may overlap.

        Writeable arrays are exclusive and passed to the library without a copy if packed and aligned; other arrays are
        copied, so that writes of the library stay invisible. Inputs must stay valid until the library has returned,
        even if the caller has left. Outputs use the library's memory.

        Cancellation returns at once; the call continues in its thread, which releases its outputs.

        Raises:
            CustomNodeFailure: the library returned an error or an invalid output.
            Overloaded: all threads of this node are busy with abandoned calls.
        """
        check_dtypes(self.identity, inputs)
        if self._node.is_closing:
            raise self._closed()
        return await self._threads.call(self._execute, dict(inputs), is_abandonable=True, discard=dict.clear)

    def _closed(self) -> CustomNodeFailure:
        return CustomNodeFailure(f"{self.identity} is closed")

    def _execute(self, inputs: dict[str, Array]) -> dict[str, Array]:
        node = self._node
        holder = node.acquire()
        if holder is None:
            raise self._closed()
        try:
            call = _CallInputs({name: _exclusive(array) for name, array in inputs.items()})
            inputs.clear()
            address, count = c_void_p(), c_int()
            status = node.library.execute(
                call.array, call.count, byref(address), byref(count), node.params, len(node.params), node.manager
            )
            return _OutputConverter(node, call).convert(status, address.value, count.value)
        finally:
            node.release_hold(holder)

    async def aclose(self) -> None:
        """Deinitialize the node once it is not in use. Can be called twice; logs failures.

        Waits ``GRACE_SECONDS`` for abandoned calls and arrays in use; after that, the last one deinitializes the node.
        Shielded from cancellation; ``deinitialize`` itself has the same time limit.
        """
        # Use an extra thread: all threads of the pool may be busy with calls that never end.
        limiter = trio.CapacityLimiter(1)
        close = partial(self._node.close, GRACE_SECONDS)
        with trio.move_on_after(2 * GRACE_SECONDS, shield=True) as patience:
            await trio.to_thread.run_sync(close, abandon_on_cancel=True, limiter=limiter)
        if patience.cancelled_caught:
            log.warning("custom node deinitialization timed out", node=str(self.identity))
        self._threads.close()


async def open_native_node(
    path: Path, name: str, params: Mapping[str, str], *, tasks: trio.Nursery, calls_at_once: int = MAX_CONCURRENT_CALLS
) -> NativeNode:
    """Load a library and initialize a node of it; the caller closes the node.

    ``tasks`` runs the node's threads and must outlive the node. Up to ``calls_at_once`` calls run; further calls wait.
    After cancellation, an initialized node is deinitialized.
    """
    identity = NodeIdentity(name, path)
    threads = create_node_threads(identity.name, str(identity), calls_at_once)
    try:
        await tasks.start(threads.run)
        opened = await threads.call(
            _open, identity, dict(params), is_abandonable=True, discard=lambda opened: opened[0].close(0)
        )
    except BaseException:
        threads.close()
        raise
    return NativeNode(*opened, threads)


_Opened = tuple[_InitializedNode, Mapping[str, ItemInfo], Mapping[str, ItemInfo]]


def _open(identity: NodeIdentity, params: dict[str, str]) -> _Opened:
    library = load_library(identity)
    node = _InitializedNode(library, identity, _as_node_params(params))
    try:
        inputs = _describe_items(node, library.get_inputs_info, "getInputsInfo")
        return node, inputs, _describe_items(node, library.get_outputs_info, "getOutputsInfo")
    except BaseException:
        node.close(0)
        raise
