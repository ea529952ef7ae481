"""Op pipelines as a kind of service, each created by a script and hosted in a task."""

from __future__ import annotations

from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import structlog
import trio

from ovmstrio.config.mounted_entries import OP_PIPELINES, read_op_pipelines
from ovmstrio.config.specs import OpPipelineSpec
from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.core.service import NOTHING_INSIDE
from ovmstrio.ops.executor.executor import open_executor
from ovmstrio.ops.graph import draw
from ovmstrio.ops.observing.figures import PIPELINE
from ovmstrio.ops.observing.observing import open_observing
from ovmstrio.ops.op_service import NAMELESS, OpService
from ovmstrio.ops.prepared_service import PreparedService, run_beside_others
from ovmstrio.serving.fingerprints import paths_mark, python_files
from ovmstrio.serving.hosted_service import host
from ovmstrio.serving.kind import Kind, Takes
from ovmstrio.serving.model_versions import ONLY_VERSION, Listing
from ovmstrio.util.stdio import running_code_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping
    from pathlib import Path

    from ovmstrio.config.config_file import ConfigFile
    from ovmstrio.core.hooks import NodeHooks
    from ovmstrio.core.service import Inside, Service
    from ovmstrio.serving.kind import LoadContext

__all__ = ["OpPipelineKind", "open_loaded"]


class OpPipelineKind(Kind[OpPipelineSpec]):
    """Kind of Op pipelines; ``prepared`` holds services of a running script, by names of specs without script."""

    name: ClassVar[str] = OpPipelineSpec.kind
    spec = OpPipelineSpec
    takes: ClassVar[frozenset[Takes]] = frozenset({Takes.TENSORS, Takes.HTTP})
    imports: ClassVar[bool] = True
    fills_cores: ClassVar[bool] = True
    section: ClassVar[str] = OP_PIPELINES
    occupied: ClassVar[str] = "Op pipeline has a name that is taken"

    def __init__(self, prepared: Mapping[str, PreparedService] | None = None) -> None:
        self._prepared = prepared or {}

    def read(self, file: ConfigFile) -> list[OpPipelineSpec]:
        """Read the Op pipelines of the configuration file."""
        return read_op_pipelines(file)

    def list_versions(self, spec: OpPipelineSpec) -> Listing:
        """Return the only version."""
        return Listing({ONLY_VERSION: spec.base_path}, mark=self.files_mark(spec, spec.base_path))

    def files_mark(self, spec: OpPipelineSpec, directory: Path) -> str:
        """Return a fingerprint of configuration, script and its folder; empty for a prepared service; blocking."""
        if spec.script is None:
            return ""
        files = {spec.script, *python_files(spec.script.parent), *python_files(directory)}
        files |= {spec.config} if spec.config is not None else set(directory.glob("*.yml"))
        return paths_mark(files)

    async def load(self, spec: OpPipelineSpec, version: int, directory: Path, context: LoadContext) -> OpService:
        """Run the script up to its service and start the Ops; the caller must close the service.

        Raises ConfigError if the script, the configuration or an Op is unusable.  A running script ignores
        cancellation.
        """
        del version, directory
        if spec.errors:
            raise ConfigError(spec.errors)
        opened = open_loaded(spec, context, self._prepared)
        return await host(context.tasks, opened, kind=self.name, name=spec.name)

    def obstacle(self, service: Service) -> str:
        """Return which Ops have no running worker; empty if none."""
        return service.obstacle() if isinstance(service, OpService) else ""

    def begin_drain(self, service: Service) -> None:
        """Reject waiting requests with 3001."""
        if isinstance(service, OpService):
            service.begin_drain()

    def look_inside(self, spec: OpPipelineSpec, service: Service) -> Inside:
        """Return the state of the Ops."""
        del spec
        return service.inside if isinstance(service, OpService) else NOTHING_INSIDE


# Loading

log = structlog.get_logger(__name__)


@asynccontextmanager
async def open_loaded(
    spec: OpPipelineSpec, context: LoadContext, prepared_services: Mapping[str, PreparedService]
) -> AsyncIterator[OpService]:
    """Run a pipeline's script, or a prepared service, up to its service, and run its Ops within the block.

    Raises ConfigError if the script, the configuration or an Op is unusable, possibly in an exception group.  A running
    script ignores cancellation.
    """
    shown, hooks_of = "" if context.is_alone else spec.name, partial(context.meters.node, spec.name)
    if spec.script is None:
        if spec.name not in prepared_services:
            raise ConfigError([Problem(f"service {spec.name!r} has no script", path="service")])
        prepared = prepared_services[spec.name]
        async with _open_service(prepared.service.name or None, prepared, hooks_of) as service:
            with context.meters.collecting(service.metrics, shown):
                yield service
        return
    with running_code_of({"servable": spec.name}):
        found, modules = await trio.to_thread.run_sync(run_beside_others, spec.script, spec.name, spec.config)
    try:
        config = None if spec.config is None else str(spec.config)
        folder = spec.base_path if spec.config is None else spec.config.parent
        prepared = PreparedService(found, config, spec.script, folder)
        async with _open_service(spec.name, prepared, hooks_of) as service:
            with context.meters.collecting(service.metrics, shown):
                yield service
    finally:
        modules.unload()


@asynccontextmanager
async def _open_service(
    name: str | None, prepared: PreparedService, hooks_of: Callable[[str], NodeHooks]
) -> AsyncIterator[OpService]:
    graph = prepared.service.graph()
    settings = await trio.to_thread.run_sync(prepared.settings)
    if settings.build_dag_each_worker:
        log.warning("build_dag_each_worker has no effect: one process serves; is_thread_op: false uses more for Ops")
    pipeline = PIPELINE.set(name or NAMELESS)
    try:
        maker, source = prepared.predictor_maker(settings), prepared.source()
        async with (
            open_observing(settings, hooks_of=hooks_of) as observing,
            open_executor(graph, settings, make_predictor=maker, hooks=observing.hooks, source=source) as executor,
        ):
            yield OpService(name, executor, observing, settings, draw(graph, settings))
    finally:
        PIPELINE.reset(pipeline)
