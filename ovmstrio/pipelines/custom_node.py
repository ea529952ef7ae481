"""The port between pipelines and the custom nodes in them, whatever these are written in.

A library is opened once for every node that uses it; what is opened is closed when the last pipeline that holds it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

import structlog

from ovmstrio.core.errors import Overloaded
from ovmstrio.core.tensor import Array
from ovmstrio.isolation.thread_pool import WorkerThreads

if TYPE_CHECKING:
    from ovmstrio.core.tensor import Datatype

__all__ = ["CALLS_AT_ONCE", "CustomNode", "ItemInfo", "node_threads", "read_only"]

# ----------------------------------------------------------------------
# The port between pipelines and the custom nodes in them, whatever these are written in
# ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ItemInfo:
    """What a custom node says of one input or output.

    ``datatype`` is None where it says nothing that is known; a size of ``shape`` is -1 where any will do.
    """

    name: str
    datatype: Datatype | None
    shape: tuple[int, ...]


class CustomNode(Protocol):
    """One custom node of one pipeline, initialised with the node's own parameters."""

    @property
    def inputs(self) -> Mapping[str, ItemInfo]:
        """What the node takes, by name; constant."""
        ...

    @property
    def outputs(self) -> Mapping[str, ItemInfo]:
        """What the node gives, by name; constant."""
        ...

    async def execute(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Run the node once; may be called many times at once.

        Inputs are C-contiguous and shared with other nodes: the node is never let write into them.  Outputs are what
        the node gave, by name, of a dtype of ``ovmstrio.core.tensor``; their memory belongs to the arrays, and is
        given back when the last of them is gone.

        Raises:
            CustomNodeFailure: the node failed, or what it gave cannot be used.

        Cancellation: at once; a call that cannot be stopped is left to end by itself, and what it gives is released.
        """
        ...

    async def aclose(self) -> None:
        """Deinitialise the node, once no call is under way; failures are logged."""
        ...


def read_only(arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Give views of arrays that cannot be written through."""
    views = {name: array.view() for name, array in arrays.items()}
    for view in views.values():
        view.flags.writeable = False
    return views


# ----------------------------------------------------------------------
# Threads for the calls of one node, which cannot be stopped and are left to end by themselves
# ----------------------------------------------------------------------

log = structlog.get_logger(__name__)

CALLS_AT_ONCE: Final = 64
"""How many calls of one node may be in threads; others wait."""


def node_threads(name: str, described: str, calls_at_once: int = CALLS_AT_ONCE) -> WorkerThreads:
    """Give a pool that refuses calls when all its threads are busy with calls whose callers have left.

    Args:
        name: the node's.
        described: the same for messages.
        calls_at_once: how many threads there may be.
    """

    def refusal(abandoned: int) -> Overloaded | None:
        if abandoned < calls_at_once:
            return None
        return Overloaded(f"all {abandoned} threads of {described} are busy with calls whose callers have left")

    def told_of_leaving(abandoned: int) -> None:
        log.info("custom node goes on although its caller has left", node=described, abandoned=abandoned)

    return WorkerThreads(
        calls_at_once, 0, is_strict=True, refusal=refusal, told_of_leaving=told_of_leaving, names={"node": name}
    )
