"""What every front end calls: the same look-up, observation and errors for each protocol.

::

    front end ──> DataPlane.infer ───────> Registry.lease ──> Servable.infer
              └─> DataPlane.open_stream ─> Registry.lease ──> StreamingServable.open_stream
                      │ tells observers of the start and the end, and graphs' counters of every request
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.metadata import version as installed_version
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import trio

from ovmstrio.core.errors import FailedPrecondition, InvalidRequest, NotFound, NotSupported, ServerError, VersionRetired
from ovmstrio.core.events import CANCELLED, INFER, METADATA, OK, Api, Interface, Method, RequestEvent
from ovmstrio.core.servable import SequenceServable, StreamingServable
from ovmstrio.dataplane.open_stream import OpenStream
from ovmstrio.registry import MODEL_MISSING, NOTHING_MISSING, Readiness

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

    from ovmstrio.core.events import RequestObserver
    from ovmstrio.core.request import InferRequest, InferResponse
    from ovmstrio.core.servable import SequenceInfo, Servable
    from ovmstrio.core.tensor import TensorSpec
    from ovmstrio.observability.graph_metrics import GraphMetrics
    from ovmstrio.observability.metrics import Metrics
    from ovmstrio.registry import Registry, VersionStatus
    from ovmstrio.registry.leases import Lease

__all__ = ["DataPlane", "Description", "ModelMetadata", "ServerMetadata"]

STARTING: Final = "the listeners are not bound yet"
DRAINING: Final = "the server is shutting down"
SERVER_NAME: Final = "OpenVINO Model Server"
"""The name that clients of OVMS see and some of them check."""
EXTENSIONS: Final = ("binary_tensor_data", "generate")
UNKNOWN_NAME: Final[Mapping[tuple[Api, Interface], str]] = {
    ("KServe", "gRPC"): NOTHING_MISSING,
    ("KServe", "REST"): NOTHING_MISSING,
    ("TensorFlowServing", "gRPC"): "Pipeline with requested name is not found",
    ("TensorFlowServing", "REST"): MODEL_MISSING,
}
"""What an inference of an unknown name is told: each way looks for other kinds of servables last."""


@dataclass(frozen=True, slots=True)
class ServerMetadata:
    """What the server tells of itself; ``extensions`` are those of KServe v2 that it has."""

    name: str
    version: str
    extensions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ModelMetadata:
    """What the server tells of one servable.

    ``versions`` are all that can be called, ascending; ``serving`` is the one that was asked about.
    """

    name: str
    versions: list[str]
    serving: str
    platform: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    extra: dict[str, Any]


class Description(NamedTuple):
    """What a caller must know to call a servable with as little as names and values."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    has_streams: bool


class DataPlane:
    """The operations of one server, free of any protocol.

    Args:
        registry: what is served.
        reload: brings the registry in line with the configuration and says whether anything changed; None where
            there is nothing to reload from.
        observers: are told of every request to a servable that exists.
        metrics: rendered for scrapers; None when metrics are off.
        obstacle: tells why what is served cannot answer although it is loaded, or an empty text.
    """

    def __init__(
        self,
        registry: Registry,
        *,
        reload: Callable[[], Awaitable[bool]] | None = None,
        observers: Sequence[RequestObserver] = (),
        metrics: Metrics | None = None,
        obstacle: Callable[[], str] | None = None,
    ) -> None:
        self.registry = registry
        self._obstacle = obstacle
        self._reload = reload
        self._observers = (*observers, metrics) if metrics is not None else tuple(observers)
        self._metrics = metrics
        self._not_serving = STARTING
        self._changed = trio.Event()
        registry.subscribe(lambda _: self._announce())
        registry.subscribe_readiness(lambda _: self._announce())

    # Life cycle

    def is_live(self) -> bool:
        """Tell that the process answers; true as soon as it can be asked."""
        return True

    def readiness(self) -> Readiness:
        """Tell whether requests will be served, and if not, why."""
        if self._not_serving:
            return Readiness(ready=False, reason=self._not_serving)
        reason = "" if self._obstacle is None else self._obstacle()
        return Readiness(ready=False, reason=reason) if reason else self.registry.readiness

    @property
    def is_draining(self) -> bool:
        """Whether the server has begun to end."""
        return self._not_serving == DRAINING

    def begin_serving(self) -> None:
        """Say that the listeners are bound."""
        self._not_serving = ""
        self._announce()

    def begin_drain(self) -> None:
        """Say that the server will end; it is not ready from now on."""
        self._not_serving = DRAINING
        self._announce()

    async def wait_change(self) -> None:
        """Return at the next change of the readiness of the server or of anything that it serves.

        Cancellation: at once; nothing is held.
        """
        await self._changed.wait()

    def _announce(self) -> None:
        self._changed.set()
        self._changed = trio.Event()
        if self._metrics is not None:
            self._metrics.child("ovmstrio_ready").set(self.readiness().ready)

    # What is served

    def server_metadata(self) -> ServerMetadata:
        """Tell name, version and extensions."""
        return ServerMetadata(SERVER_NAME, installed_version("ovmstrio"), EXTENSIONS)

    def statuses(self) -> dict[str, list[VersionStatus]]:
        """Tell the state of every version ever seen, by servable."""
        return self.registry.statuses()

    def model_ready(self, name: str, version: str, interface: Interface) -> bool:
        """Tell whether a version, or the default one, can be called.

        Raises:
            NotFound: the name or version is unknown.
            InvalidRequest: the version is not a number.
        """
        ready = self.registry.is_ready(name, version)
        versions = self.registry.available_versions(name)
        if versions:
            self._observe("ModelReady", name, str(versions[-1]), interface)
        return ready

    def model_status(self, name: str, version: int, interface: Interface) -> list[VersionStatus]:
        """Tell the state of one version, or with 0 of all ever seen: TensorFlow Serving's ``GetModelStatus``.

        Raises:
            NotFound: the name or version is unknown.
        """
        statuses = self.registry.version_statuses(name, version)
        versions = self.registry.available_versions(name)
        if versions:
            self._observe("GetModelStatus", name, str(versions[-1]), interface)
        return statuses

    def model_metadata(self, name: str, version: str, interface: Interface, api: Api = "KServe") -> ModelMetadata:
        """Tell the inputs and outputs of a version, or the default one.

        Raises:
            NotFound: the name or version is unknown or retired.
            VersionLoading: it is not loaded yet.
            InvalidRequest: the version is not a number.
        """
        servable = self.registry.peek(name, version)
        known = servable.metadata
        versions = self.registry.available_versions(name)
        asked = int(version or 0)
        serving = str(asked if asked in versions else versions[-1])
        self._observe(METADATA[api], name, serving, interface)
        return ModelMetadata(
            name, [str(v) for v in versions], serving, known.platform, known.inputs, known.outputs, dict(known.extra)
        )

    def sequences(self, name: str, version: str) -> list[SequenceInfo]:
        """List the live sequences of a version of a stateful model, or of the default one, by id.

        Raises:
            NotFound: the name or version is unknown or retired.
            VersionLoading: it is not loaded yet.
            InvalidRequest: the version is not a number.
            NotSupported: the model has no sequences.
        """
        servable = self.registry.peek(name, version)
        if not isinstance(servable, SequenceServable):
            raise NotSupported(f"{name!r} has no sequences: it is not a stateful model")
        return servable.sequences()

    # Inference

    async def infer(self, request: InferRequest, interface: Interface, api: Api = "KServe") -> InferResponse:
        """Answer one call.

        Raises:
            ServerError: any of its kinds; what the look-up or the servable raised, unchanged.

        Ownership: the request's buffers must stay unchanged until this returns.
        Cancellation: at any checkpoint; the servable gives back what the call held.
        """
        name, method = request.model_name, INFER[api]
        with await self.registry.lease(name, request.model_version, missing=UNKNOWN_NAME[api, interface]) as lease:
            event = RequestEvent(name, lease.version, method, interface, request.id)
            graph = self._graph(name, lease.servable)
            self._started(event)
            try:
                response = await lease.servable.infer(request)
            except BaseException as error:
                if graph is not None:
                    _count_failed_call(graph, method, interface, error)
                self._failed(event, error)
                raise
            if graph is not None:
                graph.accepted(method, interface)
                graph.responses(method, interface)
            self._finished(event, OK, None)
            return response

    async def describe(
        self, name: str, version: str = "", interface: Interface = "REST", api: Api = "KServe"
    ) -> Description:
        """Tell what a version, or the default one, is called with; one that is being loaded is waited for.

        Unlike :meth:`model_metadata` this is a part of another call and not observed.

        Raises:
            NotFound: the name or version is unknown or retired.
            VersionLoading: it was not loaded in time.
            InvalidRequest: the version is not a number.

        Cancellation: while it is waited for; nothing is held.
        """
        with await self.registry.lease(name, version, missing=UNKNOWN_NAME[api, interface]) as lease:
            servable = lease.servable
            known = servable.metadata
            return Description(known.inputs, known.outputs, isinstance(servable, StreamingServable))

    @asynccontextmanager
    async def open_stream(self, first: InferRequest, interface: Interface) -> AsyncIterator[OpenStream]:
        """Open a stream with its first request, whose version does not matter: what can be streamed to has only one.

        The block must not be left before the replies have ended, unless by an error or cancellation.

        Raises:
            NotFound: on entering, when nothing of that name can be streamed to.
            ServerError: on entering, what the look-up raised, or why the stream could not begin; on leaving, why it
                failed.

        Ownership: everything that runs for the stream, and the lease, until the block is left.
        Cancellation: at any checkpoint; everything that runs for the stream is stopped before this returns.
        """
        with await self._lease_stream(first.model_name) as lease:
            servable = lease.servable
            if not isinstance(servable, StreamingServable):
                raise NotFound(NOTHING_MISSING)
            event = RequestEvent(first.model_name, lease.version, "ModelInferStream", interface, first.id)
            graph = self._graph(first.model_name, servable)
            self._started(event)
            opened = None
            try:
                async with servable.open_stream(first) as stream:
                    opened = OpenStream(stream, graph, interface)
                    yield opened
            except BaseException as error:
                _count_failed_stream(graph, interface, error, began=opened is not None)
                self._failed(event, error)
                raise
            finally:
                if opened is not None:
                    opened.settle()
            self._finished(event, OK, None)

    async def _lease_stream(self, name: str) -> Lease:
        try:
            return await self.registry.lease(name)
        except VersionRetired:
            raise
        except NotFound:
            raise NotFound(NOTHING_MISSING) from None

    def count_unparsed(
        self, name: str, version: str, error: ServerError, interface: Interface, api: Api = "KServe"
    ) -> None:
        """Count a call whose body could not be read, if its servable exists (OVMS counts it as a failed infer)."""
        try:
            servable = self.registry.peek(name, version)
        except ServerError:
            return
        graph = self._graph(name, servable)
        if graph is not None:
            graph.rejected(INFER[api], interface)
        serving = version if version.strip("0") else str(self.registry.available_versions(name)[-1])
        event = RequestEvent(name, serving, INFER[api], interface)
        self._started(event)
        self._finished(event, type(error).__name__, error)

    # Administration

    async def reload_config(self) -> bool:
        """Bring what is served in line with the configuration; True if anything changed.

        Raises:
            ServerError: the configuration cannot be used; what was served goes on.
            NotSupported: the server was started without anything to reload.

        Cancellation: at once; the registry goes on with a change that it has begun.
        """
        if self._reload is None:
            raise NotSupported("this server has no configuration to reload")
        return await self._reload()

    def render_metrics(self) -> bytes | None:
        """Print the metrics in Prometheus's text format, None when they are off."""
        return None if self._metrics is None else self._metrics.render()

    def _observe(self, method: Method, name: str, version: str, interface: Interface) -> None:
        self._finished(RequestEvent(name, version, method, interface), OK, None)

    def _graph(self, name: str, servable: Servable) -> GraphMetrics | None:
        """Give the counters of a graph; models have none."""
        # Cheaper than asking for the protocol, and asked at every call of every model.
        if self._metrics is None or not hasattr(servable, "open_stream"):
            return None
        return self._metrics.graph(name)

    def _failed(self, event: RequestEvent, error: BaseException) -> None:
        code = CANCELLED if _is_cancellation(error) else type(error).__name__
        self._finished(event, code, error)

    def _started(self, event: RequestEvent) -> None:
        for observer in self._observers:
            observer.request_started(event)

    def _finished(self, event: RequestEvent, code: str, error: BaseException | None) -> None:
        for observer in self._observers:
            observer.request_finished(event, code, error)


def _is_cancellation(error: BaseException) -> bool:
    """Tell whether an error is a cancellation, be it of several tasks."""
    if isinstance(error, BaseExceptionGroup):
        return error.split(trio.Cancelled)[1] is None
    return isinstance(error, trio.Cancelled)


def _count_failed_call(graph: GraphMetrics, method: Method, interface: Interface, error: BaseException) -> None:
    """Count a call of a graph that was refused or has failed; one that was cancelled is none of its errors."""
    if isinstance(error, InvalidRequest | FailedPrecondition):
        graph.rejected(method, interface)
    else:
        graph.accepted(method, interface)
    if not _is_cancellation(error):
        graph.error(method, interface)


def _count_failed_stream(
    graph: GraphMetrics | None, interface: Interface, error: BaseException, *, began: bool
) -> None:
    if graph is None:
        return
    if not began:
        graph.rejected("ModelInferStream", interface)
    if isinstance(error, ServerError):
        graph.error("ModelInferStream", interface)
