"""Interface between pipelines and custom nodes of any kind.

Each pipeline node opens its library separately; it is closed with the last pipeline that holds it.
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


@dataclass(frozen=True, slots=True)
class ItemInfo:
    """Description of an input or output; ``datatype`` is None if unknown, -1 in ``shape`` means any size."""

    name: str
    datatype: Datatype | None
    shape: tuple[int, ...]


class CustomNode(Protocol):
    """A custom node of one pipeline, initialized with the node's parameters."""

    @property
    def inputs(self) -> Mapping[str, ItemInfo]:
        """The inputs by name; constant."""
        ...

    @property
    def outputs(self) -> Mapping[str, ItemInfo]:
        """The outputs by name; constant."""
        ...

    async def execute(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Run the node once; calls may overlap.

        Inputs are C-contiguous and shared with other nodes; the node cannot write to them. Outputs are the node's
        results by name, with a dtype of ``ovmstrio.core.tensor``; the arrays own their memory.

        Cancellation returns at once; a call that cannot be stopped continues, and its results are released.

        Raises:
            CustomNodeFailure: the node failed, or its results are invalid.
        """
        ...

    async def aclose(self) -> None:
        """Deinitialize the node once no call is in progress; log failures."""
        ...


def read_only_views(arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Return read-only views of arrays."""
    views = {name: array.view() for name, array in arrays.items()}
    for view in views.values():
        view.flags.writeable = False
    return views


# Threads

log = structlog.get_logger(__name__)

MAX_CONCURRENT_CALLS: Final = 64
"""Limit of concurrent calls in threads per node; further calls wait."""


def create_node_threads(name: str, described: str, calls_at_once: int = MAX_CONCURRENT_CALLS) -> WorkerThreads:
    """Create a thread pool that rejects calls when all threads are busy with abandoned calls.

    Args:
        name: the node's name.
        described: the node's description for messages.
        calls_at_once: the number of threads.
    """

    def refusal(abandoned: int) -> Overloaded | None:
        if abandoned < calls_at_once:
            return None
        return Overloaded(f"all {abandoned} threads of {described} are busy with abandoned calls")

    def on_abandoned(abandoned: int) -> None:
        log.info("custom node call abandoned", node=described, abandoned=abandoned)

    return WorkerThreads(
        calls_at_once, 0, is_strict=True, refusal=refusal, on_abandoned=on_abandoned, log_fields={"node": name}
    )
