"""A node between ``initialize`` and ``deinitialize``, and the memory of its library that arrays stand on.

Calls that are under way and arrays that are in use *hold* the node.  Once it is closed, it is deinitialised when
nothing holds it: by whoever closes it, or by the last holder if that takes too long.  No lock guards this, for the
last holder may be the garbage collector, in the middle of anything; what counts is the order in which each side writes
and looks.
"""

from __future__ import annotations

import ctypes
import queue
import threading
from ctypes import byref, c_void_p
from typing import Any

import numpy as np
import structlog

from ovmstrio.runtimes.pipelines.custom_nodes.native.abi import NodeParam
from ovmstrio.runtimes.pipelines.custom_nodes.native.native_failures import NodeIdentity
from ovmstrio.runtimes.pipelines.custom_nodes.native.native_library import NativeLibrary

__all__ = ["InitializedNode", "LibraryBuffer", "Memory"]

log = structlog.get_logger(__name__)


class InitializedNode:
    """One node of one pipeline as its library knows it.

    Attributes:
        is_closing: whether nobody else may hold it.

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
        self._is_left_to_holders = False
        self._claim = threading.Lock()
        self._failed_releases = 0

    def release(self, address: int) -> None:
        """Give memory back to the library; from any thread."""
        self._failed_releases += bool(self.library.release(address, self.manager))

    def enter(self) -> object | None:
        """Hold the node until :meth:`leave` is called with what this gives, which is None if it is closed."""
        holder = object()
        self._holders.add(holder)
        if not self.is_closing:
            return holder
        self.leave(holder)
        return None

    def hold(self) -> object:
        """Hold the node on behalf of one who holds it already."""
        holder = object()
        self._holders.add(holder)
        return holder

    def leave(self, holder: object) -> None:
        """Hold the node no more; from any thread."""
        self._holders.discard(holder)
        if self.is_closing and not self._holders:
            self._idle.put(None)
            if self._is_left_to_holders:
                self._deinitialize()

    def close(self, seconds: float) -> None:
        """Deinitialise the node as soon as nothing holds it; blocking.

        If that is not within ``seconds``, the last holder does it, in whatever thread it leaves.  Failures are logged;
        may be called by several threads.
        """
        self.is_closing = True
        if self._holders:
            try:
                self._idle.get(timeout=seconds)
            except queue.Empty:
                log.warning("custom node is still in use; its last user deinitialises it", node=str(self.identity))
        self._is_left_to_holders = True
        if not self._holders:
            self._deinitialize()

    def _deinitialize(self) -> None:
        if not self._claim.acquire(blocking=False):
            return
        status = self.library.deinitialize(self.manager)
        if status or self._failed_releases:
            failed = self._failed_releases
            log.warning(
                "custom node failed to clean up", node=str(self.identity), deinitialize=status, failed_releases=failed
            )


class Memory:
    """Packed elements at an address, which numpy makes an array of that holds this object."""

    __slots__ = ("__array_interface__",)

    def __init__(self, address: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        self.__array_interface__ = {"version": 3, "shape": shape, "typestr": dtype.str, "data": (address, False)}


class LibraryBuffer(Memory):
    """Memory of a library; it is released when the array that stands on it and all views of that are gone."""

    __slots__ = ("_address", "_holder", "_node")

    def __init__(self, node: InitializedNode, address: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        super().__init__(address, dtype, shape)
        self._node = node
        self._address = address
        self._holder = node.hold()

    def __del__(self) -> None:
        self._node.release(self._address)
        self._node.leave(self._holder)
