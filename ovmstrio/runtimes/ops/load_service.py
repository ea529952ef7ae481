"""From a script, or a service that one has handed over, to a pipeline of Ops that answers."""

from __future__ import annotations

from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import structlog
import trio

from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.core.line_streams import running_code_of
from ovmstrio.runtimes.ops.executor.opening import open_executor
from ovmstrio.runtimes.ops.graph import draw
from ovmstrio.runtimes.ops.observing.figures import PIPELINE
from ovmstrio.runtimes.ops.observing.observing import open_observing
from ovmstrio.runtimes.ops.op_service import NAMELESS, OpService
from ovmstrio.runtimes.ops.prepared_service import PreparedService
from ovmstrio.runtimes.ops.scripts import run_beside_others

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping

    from ovmstrio.config.specs import OpPipelineSpec
    from ovmstrio.core.hooks import NodeHooks
    from ovmstrio.runtimes.kind import LoadContext

__all__ = ["open_loaded"]

log = structlog.get_logger(__name__)


@asynccontextmanager
async def open_loaded(
    spec: OpPipelineSpec, context: LoadContext, prepared_services: Mapping[str, PreparedService]
) -> AsyncIterator[OpService]:
    """Run the script of a pipeline as far as its service, and start its Ops, until the block is left.

    Args:
        spec: the pipeline.
        context: what the server lends.
        prepared_services: those that a running script has handed over, by the names of their specs.

    Raises:
        ConfigError: the script, the configuration or the Ops cannot be used, or an Op cannot be prepared.

    They may be in exception groups, as errors of a nursery are.

    Cancellation: at any checkpoint, but a script that runs is first run; nothing is left.
    """
    shown, hooks_of = "" if context.is_alone else spec.name, partial(context.meters.node, spec.name)
    if spec.script is None:
        if spec.name not in prepared_services:
            raise ConfigError([Problem(f"the service {spec.name!r} has no script", path="service")])
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
    """Start a service's Ops, and all that observes them, until the block is left.

    Args:
        name: what requests must call it; None for one without a name.
        prepared: the service.
        hooks_of: gives who is told of the runs of an Op.

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
            open_observing(settings, hooks_of=hooks_of) as observing,
            open_executor(graph, settings, make_predictor=maker, hooks=observing.hooks, source=source) as executor,
        ):
            yield OpService(name, executor, observing, settings, draw(graph, settings))
    finally:
        PIPELINE.reset(pipeline)
