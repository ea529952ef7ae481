"""A node of a pipeline that is a shared library, called in threads of this process."""

from __future__ import annotations

from collections.abc import Mapping
from ctypes import byref, c_int, c_void_p
from functools import partial
from pathlib import Path
from typing import Final

import structlog
import trio

from ovmstrio.core.errors import CustomNodeFailure
from ovmstrio.core.tensor import Array
from ovmstrio.runtimes.pipelines.custom_nodes.custom_node import ItemInfo
from ovmstrio.runtimes.pipelines.custom_nodes.native.initialized import InitializedNode
from ovmstrio.runtimes.pipelines.custom_nodes.native.native_failures import NodeIdentity
from ovmstrio.runtimes.pipelines.custom_nodes.native.native_inputs import (
    CallInputs,
    as_node_params,
    private,
    refuse_unknown_types,
)
from ovmstrio.runtimes.pipelines.custom_nodes.native.native_library import load_library
from ovmstrio.runtimes.pipelines.custom_nodes.native.native_outputs import OutputTaker, ask_items
from ovmstrio.runtimes.pipelines.custom_nodes.node_threads import CALLS_AT_ONCE, node_threads
from ovmstrio.work.threads.worker_threads import WorkerThreads

__all__ = ["GRACE_SECONDS", "NativeNode", "open_native_node"]

log = structlog.get_logger(__name__)

GRACE_SECONDS: Final = 5.0
"""How long closing a node waits for calls that nobody waits for any more, and for arrays that are still in use."""


class NativeNode:
    """One custom node of one pipeline; see ``ports.CustomNode``.  Made by :func:`open_native_node`.

    Attributes:
        identity: what the node is called in messages.
        inputs: what the node takes.
        outputs: what the node gives.
    """

    def __init__(
        self,
        node: InitializedNode,
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
        """How many calls go on although their callers have left."""
        return self._threads.abandoned

    async def execute(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Run the node once; may be called many times at once.

        Arrays that are writeable are the caller's alone and are given to the library as they are, packed and aligned
        as they must be; others are copied first, so that nothing that the library does to them is seen by anybody.
        Outputs stand on the library's own memory.

        Raises:
            CustomNodeFailure: the library returned an error, or what it gave cannot be used.
            Overloaded: the threads of this node are all busy with calls whose callers have left.

        Ownership: the inputs, until the library has returned, even if the caller has left.

        Cancellation: at once; a call that has begun goes on in its thread, which releases what it gives.
        """
        refuse_unknown_types(self.identity, inputs)
        if self._node.is_closing:
            raise self._closed()
        return await self._threads.call(self._execute, dict(inputs), may_leave=True, discard=dict.clear)

    def _closed(self) -> CustomNodeFailure:
        return CustomNodeFailure(f"{self.identity} is closed")

    def _execute(self, inputs: dict[str, Array]) -> dict[str, Array]:
        node = self._node
        holder = node.enter()
        if holder is None:
            raise self._closed()
        try:
            call = CallInputs({name: private(array) for name, array in inputs.items()})
            inputs.clear()
            address, count = c_void_p(), c_int()
            status = node.library.execute(
                call.array, call.count, byref(address), byref(count), node.params, len(node.params), node.manager
            )
            return OutputTaker(node, call).take(status, address.value, count.value)
        finally:
            node.leave(holder)

    async def aclose(self) -> None:
        """Deinitialise the node, once nothing of it is in use; may be called twice.

        Calls that go on without a caller, and arrays that are in use, are waited for for ``GRACE_SECONDS``; after that
        the last of them deinitialises the node, in its thread.  Failures are logged.

        Cancellation: shielded, for it is bounded; ``deinitialize`` itself gets as long as the waiting.
        """
        # All threads of the pool may be busy with calls that never end.
        limiter = trio.CapacityLimiter(1)
        close = partial(self._node.close, GRACE_SECONDS)
        with trio.move_on_after(2 * GRACE_SECONDS, shield=True) as patience:
            await trio.to_thread.run_sync(close, abandon_on_cancel=True, limiter=limiter)
        if patience.cancelled_caught:
            log.warning("deinitialize of a custom node does not end; its thread was given up", node=str(self.identity))
        self._threads.close()


async def open_native_node(
    path: Path, name: str, params: Mapping[str, str], *, tasks: trio.Nursery, calls_at_once: int = CALLS_AT_ONCE
) -> NativeNode:
    """Load a library, if no other node has, and initialise a node of it; the caller must close the node.

    ``tasks`` hosts the node's threads, and must outlive the node; ``calls_at_once`` may be under way, others wait.

    Raises:
        ConfigError: the library cannot be loaded, or the node cannot be initialised or described; what had been made
            is released, and a node that was initialised is deinitialised.

    Ownership: the returned node.

    Cancellation: at once; the thread goes on, and it deinitialises what it has initialised.
    """
    identity = NodeIdentity(name, path)
    threads = node_threads(identity.name, str(identity), calls_at_once)
    try:
        await tasks.start(threads.run)
        opened = await threads.call(_open, identity, dict(params), may_leave=True, discard=_close_at_once)
    except BaseException:
        threads.close()
        raise
    return NativeNode(*opened, threads)


_Opened = tuple[InitializedNode, Mapping[str, ItemInfo], Mapping[str, ItemInfo]]


def _open(identity: NodeIdentity, params: dict[str, str]) -> _Opened:
    library = load_library(identity)
    node = InitializedNode(library, identity, as_node_params(params))
    try:
        inputs = ask_items(node, library.get_inputs_info, "getInputsInfo")
        return node, inputs, ask_items(node, library.get_outputs_info, "getOutputsInfo")
    except BaseException:
        node.close(0)
        raise


def _close_at_once(opened: _Opened) -> None:
    opened[0].close(0)
