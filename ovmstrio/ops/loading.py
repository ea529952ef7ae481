"""Loading of pipelines of Ops: the prepared service, its executor and its observers."""

from __future__ import annotations

from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import structlog
import trio

from ovmstrio.config.specs import OpPipelineSpec
from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.inference.crash_probe import CrashProbe
from ovmstrio.ops.executor.executor import open_executor
from ovmstrio.ops.graph import draw
from ovmstrio.ops.observing.log_files import PIPELINE
from ovmstrio.ops.observing.observers import open_observers
from ovmstrio.ops.op_service import DEFAULT_NAME, OpService
from ovmstrio.ops.prepared_service import PreparedService, run_on_shared_server
from ovmstrio.util.stdio import attribute_output_to

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping

    from ovmstrio.core.hooks import NodeHooks
    from ovmstrio.serving.kind import LoadContext

log = structlog.get_logger(__name__)


@asynccontextmanager
async def open_loaded(
    spec: OpPipelineSpec, context: LoadContext, prepared_services: Mapping[str, PreparedService]
) -> AsyncIterator[OpService]:
    """Run a pipeline's script, or a prepared service, up to its service, and run its Ops within the block.

    Raises ConfigError if the script, the configuration or an Op is unusable, possibly in an exception group.  A running
    script ignores cancellation.
    """
    probe = context.find(CrashProbe)
    shown, hooks_of = "" if context.is_alone else spec.name, partial(context.meters.node, spec.name)
    if spec.script is None:
        if spec.name not in prepared_services:
            raise ConfigError([Problem(f"service {spec.name!r} has no script", path="service")])
        prepared = prepared_services[spec.name]
        async with _open_service(prepared.service.name or None, prepared, hooks_of, probe) as service:
            with context.meters.collecting(service.metrics, shown):
                yield service
        return
    with attribute_output_to({"servable": spec.name}):
        found, modules = await trio.to_thread.run_sync(run_on_shared_server, spec.script, spec.name, spec.config)
    try:
        config = None if spec.config is None else str(spec.config)
        folder = spec.base_path if spec.config is None else spec.config.parent
        prepared = PreparedService(found, config, spec.script, folder)
        async with _open_service(spec.name, prepared, hooks_of, probe) as service:
            with context.meters.collecting(service.metrics, shown):
                yield service
    finally:
        modules.unload()


@asynccontextmanager
async def _open_service(
    name: str | None, prepared: PreparedService, hooks_of: Callable[[str], NodeHooks], probe: CrashProbe | None
) -> AsyncIterator[OpService]:
    graph = prepared.service.graph()
    settings = await trio.to_thread.run_sync(prepared.settings)
    if settings.build_dag_each_worker:
        log.warning("build_dag_each_worker has no effect: one process serves; is_thread_op: false uses more for Ops")
    pipeline = PIPELINE.set(name or DEFAULT_NAME)
    try:
        maker, source = prepared.predictor_factory(settings, probe), prepared.source()
        async with (
            open_observers(settings, hooks_of=hooks_of) as observing,
            open_executor(graph, settings, make_predictor=maker, hooks=observing.hooks, source=source) as executor,
        ):
            yield OpService(name, executor, observing, settings, draw(graph, settings))
    finally:
        PIPELINE.reset(pipeline)
