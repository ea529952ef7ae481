"""The metrics of one graph, which has no versions."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any, Final, Protocol

from ovmstrio.core.events import API_OF, OK

if TYPE_CHECKING:
    from ovmstrio.core.events import Interface, Method, RequestEvent

__all__ = ["GraphMetrics"]

_RUN: Final[tuple[Method, ...]] = ("ModelInfer", "ModelInferStream")
_INFER: Final[tuple[Method, ...]] = (*_RUN, "Predict")
_ASK: Final[tuple[Method, ...]] = ("ModelMetadata", "ModelReady", "GetModelMetadata", "GetModelStatus")
_INTERFACES: Final = ("gRPC", "REST")
_FAMILIES: Final = ("ovms_requests_accepted", "ovms_requests_rejected", "ovms_responses", "ovms_graph_error")
_MICROSECONDS: Final = 1e6


class _Children(Protocol):
    """Gives bound children of metric families."""

    def child(self, family: str, *labels: str) -> Any:
        """Give one, or one that counts nothing where the family is off."""
        ...


class GraphMetrics:
    """The bound metrics of one graph: hooks for its instances, and counters for whoever hands it requests.

    ``method`` is that of a call or stream; a graph itself runs for ``ModelInfer`` or ``ModelInferStream`` only.
    """

    def __init__(self, metrics: _Children, name: str) -> None:
        self._metrics = metrics
        self._name = name
        self._current = metrics.child("ovms_current_graphs", name)
        self._seconds = {method: metrics.child("ovms_graph_processing_time_us", name, method) for method in _RUN}
        keys = list(product(_INFER, _INTERFACES))
        self._counters = {
            family: {key: metrics.child(family, name, API_OF[key[0]], *key) for key in keys} for family in _FAMILIES
        }
        self._outcomes: dict[tuple[Method, str, str], tuple[Any, ...]] = {}
        for method, interface in product((*_INFER, *_ASK), _INTERFACES):
            for code in (OK, "InvalidRequest"):
                self._outcome(method, interface, code)

    # Instances

    def started(self) -> None:
        """Count an instance that has begun to run."""
        self._current.inc()

    def finished(self, method: Method, seconds: float, *, ok: bool) -> None:
        """Count out an instance that had begun; the time of those that failed is not recorded, as in OVMS."""
        self._current.dec()
        if ok:
            self._seconds[method].observe(seconds * _MICROSECONDS)

    # Requests

    def accepted(self, method: Method, interface: Interface) -> None:
        """Count a request that the graph took in: of a stream, each one."""
        self._counters["ovms_requests_accepted"][method, interface].inc()

    def rejected(self, method: Method, interface: Interface) -> None:
        """Count a request that the graph refused: of a stream, each one."""
        self._counters["ovms_requests_rejected"][method, interface].inc()

    def responses(self, method: Method, interface: Interface) -> None:
        """Count an answer: of a stream, each one."""
        self._counters["ovms_responses"][method, interface].inc()

    def error(self, method: Method, interface: Interface) -> None:
        """Count a run that ended in an error."""
        self._counters["ovms_graph_error"][method, interface].inc()

    def count(self, event: RequestEvent, code: str) -> None:
        """Count one finished request by its outcome; inference moves none of the families of models."""
        for counter in self._outcome(event.method, event.interface, code):
            counter.inc()

    def _outcome(self, method: Method, interface: str, code: str) -> tuple[Any, ...]:
        key = (method, interface, code)
        found = self._outcomes.get(key)
        if found is None:
            labels = (self._name, "", API_OF[method], method, interface)
            child = self._metrics.child
            found = (child("ovmstrio_requests", *labels, code),)
            if method in _ASK:
                family = "ovms_requests_success" if code == OK else "ovms_requests_fail"
                found = (*found, child(family, *labels))
            self._outcomes[key] = found
        return found
