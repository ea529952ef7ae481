"""Pipelines of Ops as a kind of service: made by their scripts, each in a task of its own."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, ClassVar

import structlog
import trio

from ovmstrio.config.mounted_entries import OP_PIPELINES, read_op_pipelines
from ovmstrio.config.specs import OpPipelineSpec
from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.repository.fingerprints import paths_mark
from ovmstrio.repository.graph_files import python_files
from ovmstrio.repository.versions import ONLY_VERSION, Listing
from ovmstrio.runtimes.kind import Kind, Takes
from ovmstrio.runtimes.ops.executor.opening import open_executor
from ovmstrio.runtimes.ops.observing.figures import PIPELINE
from ovmstrio.runtimes.ops.observing.observing import open_observing
from ovmstrio.runtimes.ops.op_service import NAMELESS, OpService
from ovmstrio.runtimes.ops.prepared_service import PreparedService
from ovmstrio.runtimes.ops.scripts import run_beside_others
from ovmstrio.runtimes.resident import host

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from pathlib import Path

    from ovmstrio.config.config_file import ConfigFile
    from ovmstrio.core.servable import Service
    from ovmstrio.runtimes.kind import LoadContext

__all__ = ["OpPipelineKind", "open_service"]

log = structlog.get_logger(__name__)


class OpPipelineKind(Kind[OpPipelineSpec]):
    """Pipelines of Ops.

    Args:
        prepared: services that a running script has handed over, by the names of their specs, which have no script.
    """

    name: ClassVar[str] = OpPipelineSpec.kind
    spec = OpPipelineSpec
    takes: ClassVar[frozenset[Takes]] = frozenset({Takes.TENSORS, Takes.HTTP})
    imports: ClassVar[bool] = True
    section: ClassVar[str] = OP_PIPELINES
    occupied: ClassVar[str] = "Op pipeline has a name that is taken"

    def __init__(self, prepared: Mapping[str, PreparedService] | None = None) -> None:
        self._prepared = prepared or {}

    def read(self, file: ConfigFile) -> list[OpPipelineSpec]:
        """Read the pipelines of Ops of the file."""
        return read_op_pipelines(file)

    def list_versions(self, spec: OpPipelineSpec) -> Listing:
        """Give the one version."""
        return Listing({ONLY_VERSION: spec.base_path}, mark=self.files_mark(spec, spec.base_path))

    def files_mark(self, spec: OpPipelineSpec, directory: Path) -> str:
        """Give a mark of the configuration, of the script and of all Python files beside it; blocking.

        What was handed over is made by code, so that no file of it is looked at.
        """
        if spec.script is None:
            return ""
        files = {spec.script, *python_files(spec.script.parent), *python_files(directory)}
        files |= {spec.config} if spec.config is not None else set(directory.glob("*.yml"))
        return paths_mark(files)

    async def load(self, spec: OpPipelineSpec, version: int, directory: Path, context: LoadContext) -> OpService:
        """Run the script as far as its service, and start the Ops; the caller owns the service and closes it.

        Raises:
            ConfigError: the script, the configuration or the Ops cannot be used, or an Op cannot be prepared.

        Cancellation: at any checkpoint, but a script that runs is first run; nothing is left.
        """
        del version, directory
        if spec.errors:
            raise ConfigError(spec.errors)
        return await host(context.tasks, self._opened(spec, context), kind=self.name, name=spec.name)

    def obstacle(self, service: Service) -> str:
        """Tell of workers that died."""
        return service.obstacle() if isinstance(service, OpService) else ""

    def begin_drain(self, service: Service) -> None:
        """Answer what waits with 3001."""
        if isinstance(service, OpService):
            service.begin_drain()

    @asynccontextmanager
    async def _opened(self, spec: OpPipelineSpec, context: LoadContext) -> AsyncIterator[OpService]:
        shown = "" if context.is_alone else spec.name
        if spec.script is None:
            if spec.name not in self._prepared:
                raise ConfigError([Problem(f"the service {spec.name!r} has no script", path="service")])
            prepared = self._prepared[spec.name]
            async with open_service(prepared.service.name or None, prepared) as service:
                with context.meters.collecting(service.metrics, shown):
                    yield service
            return
        found, modules = await trio.to_thread.run_sync(run_beside_others, spec.script, spec.name, spec.config)
        try:
            config = None if spec.config is None else str(spec.config)
            folder = spec.base_path if spec.config is None else spec.config.parent
            prepared = PreparedService(found, config, spec.script, folder)
            async with open_service(spec.name, prepared) as service:
                with context.meters.collecting(service.metrics, shown):
                    yield service
        finally:
            modules.unload()


@asynccontextmanager
async def open_service(name: str | None, prepared: PreparedService) -> AsyncIterator[OpService]:
    """Start a service's Ops, and all that observes them, until the block is left.

    Args:
        name: what requests must call it; None for one without a name.
        prepared: the service.

    Raises:
        ConfigError: the configuration or the Ops cannot be used, or an Op cannot be prepared.

    They may be in exception groups, as errors of a nursery are.

    Cancellation: at any checkpoint; nothing is left.
    """
    graph = prepared.service.graph()
    settings = await trio.to_thread.run_sync(prepared.settings)
    if settings.build_dag_each_worker:
        log.warning("build_dag_each_worker has no effect: one process serves; is_thread_op: false uses more for Ops")
    pipeline = PIPELINE.set(name or NAMELESS)
    try:
        maker, source = prepared.predictor_maker(settings), prepared.source()
        async with (
            open_observing(settings) as observing,
            open_executor(graph, settings, make_predictor=maker, hooks=observing.hooks, source=source) as executor,
        ):
            yield OpService(name, executor, observing, settings)
    finally:
        PIPELINE.reset(pipeline)
