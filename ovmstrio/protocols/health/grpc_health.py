"""gRPC health checking protocol (``grpc.health.v1.Health``) over the readiness of a data plane."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from grpclib.const import Cardinality, Handler, Status
from grpclib.exceptions import GRPCError

from ovmstrio.core.errors import NotFound
from ovmstrio.encoding.generated.grpc.health.v1 import HealthBase, HealthCheckRequest, HealthCheckResponse
from ovmstrio.encoding.generated.grpc.health.v1 import HealthCheckResponseServingStatus as ServingStatus
from ovmstrio.serving.records import VersionState

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ovmstrio.protocols.health.dynamic_services import DynamicServices
    from ovmstrio.serving.data_plane import DataPlane
    from ovmstrio.transport.grpc.call import Call

__all__ = ["HealthService", "OpenEndedCalls", "PlaneHealth", "ServingStatus"]


class OpenEndedCalls:
    """Open calls without an end: health watches and reflection streams."""

    def __init__(self) -> None:
        self._calls: set[Call] = set()
        self._ended = False

    @contextmanager
    def hold(self, call: Call) -> Iterator[None]:
        """Register a call while the block runs; raise ``GRPCError`` UNAVAILABLE during shutdown."""
        if self._ended:
            raise _shutting_down()
        self._calls.add(call)
        try:
            yield
        finally:
            self._calls.discard(call)

    def end(self) -> None:
        """Cancel all calls with UNAVAILABLE and refuse new ones."""
        self._ended = True
        for call in list(self._calls):
            call.cancel(_shutting_down())


def _shutting_down() -> GRPCError:
    return GRPCError(Status.UNAVAILABLE, "the server is shutting down")


_SERVER: Final = frozenset({"", "inference.GRPCInferenceService"})
"""Names that stand for the server; any other name is a servable."""


class PlaneHealth:
    """Health of a data plane: of the server, of servables, and of gRPC services that servables provide."""

    def __init__(self, plane: DataPlane, owners: DynamicServices) -> None:
        self._plane = plane
        self._owners = owners

    def status(self, service: str) -> ServingStatus:
        """Return the status of the server, a servable, or a provided gRPC service."""
        if service in _SERVER:
            serving = self._plane.readiness().ready
        else:
            versions = self._plane.statuses().get(self._owners.entry_of(service) or service)
            if versions is None:
                return ServingStatus.SERVICE_UNKNOWN
            available = any(version.state is VersionState.AVAILABLE for version in versions)
            serving = available and not self._plane.is_shutting_down
        return ServingStatus.SERVING if serving else ServingStatus.NOT_SERVING

    async def wait_change(self) -> None:
        """Wait until a status may have changed."""
        await self._plane.wait_change()


class HealthService(HealthBase):
    """Health service; ``watches`` registers open watches, which a drain ends."""

    def __init__(self, source: PlaneHealth, watches: OpenEndedCalls) -> None:
        self._source = source
        self._watches = watches

    def __mapping__(self) -> dict[str, Handler]:
        """Return the handlers by path."""
        return {
            **super().__mapping__(),
            "/grpc.health.v1.Health/Watch": Handler(
                self._watch, Cardinality.UNARY_STREAM, HealthCheckRequest, HealthCheckResponse
            ),
        }

    async def check(self, message: HealthCheckRequest) -> HealthCheckResponse:
        """Return the current status; raise ``NotFound`` for an unknown service."""
        status = self._source.status(message.service)
        if status is ServingStatus.SERVICE_UNKNOWN:
            raise NotFound(
                f'unknown service "{message.service}": expected the name of a servable, or no name for the server'
            )
        return HealthCheckResponse(status)

    async def _watch(self, call: Call) -> None:
        request: HealthCheckRequest = await call.recv_message()
        sent: ServingStatus | None = None
        with self._watches.hold(call):
            while True:
                status = self._source.status(request.service)
                if status is sent:
                    await self._source.wait_change()
                else:
                    # The status may change while it is sent, so check it again before waiting.
                    await call.send_message(HealthCheckResponse(status))
                    sent = status
