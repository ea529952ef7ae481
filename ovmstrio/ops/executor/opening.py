"""Start and stop of a pipeline's executor and workers."""

from __future__ import annotations

import dis
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, repeat
from typing import Any

import structlog
import trio

from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.isolation.user_code import UserCodeRaisedError, call_on_loop, is_async
from ovmstrio.ops.config_file import settings_of
from ovmstrio.ops.executor.channel import StallDetector
from ovmstrio.ops.executor.executor import Executor, OpRunner
from ovmstrio.ops.executor.op_instance import init_failed
from ovmstrio.ops.executor.pipeline_source import PipelineSource
from ovmstrio.ops.executor.process_worker import ProcessWorker
from ovmstrio.ops.executor.workers import InstanceWorker, WorkerPool
from ovmstrio.ops.graph import OpGraph
from ovmstrio.ops.observing.figures import names_of_code
from ovmstrio.ops.observing.hooks import NULL, OpHooks
from ovmstrio.ops.op import Op
from ovmstrio.ops.predictor.protocol import MakePredictor
from ovmstrio.ops.settings import OpSettings, PipelineSettings

__all__ = ["GRACE_SECONDS", "kept_by_preprocess", "open_executor", "refuse_unpredictable"]


def kept_by_preprocess(op: Op) -> list[str]:
    """Return the names of the attributes that an Op's ``preprocess`` assigns, from its bytecode."""
    method: Any = inspect.unwrap(type(op).preprocess)
    code = getattr(method, "__code__", None)
    if code is None or not code.co_argcount:
        return []
    owner, names, loaded = code.co_varnames[0], [], ""
    for instruction in dis.get_instructions(code):
        if instruction.opname == "STORE_ATTR" and loaded == owner:
            names.append(str(instruction.argval))
        loaded = _loaded(instruction)
    return list(dict.fromkeys(names))


def _loaded(instruction: dis.Instruction) -> str:
    if "LOAD_FAST" not in instruction.opname:
        return ""
    # One instruction may load or store two variables.
    value = instruction.argval
    return str(value[-1] if isinstance(value, tuple) else value)


GRACE_SECONDS = 5.0
"""Time for open requests to finish when the pipeline is closed."""

_LAST_NUMBER = 10**18

log = structlog.get_logger(__name__)


_Startable = InstanceWorker | ProcessWorker


@dataclass(slots=True)
class _Opening:
    graph: OpGraph
    settings: PipelineSettings
    make_predictor: MakePredictor | None
    hooks: OpHooks
    source: PipelineSource | None
    nursery: trio.Nursery
    stall_detector: StallDetector
    workers: list[_Startable] = field(default_factory=list)
    pools: dict[str, WorkerPool] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    async def runners(self) -> dict[str, OpRunner]:
        resolved = {name: settings_of(op, self.settings) for name, op in self.graph.ops.items()}
        runners = {name: self._runner(self.graph.ops[name], one) for name, one in resolved.items()}
        for end in (self.graph.request, self.graph.response):
            if is_async(end.init_op):
                await self._start_recorded(partial(_init_end, end))
        async with trio.open_nursery() as starting:
            for worker in self.workers:
                starting.start_soon(self._start_recorded, worker.start)
        return runners

    async def executor(self, runners: dict[str, OpRunner], numbers: Iterable[int]) -> Executor:
        for runner in runners.values():
            await self.nursery.start(runner.serve)
        self.nursery.start_soon(self.stall_detector.watch)
        in_turn = chain.from_iterable(repeat(numbers))
        executor = Executor(
            self.graph, self.settings, runners,
            hooks=self.hooks, stall_detector=self.stall_detector, numbers=in_turn, nursery=self.nursery,
        )  # fmt: skip
        await executor.start()
        self.hooks.opened(list(self.graph.ops), executor.channels)
        log.info("pipeline opened", ops=list(self.graph.ops), inputs=dict(self.graph.inputs))
        return executor

    def _runner(self, op: Op, settings: OpSettings) -> OpRunner:
        make = self._thread_worker if self.settings.dag.is_thread_op else self._process_worker
        if settings.batch_size > 1 and (kept := kept_by_preprocess(op)):
            event = "preprocess stores sample state on self, batches share it: set batch_size to 1"
            log.warning(event, op=op.name, attributes=kept, batch_size=settings.batch_size)
        workers = [make(op, settings, index) for index in range(settings.concurrency)]
        self.workers += workers
        pool = self.pools[op.name] = WorkerPool(op.name, workers, self.nursery, self.hooks)
        report_stage = partial(self.hooks.stage, op.name, 0)
        size = self.settings.dag.channel_size
        return OpRunner(op.name, settings, size, pool, stall_detector=self.stall_detector, report_stage=report_stage)

    def _thread_worker(self, op: Op, settings: OpSettings, index: int) -> _Startable:
        report_stage = partial(self.hooks.stage, op.name, index)
        return InstanceWorker(op, settings, index, self.make_predictor, report_stage=report_stage, nursery=self.nursery)

    def _process_worker(self, op: Op, _settings: OpSettings, index: int) -> _Startable:
        if self.source is None:
            raise AssertionError("pipeline with worker processes has no source")

        def died(why: str) -> None:
            self.hooks.worker_died(op.name, index, why)
            self.pools[op.name].notice(worker)

        report_stage = partial(self.hooks.stage, op.name, index)
        worker = ProcessWorker(op.name, index, self.source, nursery=self.nursery, report_stage=report_stage, died=died)
        return worker

    async def _start_recorded(self, start: Callable[[], Awaitable[None]]) -> None:
        try:
            await start()
        except ConfigError as error:
            self.problems += error.problems
        except OSError as error:
            self.problems.append(Problem(f"worker cannot be started: {error}"))


async def _init_end(end: Op) -> None:
    try:
        await call_on_loop(end.init_op, names=names_of_code(end.name))
    except UserCodeRaisedError as raised:
        raise init_failed(end, raised) from raised.error


@asynccontextmanager
async def open_executor(
    graph: OpGraph,
    settings: PipelineSettings,
    *,
    make_predictor: MakePredictor | None = None,
    hooks: OpHooks = NULL,
    source: PipelineSource | None = None,
    numbers: Iterable[int] = range(_LAST_NUMBER),
    grace_seconds: float = GRACE_SECONDS,
) -> AsyncIterator[Executor]:
    """Start the workers of a pipeline's Ops and run them; leaving the block stops them.

    Args:
        graph: the Ops.
        settings: settings of the pipeline.
        make_predictor: creates the predictors of models; not called for Ops without a model.
        hooks: receive events.
        source: lets worker processes load the pipeline; required with ``is_thread_op: false``.
        numbers: data ids of requests.
        grace_seconds: time for open requests to finish when the block is left; the rest fail with 3001.

    Raises:
        ConfigError: an Op cannot be started, for example because ``init_op`` raised; all problems are listed.
    """
    refuse_unpredictable(graph, settings)
    if source is None and not settings.dag.is_thread_op:
        message = f"worker processes of {', '.join(graph.ops)} have no pipeline source"
        raise ConfigError([Problem(message, suggestion="pass `source`, or set `is_thread_op: true`")])
    problems: list[Problem] = []
    async with trio.open_nursery() as nursery:
        stall_detector = StallDetector(settings.worker_num)
        opening = _Opening(graph, settings, make_predictor, hooks, source, nursery, stall_detector)
        try:
            runners = await opening.runners()
            problems = opening.problems
            if not problems:
                executor = await opening.executor(runners, numbers)
                try:
                    yield executor
                finally:
                    await executor.aclose(grace_seconds)
        finally:
            # Shielded: each worker closes in bounded time.
            with trio.CancelScope(shield=True):
                async with trio.open_nursery() as closing:
                    for worker in opening.workers:
                        closing.start_soon(worker.aclose)
            nursery.cancel_scope.cancel()
    if problems:
        raise ConfigError(problems)


def refuse_unpredictable(graph: OpGraph, settings: PipelineSettings) -> None:
    """Raise ConfigError for loops with an Op that takes its first input, which may belong to the previous round."""
    joins = [name for name, inputs in graph.inputs.items() if len(inputs) > 1]
    if settings.dag.channel_recv_frist_arrive and graph.jumps and joins:
        message = f"channel_recv_frist_arrive is set, but {', '.join(graph.jumps)} jump and {', '.join(joins)} join"
        raise ConfigError([Problem(message, suggestion="unset it")])
