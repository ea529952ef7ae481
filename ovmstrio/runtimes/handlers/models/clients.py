"""The models of a project as those need them who load its handler, without what only models need."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Protocol

from ovmstrio.runtimes.handlers.config.project_spec import ProjectSpec

__all__ = ["Models", "ModelsInfo", "open_clients"]


class ModelsInfo(Protocol):
    """What is told of the models of a project."""

    def info(self) -> dict[str, Any]:
        """Tell of all models, as ``/info`` does; blocking."""
        ...


class Models(ModelsInfo, Protocol):
    """The models of a project, as its server needs them."""

    @property
    def clients(self) -> Mapping[str, Any]:
        """What the handler's constructor may ask for, by name."""
        ...


class _NoModels:
    clients: Mapping[str, Any] = {}

    def info(self) -> dict[str, Any]:
        return {}


@asynccontextmanager
async def open_clients(project: ProjectSpec) -> AsyncIterator[Models]:
    """Keep a project's models while the block lasts; it is entered after the first look at their storages.

    Raises:
        ConfigError: a storage cannot be used.
        ExceptionGroup: of what the block raises.

    Ownership: the tasks that follow the storages, and the copies of models.
    Cancellation: at any checkpoint.
    """
    if project.models is None:
        yield _NoModels()
        return
    # OpenVINO and the libraries of storages are left alone by those who have no models.
    from ovmstrio.runtimes.handlers.models.opening import open_models  # noqa: PLC0415 - few need models

    async with open_models(project) as models:
        yield models
