"""Metric hooks of models, graphs and batchers; the base classes do nothing.

Hooks are called on the event loop and must not block.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final


class NodeHooks:
    """Observer of one node of a service."""

    def ran(self, seconds: float) -> None:
        """Count a successful run."""

    def failed(self) -> None:
        """Count a failed run."""


NULL_NODE_HOOKS: Final = NodeHooks()


class BatchHooks:
    """Observer of one batcher."""

    def batch_size(self, size: int) -> None:
        """Record the size of a starting batch."""

    def queue_time(self, seconds: float) -> None:
        """Record the time that one item waited for its batch."""


NULL_BATCH_HOOKS: Final = BatchHooks()


class ServableHooks(BatchHooks):
    """Observer of one loaded model version."""

    def inferred(self, waited: float, seconds: float) -> None:
        """Record the run time of one inference, and its wait for an infer request (0 if inline)."""

    def set_streams(self, count: int) -> None:
        """Set the number of execution streams."""

    def set_pool(self, size: int, active: int) -> None:
        """Set the size of the infer-request pool and the requests in use."""

    def set_execution_mode(self, *, inline: bool, changed: bool) -> None:
        """Record the execution mode; ``changed`` also counts a switch."""

    def set_cpu_pinning(self, *, to_cores: bool, changed: bool) -> None:
        """Record the CPU pinning; ``changed`` also counts a switch."""

    def record_padding(self, fit: str, request_elements: int, padding_elements: int) -> None:
        """Count a bucketed inference: ``exact``, ``padded`` or ``larger``, with input and padding elements."""

    def set_load_seconds(self, seconds: float) -> None:
        """Set the load time."""

    def set_memory(self, part: str, size: int) -> None:
        """Set the memory in bytes of ``weights`` or ``outputs``."""


NULL_HOOKS: Final = ServableHooks()


class GraphHooks:
    """Metric hooks of one graph."""

    def started(self) -> None:
        """Count a started instance, for one call or one stream."""

    def finished(self, method: str, seconds: float, *, ok: bool) -> None:
        """Count a finished instance; ``ok`` is False if it failed or was cancelled."""

    def node(self, node: str) -> NodeHooks:
        """Return the hooks of a node."""
        del node
        return NULL_NODE_HOOKS


NULL_GRAPH_HOOKS: Final = GraphHooks()


Collectors = Sequence[Any]
"""``prometheus_client`` collectors."""


class Meters:
    """Factory of hooks by service name; the base class returns hooks that do nothing."""

    def servable(self, name: str, version: str) -> ServableHooks:
        """Return the hooks of a model version."""
        del name, version
        return NULL_HOOKS

    def set_memory(self, name: str, version: str, part: str, size: int) -> None:
        """Set the memory in bytes of one part of a version's last load."""
        del name, version, part, size

    def graph(self, name: str) -> GraphHooks:
        """Return the hooks of a graph."""
        del name
        return NULL_GRAPH_HOOKS

    def node(self, name: str, node: str) -> NodeHooks:
        """Return the hooks of a graph or pipeline node, or of an Op."""
        del name, node
        return NULL_NODE_HOOKS

    def batches(self, name: str, version: str) -> BatchHooks:
        """Return the hooks of a batcher."""
        del name, version
        return NULL_BATCH_HOOKS

    def unreachable(self, name: str) -> None:
        """Count a call to a remote model that no server answered."""
        del name

    def collecting(self, collectors: Collectors, name: str) -> AbstractContextManager[None]:
        """Expose user collectors within the block, labelled with the service name unless that is empty."""
        del collectors, name
        return nullcontext()


NULL_METERS: Final = Meters()
