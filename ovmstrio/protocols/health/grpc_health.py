"""``grpc.health.v1.Health``: gRPC's own health checks, of a data plane from the same state as KServe's."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, Protocol

from grpclib.const import Cardinality, Handler, Status
from grpclib.exceptions import GRPCError

from ovmstrio.core.errors import NotFound
from ovmstrio.encoding.generated.grpc.health.v1 import (
    HealthBase,
    HealthCheckRequest,
    HealthCheckResponse,
)
from ovmstrio.encoding.generated.grpc.health.v1 import (
    HealthCheckResponseServingStatus as ServingStatus,
)
from ovmstrio.serving.records import VersionState

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ovmstrio.serving.data_plane import DataPlane
    from ovmstrio.transport.grpc.stream import Call

__all__ = ["EndlessCalls", "HealthService", "HealthSource", "PlaneHealth", "ServiceOwners", "ServingStatus"]


class EndlessCalls:
    """The open calls of one server that have no end of their own: health watches and reflection streams."""

    def __init__(self) -> None:
        self._calls: set[Call] = set()
        self._ended = False

    @contextmanager
    def hold(self, call: Call) -> Iterator[None]:
        """Count a call among these while the block runs.

        Raises:
            GRPCError: UNAVAILABLE, when :meth:`end` has been called.
        """
        if self._ended:
            raise _shutting_down()
        self._calls.add(call)
        try:
            yield
        finally:
            self._calls.discard(call)

    def end(self) -> None:
        """Cancel all of them with UNAVAILABLE and let no other begin."""
        self._ended = True
        for call in list(self._calls):
            call.cancel(_shutting_down())


def _shutting_down() -> GRPCError:
    return GRPCError(Status.UNAVAILABLE, "the server is shutting down")


_SERVER: Final = frozenset({"", "inference.GRPCInferenceService"})
"""Names that stand for the server as a whole; any other is a servable's."""


class HealthSource(Protocol):
    """Knows what is healthy."""

    def status(self, service: str) -> ServingStatus:
        """Tell the status of a service, or of the server for an empty name."""
        ...

    async def wait_change(self) -> None:
        """Return when a status may have changed.

        Cancellation: while none has.
        """
        ...


class ServiceOwners(Protocol):
    """Knows which entries bring gRPC services."""

    def entry_of(self, service: str) -> str:
        """Give the entry that brings a service, empty if none does."""
        ...


class PlaneHealth:
    """The health of a data plane: of the server, of each servable by its name, and of the services that some bring.

    Args:
        plane: whose readiness is told.
        owners: know what is brought.
    """

    def __init__(self, plane: DataPlane, owners: ServiceOwners) -> None:
        self._plane = plane
        self._owners = owners

    def status(self, service: str) -> ServingStatus:
        """Tell the status of a servable or of a service of its own, or of the server."""
        if service in _SERVER:
            serving = self._plane.readiness().ready
        else:
            versions = self._plane.statuses().get(self._owners.entry_of(service) or service)
            if versions is None:
                return ServingStatus.SERVICE_UNKNOWN
            available = any(version.state is VersionState.AVAILABLE for version in versions)
            serving = available and not self._plane.is_draining
        return ServingStatus.SERVING if serving else ServingStatus.NOT_SERVING

    async def wait_change(self) -> None:
        """Return when a status may have changed.

        Cancellation: while none has.
        """
        await self._plane.wait_change()


class HealthService(HealthBase):
    """Answers for the server and for what it serves.

    Args:
        source: knows the statuses.
        watches: where open watches are held, so that a drain can end them.
    """

    def __init__(self, source: HealthSource, watches: EndlessCalls) -> None:
        self._source = source
        self._watches = watches

    def __mapping__(self) -> dict[str, Handler]:
        """Give the handlers by path."""
        return {
            **super().__mapping__(),
            "/grpc.health.v1.Health/Watch": Handler(
                self._watch, Cardinality.UNARY_STREAM, HealthCheckRequest, HealthCheckResponse
            ),
        }

    async def check(self, message: HealthCheckRequest) -> HealthCheckResponse:
        """Tell the status now.  Does not block.

        Raises:
            NotFound: nothing of that name is known.
        """
        status = self._source.status(message.service)
        if status is ServingStatus.SERVICE_UNKNOWN:
            raise NotFound(
                f'unknown service "{message.service}": expected the name of what is served, or none for the server'
            )
        return HealthCheckResponse(status)

    async def _watch(self, call: Call) -> None:
        """Tell the status now and after each change, until the client leaves or the server drains.

        Cancellation: at any checkpoint; nothing is held.
        """
        request: HealthCheckRequest = await call.recv_message()
        told: ServingStatus | None = None
        with self._watches.hold(call):
            while True:
                status = self._source.status(request.service)
                if status is told:
                    await self._source.wait_change()
                else:
                    # Sending takes time in which the status may change, so it is looked at again before waiting.
                    await call.send_message(HealthCheckResponse(status))
                    told = status
