"""A data plane of one service that is loaded already, for front ends that serve nothing else."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from ovmstrio.config.specs import ServableSpec
from ovmstrio.core.servable import Service
from ovmstrio.dataplane.plane import DataPlane
from tests.support.stub_registry import registry_of


@asynccontextmanager
async def open_plane_of(spec: ServableSpec, service: Service, obstacle: Callable[[], str]) -> AsyncIterator[DataPlane]:
    """Serve one service while the block lasts, and close it.

    Args:
        spec: what it is known by.
        service: what is called.
        obstacle: tells why it cannot be called, or an empty text.

    Raises:
        ExceptionGroup: of what the block raises.

    Ownership: the registry's tasks.
    Cancellation: at any checkpoint.
    """

    async def load(spec: ServableSpec, version: int, directory: Path) -> Service:
        del spec, version, directory
        return service

    registry = registry_of(load, poll_seconds=0)
    plane = DataPlane(registry, obstacle=obstacle)
    async with trio.open_nursery() as nursery:
        await nursery.start(registry.run)
        await registry.apply([spec])
        plane.begin_serving()
        yield plane
        nursery.cancel_scope.cancel()
