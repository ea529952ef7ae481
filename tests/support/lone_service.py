"""A data plane of one service that is loaded already, for front ends that serve nothing else."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from ovmstrio.config.specs import ServableSpec
from ovmstrio.core.servable import Service
from ovmstrio.dataplane.plane import DataPlane
from tests.support.stub_registry import registry_of, running


@asynccontextmanager
async def open_plane_of(
    spec: ServableSpec, service: Service, obstacle: Callable[[], str] = str
) -> AsyncIterator[DataPlane]:
    """Serve a loaded service under a spec until the block ends; ``obstacle`` returns why it cannot be called, or ""."""

    async def load(spec: ServableSpec, version: int, directory: Path) -> Service:
        return service

    registry = registry_of(load, poll_seconds=0)
    plane = DataPlane(registry, obstacle=obstacle)
    async with running(registry):
        await registry.apply([spec])
        plane.begin_serving()
        yield plane
