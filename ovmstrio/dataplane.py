"""What every front end calls: the same look-up, observation and errors for each protocol.

::

    front end ──> DataPlane.infer ──> Registry.lease ──> Servable.infer
                      │ tells observers of the start and the end
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version as installed_version
from typing import TYPE_CHECKING, Any, Final

import trio

from ovmstrio.errors import NotSupported, ServerError
from ovmstrio.observability.events import CANCELLED, OK, Interface, Method, RequestEvent
from ovmstrio.registry import Readiness

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from ovmstrio.observability.events import RequestObserver
    from ovmstrio.observability.metrics import Metrics
    from ovmstrio.registry import Registry, VersionStatus
    from ovmstrio.request import InferRequest, InferResponse
    from ovmstrio.tensor import TensorSpec

__all__ = ["DataPlane", "ModelMetadata", "ServerMetadata"]

STARTING: Final = "the listeners are not bound yet"
DRAINING: Final = "the server is shutting down"
SERVER_NAME: Final = "OpenVINO Model Server"
"""The name that clients of OVMS see and some of them check."""


@dataclass(frozen=True, slots=True)
class ServerMetadata:
    """What the server tells of itself; ``extensions`` are those of KServe v2 that it has."""

    name: str
    version: str
    extensions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ModelMetadata:
    """What the server tells of one servable; ``versions`` are all that can be called, ascending."""

    name: str
    versions: list[str]
    platform: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    extra: dict[str, Any]


class DataPlane:
    """The operations of one server, free of any protocol.

    Args:
        registry: what is served.
        reload: brings the registry in line with the configuration and says whether anything changed; None where
            there is nothing to reload from.
        observers: are told of every request to a servable that exists.
        metrics: rendered for scrapers; None when metrics are off.
    """

    def __init__(
        self,
        registry: Registry,
        *,
        reload: Callable[[], Awaitable[bool]] | None = None,
        observers: Sequence[RequestObserver] = (),
        metrics: Metrics | None = None,
    ) -> None:
        self.registry = registry
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
        return self.registry.readiness

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
        return ServerMetadata(SERVER_NAME, installed_version("ovmstrio"), ("binary_tensor_data",))

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

    def model_metadata(self, name: str, version: str, interface: Interface) -> ModelMetadata:
        """Tell the inputs and outputs of a version, or the default one.

        Raises:
            NotFound: the name or version is unknown or retired.
            VersionLoading: it is not loaded yet.
            InvalidRequest: the version is not a number.
        """
        servable = self.registry.peek(name, version)
        known = servable.metadata
        versions = self.registry.available_versions(name)
        serving = version if version.strip("0") else str(versions[-1])
        self._observe("ModelMetadata", name, serving, interface)
        return ModelMetadata(
            name, [str(v) for v in versions], known.platform, known.inputs, known.outputs, dict(known.extra)
        )

    # Inference

    async def infer(self, request: InferRequest, interface: Interface) -> InferResponse:
        """Answer one call.

        Raises:
            ServerError: any of its kinds; what the look-up or the servable raised, unchanged.

        Ownership: the request's buffers must stay unchanged until this returns.
        Cancellation: at any checkpoint; the servable gives back what the call held.
        """
        with await self.registry.lease(request.model_name, request.model_version) as lease:
            event = RequestEvent(request.model_name, lease.version, "ModelInfer", interface, request.id)
            self._started(event)
            try:
                response = await lease.servable.infer(request)
            except BaseException as error:
                code = CANCELLED if isinstance(error, trio.Cancelled) else type(error).__name__
                self._finished(event, code, error)
                raise
            self._finished(event, OK, None)
            return response

    def count_unparsed(self, name: str, version: str, error: ServerError, interface: Interface) -> None:
        """Count a call whose body could not be read, if its servable exists (OVMS counts it as a failed infer)."""
        try:
            self.registry.peek(name, version)
        except ServerError:
            return
        serving = version if version.strip("0") else str(self.registry.available_versions(name)[-1])
        event = RequestEvent(name, serving, "ModelInfer", interface)
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

    def _started(self, event: RequestEvent) -> None:
        for observer in self._observers:
            observer.request_started(event)

    def _finished(self, event: RequestEvent, code: str, error: BaseException | None) -> None:
        for observer in self._observers:
            observer.request_finished(event, code, error)
