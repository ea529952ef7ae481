"""Load a project's handler, and keep what it needs to run."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import structlog
import trio

from ovmstrio.core.errors import ConfigError
from ovmstrio.core.hooks import NULL_BATCH_HOOKS, BatchHooks
from ovmstrio.runtimes.handlers.batches import BatchedMethod, BatchItem, Patience, batch_options
from ovmstrio.runtimes.handlers.building import NO_SUPPLIES, HandlerBuilder, Supplies
from ovmstrio.runtimes.handlers.callbacks import DRAIN_SECONDS, Callbacks
from ovmstrio.runtimes.handlers.config.project_spec import ProjectBatching, ProjectSpec
from ovmstrio.runtimes.handlers.handler import LoadedHandler, invoke
from ovmstrio.runtimes.handlers.handler_class import HandlerMethod, import_folders, on_sys_path
from ovmstrio.runtimes.handlers.handler_code import HandlerCode
from ovmstrio.work.batching import Batcher
from ovmstrio.work.threads.worker_threads import WorkerThreads

__all__ = ["drain_batcher", "open_handler", "start_batcher"]

BatchedT = TypeVar("BatchedT")

log = structlog.get_logger(__name__)


@asynccontextmanager
async def open_handler(
    project: ProjectSpec,
    supplies: Supplies = NO_SUPPLIES,
    *,
    batch_hooks: BatchHooks = NULL_BATCH_HOOKS,
    is_alone: bool = False,
    code: HandlerCode | None = None,
    gathers: bool = True,
    queue_timeout: float = 0,
) -> AsyncIterator[LoadedHandler]:
    """Import a project's handler, make its object, and run it while the block lasts.

    The constructor runs in the threads that methods run in, in the same one if there is only one.

    Args:
        project: what to load.
        supplies: what its constructor may ask for, and what it can import.
        batch_hooks: are told of batches.
        is_alone: whether nothing else is served in this process, so that its folders may be on ``sys.path``.
        code: whose code it is, and what becomes of its errors; logged here, by default.
        gathers: whether requests are gathered here where the project has batches; else whoever calls has done so.
        queue_timeout: for how many seconds a call waits for a thread; 0 for any time.

    Raises:
        ConfigError: the handler cannot be loaded; every problem of its class is told at once.
        ExceptionGroup: of what the block raises.

    Ownership: the handler's threads, batches and callbacks; those that have not ended ``DRAIN_SECONDS`` after the
    block are left.

    Cancellation: while it loads, and at the end while batches and callbacks end.
    """
    code = code or HandlerCode(project.name, project.directory)
    threads = WorkerThreads(limit=project.threads_per_process, idle_seconds=None, is_strict=True, names=code.names)
    callbacks = Callbacks(code)
    builder = HandlerBuilder(project, supplies, code, threads, is_alone=is_alone)
    failure: ConfigError | None = None
    with _path(project, is_alone=is_alone), builder:
        async with trio.open_nursery() as nursery:
            try:
                await nursery.start(threads.run)
                await nursery.start(callbacks.run)
                instance, methods = await builder.build()
                batcher = await _start_own_batcher(
                    nursery, project if gathers else None, methods, threads=threads, code=code, hooks=batch_hooks
                )
                patience = Patience.of(project, queue_timeout)
                yield LoadedHandler(
                    instance, methods, threads, callbacks, code=code, batcher=batcher, patience=patience
                )
                await drain_batcher(batcher, nursery.cancel_scope)
            except ConfigError as error:
                # Raised outside, so that it does not come in a group.
                failure = error
            finally:
                callbacks.close()
                with trio.CancelScope(shield=True):
                    await threads.aclose()
    if failure is not None:
        raise failure


def _path(project: ProjectSpec, *, is_alone: bool) -> AbstractContextManager[None]:
    return on_sys_path(import_folders(project)) if is_alone else nullcontext()


async def _start_own_batcher(
    nursery: trio.Nursery,
    project: ProjectSpec | None,
    methods: Mapping[str, HandlerMethod],
    *,
    threads: WorkerThreads,
    code: HandlerCode,
    hooks: BatchHooks,
) -> Batcher[BatchItem, Any] | None:
    batched = next((method for method in methods.values() if method.is_batched), None)
    if batched is None or project is None or project.batching is None:
        return None
    run = BatchedMethod(batched, partial(invoke, threads, code), code).run
    return await start_batcher(nursery, project.batching, run, concurrency=project.threads_per_process, hooks=hooks)


async def start_batcher(
    nursery: trio.Nursery,
    batching: ProjectBatching,
    run: Callable[[Sequence[BatchedT]], Awaitable[Sequence[Any]]],
    *,
    concurrency: int,
    hooks: BatchHooks,
) -> Batcher[BatchedT, Any]:
    """Start what gathers the requests of a project.

    Args:
        nursery: hosts it.
        batching: how the project says so.
        run: answers the requests of a batch.
        concurrency: how many batches run at once.
        hooks: are told of batches.
    """
    batcher: Batcher[BatchedT, Any] = Batcher(
        run, batch_options(batching), concurrency=concurrency, retry_singly=batching.retry_singly, hooks=hooks
    )
    await nursery.start(batcher.serve)
    return batcher


async def drain_batcher(batcher: Batcher[Any, Any] | None, everything: trio.CancelScope) -> None:
    """Let the batches that run end, and end everything if they do not in time.

    Cancellation: at once.
    """
    if batcher is None:
        return
    with trio.move_on_after(DRAIN_SECONDS) as scope:
        await batcher.aclose()
    if scope.cancelled_caught:
        log.warning("a batch did not end in time", seconds=DRAIN_SECONDS)
        everything.cancel()
