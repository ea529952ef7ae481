"""A gRPC project that is served alone: the one entry of a registry behind the front end of all servers."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import trio

from ovmstrio.config.specs import HandlerSpec
from ovmstrio.dataplane.plane import DataPlane
from ovmstrio.registry import Registry
from ovmstrio.runtimes.handlers.handler_servable import HandlerServable
from ovmstrio.server.grpc_front_end import HANDLER_LIMITS, GrpcFrontEnd

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

    from ovmstrio.runtimes.handlers.clients import Models
    from ovmstrio.runtimes.handlers.config.specs import ProjectSpec
    from ovmstrio.runtimes.handlers.grpc import GrpcProject

__all__ = ["open_grpc_front_end"]


class _ProjectFrontEnd(GrpcFrontEnd):
    """Tells of a drain before it begins."""

    def __init__(self, plane: DataPlane, addresses: Sequence[str]) -> None:
        super().__init__(plane, addresses, limits=HANDLER_LIMITS)
        self._plane = plane

    async def drain(self, grace_seconds: float) -> None:
        """Say that nothing is served any more, and stop gently as all front ends do.

        Cancellation: as theirs.
        """
        self._plane.begin_drain()
        await super().drain(grace_seconds)


@asynccontextmanager
async def open_grpc_front_end(
    project: ProjectSpec, opened: GrpcProject, models: Models, addresses: Sequence[str] = ()
) -> AsyncIterator[GrpcFrontEnd]:
    """Make the front end of a project whose handler is loaded, while the block lasts.

    Ownership: the registry; the project stays the caller's.
    """
    servable = HandlerServable(project.name, opened.handler, opened.limit, opened, models)
    # Whoever opened the project closes it.
    servable.closed.set()

    async def give(_spec: HandlerSpec, _version: int, _directory: Path) -> HandlerServable:
        return servable

    registry = Registry(give, poll_seconds=0)
    plane = DataPlane(registry)
    async with trio.open_nursery() as nursery:
        await nursery.start(registry.run)
        await registry.apply([HandlerSpec(name=project.name, base_path=project.directory, path=project.file)])
        plane.begin_serving()
        yield _ProjectFrontEnd(plane, addresses)
        nursery.cancel_scope.cancel()
