"""Whether a pipeline would start: its Ops against its configuration, and their models, without serving anything.

``init_op`` is not run, for it may do anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import trio

from ovmstrio.config.documents import did_you_mean
from ovmstrio.core.errors import ConfigError, NotReady, Problem
from ovmstrio.inference.crash_probe import trials_folder, trying_models
from ovmstrio.ops.config_file import ExaminedConfig, settings_of
from ovmstrio.ops.executor.op_instance import hooks_of
from ovmstrio.ops.executor.opening import refuse_unpredictable
from ovmstrio.ops.graph import OpGraph
from ovmstrio.ops.op import Op
from ovmstrio.ops.predictor.make import PredictorMaker
from ovmstrio.ops.settings import OpSettings, PipelineSettings

__all__ = ["examine_pipeline", "problem_of_model"]


async def examine_pipeline(graph: OpGraph, config: ExaminedConfig, *, load: bool = True) -> list[Problem]:
    """Tell every problem of a pipeline that its configuration alone does not show, with the lines of the file.

    Args:
        graph: its Ops.
        config: its configuration.
        load: whether models are loaded, and let go again.

    Ownership: nothing once it has ended.

    Cancellation: while models are loaded.
    """
    problems = [*_unused_entries(config.settings.ops, graph.ops), *_unpredictable(graph, config.settings)]
    resolved: dict[str, OpSettings] = {}
    for name, op in graph.ops.items():
        try:
            resolved[name] = settings_of(op, config.settings)
        except ConfigError as error:
            problems += error.problems
        else:
            problems += [*_hooks(op), *_without_use(resolved[name])]
    if load:
        problems += await _load(resolved.values(), is_thread_op=config.settings.dag.is_thread_op)
    return [config.place(problem) for problem in problems]


def _unused_entries(entries: Iterable[str], ops: Mapping[str, Op]) -> list[Problem]:
    """Find entries of the file that are no Op's."""
    return [
        Problem(
            f"no Op of the pipeline is called {name!r}",
            path=f"op.{name}",
            suggestion=did_you_mean(name, ops, otherwise=f"its Ops are {', '.join(ops)}"),
            severity="warning",
        )
        for name in entries
        if name not in ops
    ]


def _unpredictable(graph: OpGraph, settings: PipelineSettings) -> list[Problem]:
    try:
        refuse_unpredictable(graph, settings)
    except ConfigError as error:
        return [replace(problem, path="dag.channel_recv_frist_arrive") for problem in error.problems]
    return []


def _hooks(op: Op) -> list[Problem]:
    """Find hooks that cannot be called."""
    try:
        hooks_of(op)
    except ConfigError as error:
        return list(error.problems)
    return []


def _without_use(settings: OpSettings) -> list[Problem]:
    """Find settings that say nothing without others."""
    place = f"op.{settings.name}"
    problems = []
    if settings.batch_size > 1 and settings.batch_timeout_seconds is None:
        problems.append(
            Problem(
                f"batches of Op {settings.name} wait until they are full, or until no request moves any more",
                path=f"{place}.batch_size",
                suggestion="set auto_batching_timeout",
            )
        )
    if settings.batch_size == 1 and settings.batch_timeout_seconds is not None:
        problems.append(
            Problem(
                f"auto_batching_timeout of Op {settings.name} has no effect with batches of 1",
                path=f"{place}.auto_batching_timeout",
                suggestion="set batch_size",
            )
        )
    if settings.retry > 1 and settings.timeout_seconds is None:
        problems.append(
            Problem(
                f"retry of Op {settings.name} has no effect without a timeout, after which to try again",
                path=f"{place}.retry",
                suggestion="set timeout",
            )
        )
    return [replace(problem, severity="warning") for problem in problems]


async def _load(ops: Iterable[OpSettings], *, is_thread_op: bool) -> list[Problem]:
    """Load the model of each Op that has one, and let it go.

    Cancellation: a model that is being loaded is first loaded.
    """
    make = PredictorMaker(is_thread_op=is_thread_op)
    problems: list[Problem] = []
    async with trio.open_nursery() as nursery:
        with trying_models(nursery, "auto", trials_folder()):
            for settings in ops:
                problems += await _load_one(make, settings) if settings.has_model else ()
        nursery.cancel_scope.cancel()
    return problems


async def _load_one(make: PredictorMaker, settings: OpSettings) -> list[Problem]:
    try:
        predictor = await make(settings, 0)
    except ConfigError as error:
        return [problem_of_model(each, settings) for each in error.problems]
    except NotReady as error:
        return [problem_of_model(Problem(error.message), settings)]
    predictor.close()
    return []


def problem_of_model(problem: Problem, settings: OpSettings) -> Problem:
    """Say which key a problem of a model is about; one of the model's own files stays there."""
    if problem.path == f"op.{settings.name}.fetch_list" and not settings.server_endpoints:
        return replace(problem, path=f"op.{settings.name}.local_service_conf.fetch_list")
    if problem.path.startswith("op."):
        return problem
    kind = "client_config" if settings.server_endpoints else "local_service_conf"
    if problem.file:
        hint = f"op.{settings.name}.{kind} names the model"
        return problem if problem.suggestion else replace(problem, suggestion=hint)
    key = kind if settings.server_endpoints else f"{kind}.{problem.path or 'model_config'}"
    return replace(problem, path=f"op.{settings.name}.{key}")
