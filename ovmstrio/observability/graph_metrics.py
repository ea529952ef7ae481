"""The metrics of one graph, which has no versions."""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import TYPE_CHECKING, Any, Final, Protocol

from ovmstrio.core.errors import FailedPrecondition, InvalidRequest, ServerError
from ovmstrio.core.events import CANCELLED, OK, QUESTIONS, Step
from ovmstrio.core.hooks import GraphHooks

if TYPE_CHECKING:
    from ovmstrio.core.events import CallEvent
    from ovmstrio.core.hooks import NodeHooks

__all__ = ["GraphMetrics"]

_STREAM: Final = "ModelInferStream"
_RUN: Final = ("ModelInfer", _STREAM)
_INFER: Final = (*((method, "KServe") for method in _RUN), ("Predict", "TensorFlowServing"))
_ASK: Final = (
    ("ModelMetadata", "KServe"),
    ("ModelReady", "KServe"),
    ("GetModelMetadata", "TensorFlowServing"),
    ("GetModelStatus", "TensorFlowServing"),
)
_INTERFACES: Final = ("gRPC", "REST")
_FAMILIES: Final = ("ovms_requests_accepted", "ovms_requests_rejected", "ovms_responses", "ovms_graph_error")
_MICROSECONDS: Final = 1e6
_FAMILY_OF: Final = {
    Step.ACCEPTED: "ovms_requests_accepted",
    Step.REJECTED: "ovms_requests_rejected",
    Step.ANSWERED: "ovms_responses",
}


class _Children(Protocol):
    """Gives bound children of metric families."""

    def child(self, family: str, *labels: str) -> Any:
        """Give one, or one that counts nothing where the family is off."""
        ...

    def node(self, name: str, node: str) -> NodeHooks:
        """Give what records the runs of a node."""
        ...


class GraphMetrics(GraphHooks):
    """The bound metrics of one graph: hooks for its instances, and counters of its calls.

    ``method`` is that of a call or stream; a graph itself runs for ``ModelInfer`` or ``ModelInferStream`` only.
    """

    def __init__(self, metrics: _Children, name: str) -> None:
        self._name = name
        self._child = metrics.child
        self._node_of = metrics.node
        self._current = metrics.child("ovms_current_graphs", name)
        self._seconds = {method: metrics.child("ovms_graph_processing_time_us", name, method) for method in _RUN}
        self._counter = cache(lambda family, *labels: metrics.child(family, name, *labels))
        self._outcome = cache(self._bind_outcome)
        for family, (method, api), interface in product(_FAMILIES, _INFER, _INTERFACES):
            self._counter(family, api, method, interface)
        for (method, api), interface in product((*_INFER, *_ASK), _INTERFACES):
            for code in (OK, "InvalidRequest"):
                self._outcome(method, api, interface, code)

    # Instances

    def started(self) -> None:
        """Count an instance that has begun to run."""
        self._current.inc()

    def finished(self, method: str, seconds: float, *, ok: bool) -> None:
        """Count out an instance that had begun; the time of those that failed is not recorded, as in OVMS."""
        self._current.dec()
        if ok:
            self._seconds[method].observe(seconds * _MICROSECONDS)

    def node(self, node: str) -> NodeHooks:
        """Record the runs of a node."""
        return self._node_of(self._name, node)

    # Calls

    def moved(self, event: CallEvent, step: Step) -> None:
        """Count a request that the graph took in or refused, or an answer: of a stream, each one."""
        self._count(_FAMILY_OF[step], event)

    def ended(self, event: CallEvent) -> None:
        """Count a call by its outcome; inference moves none of the families of models."""
        for counter in self._outcome(event.method, event.door.api, event.door.interface, event.code):
            counter.inc()
        if event.method == _STREAM:
            if isinstance(event.error, ServerError):
                self._count("ovms_graph_error", event)
        elif event.method not in QUESTIONS:
            self._count_call(event)

    def _count_call(self, event: CallEvent) -> None:
        """Count a call that was answered, was refused or has failed; one that was cancelled is none of its errors."""
        is_refused = isinstance(event.error, InvalidRequest | FailedPrecondition)
        self._count("ovms_requests_rejected" if is_refused else "ovms_requests_accepted", event)
        if event.code == OK:
            self._count("ovms_responses", event)
        elif event.is_read and event.code != CANCELLED:
            self._count("ovms_graph_error", event)

    def _count(self, family: str, event: CallEvent) -> None:
        self._counter(family, event.door.api, event.method, event.door.interface).inc()

    def _bind_outcome(self, method: str, api: str, interface: str, code: str) -> tuple[Any, ...]:
        labels = (self._name, "", api, method, interface)
        requests = self._child("ovmstrio_requests", *labels, code)
        if method not in QUESTIONS:
            return (requests,)
        return requests, self._child("ovms_requests_success" if code == OK else "ovms_requests_fail", *labels)
