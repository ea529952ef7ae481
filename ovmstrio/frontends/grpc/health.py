"""``grpc.health.v1.Health``: gRPC's own health checks, from the same state as KServe's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from grpclib.const import Cardinality, Handler

from ovmstrio.errors import NotFound
from ovmstrio.protocol.generated.grpc.health.v1 import (
    HealthBase,
    HealthCheckRequest,
    HealthCheckResponse,
)
from ovmstrio.protocol.generated.grpc.health.v1 import (
    HealthCheckResponseServingStatus as ServingStatus,
)
from ovmstrio.registry import VersionState

if TYPE_CHECKING:
    from ovmstrio.dataplane import DataPlane
    from ovmstrio.frontends.grpc.endless_calls import EndlessCalls
    from ovmstrio.frontends.grpc.transport.stream import Call

__all__ = ["HealthService"]

_SERVER: Final = frozenset({"", "inference.GRPCInferenceService"})
"""Names that stand for the server as a whole; any other is a servable's."""


class HealthService(HealthBase):
    """Answers for the server and for each servable by its name.

    Args:
        plane: whose readiness is told.
        watches: where open watches are held, so that a drain can end them.
    """

    def __init__(self, plane: DataPlane, watches: EndlessCalls) -> None:
        self._plane = plane
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
        status = self._status(message.service)
        if status is ServingStatus.SERVICE_UNKNOWN:
            raise NotFound(f'unknown service "{message.service}": expected a servable\'s name or none for the server')
        return HealthCheckResponse(status)

    async def _watch(self, call: Call) -> None:
        """Tell the status now and after each change, until the client leaves or the server drains.

        Cancellation: at any checkpoint; nothing is held.
        """
        request: HealthCheckRequest = await call.recv_message()
        told: ServingStatus | None = None
        with self._watches.hold(call):
            while True:
                status = self._status(request.service)
                if status is told:
                    await self._plane.wait_change()
                else:
                    # Sending takes time in which the status may change, so it is looked at again before waiting.
                    await call.send_message(HealthCheckResponse(status))
                    told = status

    def _status(self, service: str) -> ServingStatus:
        if service in _SERVER:
            serving = self._plane.readiness().ready
        else:
            versions = self._plane.statuses().get(service)
            if versions is None:
                return ServingStatus.SERVICE_UNKNOWN
            available = any(version.state is VersionState.AVAILABLE for version in versions)
            serving = available and not self._plane.is_draining
        return ServingStatus.SERVING if serving else ServingStatus.NOT_SERVING
