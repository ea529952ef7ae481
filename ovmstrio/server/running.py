"""A server that runs, as whoever started it sees it."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ovmstrio.dataplane.plane import DataPlane

__all__ = ["Running"]


@dataclass(frozen=True, slots=True)
class Running:
    """A server that accepts connections, as it is reported to whoever started it.

    Attributes:
        plane: through which every call goes.
        grpc: the addresses that gRPC is at, as ``host:port`` or ``unix:/path``.
        rest: those of HTTP.
        metrics: those for scrapers alone.
        started: when the server was, on the clock of ``time.perf_counter``.
        probes: the addresses for probes of its health alone.
    """

    plane: DataPlane
    grpc: list[str]
    rest: list[str]
    metrics: list[str]
    started: float
    probes: Sequence[str] = ()

    @property
    def seconds(self) -> float:
        """How long the server has been running."""
        return perf_counter() - self.started

    async def wait_loaded(self) -> None:
        """Return once everything that is configured was loaded or has failed to.

        Cancellation: at once; nothing is held.
        """
        await self.plane.registry.wait_loaded()
