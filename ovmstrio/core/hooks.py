"""What models and graphs tell of each run, for whoever counts; these classes themselves count nothing."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

__all__ = [
    "NULL_BATCH_HOOKS",
    "NULL_GRAPH_HOOKS",
    "NULL_HOOKS",
    "NULL_METERS",
    "NULL_NODE_HOOKS",
    "BatchHooks",
    "Collectors",
    "GraphHooks",
    "Meters",
    "NodeHooks",
    "ServableHooks",
]


class NodeHooks:
    """Observes one node of a service.  Every method is called on the event loop and must not wait."""

    def ran(self, seconds: float) -> None:
        """A run of the node that succeeded took this long."""

    def failed(self) -> None:
        """A run of the node failed."""


NULL_NODE_HOOKS: Final = NodeHooks()


class BatchHooks:
    """Observes one batcher.  Every method is called on the event loop and must not wait."""

    def batch_size(self, size: int) -> None:
        """A batch of this size begins to run."""

    def queue_time(self, seconds: float) -> None:
        """One item waited this long before its batch began to run."""


NULL_BATCH_HOOKS: Final = BatchHooks()


class ServableHooks(BatchHooks):
    """Observes one loaded model version.  Every method is called on the event loop and must not wait."""

    def inferred(self, waited: float, seconds: float) -> None:
        """One inference took so many seconds in the runtime.

        Before, its request ``waited`` for a free infer request so long (0 where it ran on the event loop).
        """

    def set_streams(self, count: int) -> None:
        """The compiled model has this many streams."""

    def set_pool(self, size: int, active: int) -> None:
        """The pool has ``size`` infer requests, ``active`` of which are in use."""

    def placed(self, *, inline: bool, moved: bool) -> None:
        """Inferences such as the last one run on the event loop, or do not; ``moved`` tells that this is new."""

    def bound(self, *, to_cores: bool, again: bool) -> None:
        """Threads of the model are bound to cores, or are not; ``again`` tells that this was chosen anew."""

    def bucketed(self, fit: str, given: int, added: int) -> None:
        """One inference fitted its buckets so (``exact``, ``padded``, ``larger``), its inputs by so many elements."""

    def set_load_seconds(self, seconds: float) -> None:
        """The version took this long to load."""

    def set_memory(self, part: str, size: int) -> None:
        """So many bytes of the loaded version are of this part: ``weights`` or ``outputs``."""


NULL_HOOKS: Final = ServableHooks()


class GraphHooks:
    """Observes one graph.  Every method is called on the event loop and must not wait."""

    def started(self) -> None:
        """An instance has begun to run, for one call or one stream."""

    def finished(self, method: str, seconds: float, *, ok: bool) -> None:
        """An instance that had begun has ended after this time; ``ok`` is False if it failed or was cancelled."""

    def node(self, node: str) -> NodeHooks:
        """Give what is told of the runs of a node."""
        del node
        return NULL_NODE_HOOKS


NULL_GRAPH_HOOKS: Final = GraphHooks()


Collectors = Sequence[Any]
"""What gives families of metrics when somebody scrapes, as ``prometheus_client`` has them."""


class Meters:
    """Makes the hooks of services, by the names that these are served under; these count nothing."""

    def servable(self, name: str, version: str) -> ServableHooks:
        """Give the hooks of one version of a model."""
        del name, version
        return NULL_HOOKS

    def set_memory(self, name: str, version: str, part: str, size: int) -> None:
        """The last load of one version of a service took so many bytes for this part."""
        del name, version, part, size

    def graph(self, name: str) -> GraphHooks:
        """Give the hooks of a graph."""
        del name
        return NULL_GRAPH_HOOKS

    def node(self, name: str, node: str) -> NodeHooks:
        """Give what is told of runs of a node of a graph or pipeline, or of an Op."""
        del name, node
        return NULL_NODE_HOOKS

    def batches(self, name: str, version: str) -> BatchHooks:
        """Give the hooks of one batcher."""
        del name, version
        return NULL_BATCH_HOOKS

    def collecting(self, collectors: Collectors, name: str) -> AbstractContextManager[None]:
        """Show what collectors of a service give, while the block lasts; with its name unless that is empty."""
        del collectors, name
        return nullcontext()


NULL_METERS: Final = Meters()
