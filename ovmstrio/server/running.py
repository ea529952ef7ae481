"""Handle of a running server: its addresses, start time and readiness."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

from ovmstrio.serving.data_plane import DataPlane

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Running:
    """A server that accepts connections.

    Attributes:
        grpc: gRPC addresses, ``host:port`` or ``unix:/path``.
        started: ``time.perf_counter`` time of the start.
    """

    plane: DataPlane
    grpc: list[str]
    rest: list[str]
    metrics: list[str]
    started: float
    probes: Sequence[str] = ()

    @property
    def seconds(self) -> float:
        """Uptime."""
        return perf_counter() - self.started

    async def wait_loaded(self) -> None:
        """Wait until every configured service was loaded or has failed to load."""
        await self.plane.registry.wait_loaded()
