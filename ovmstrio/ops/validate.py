"""Validation of a pipeline without serving: Ops against the configuration, and loading of models.

``init_op`` is not run, because it may have side effects.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import trio

from ovmstrio.config.documents import did_you_mean
from ovmstrio.core.errors import ConfigError, NotReady, Problem
from ovmstrio.inference.crash_probe import open_crash_probe, verdicts_folder
from ovmstrio.ops.config_file import ValidatedConfig, resolve_op_settings
from ovmstrio.ops.executor.executor import reject_ambiguous_loops
from ovmstrio.ops.executor.op_instance import get_hooks
from ovmstrio.ops.graph import OpGraph
from ovmstrio.ops.op import Op
from ovmstrio.ops.predictor.factory import PredictorFactory
from ovmstrio.ops.predictor.local_model import replaced_settings
from ovmstrio.ops.settings import OpSettings, PipelineSettings


async def validate_pipeline(graph: OpGraph, config: ValidatedConfig, *, load: bool = True) -> list[Problem]:
    """Return the problems of a pipeline beyond its configuration, with file and line; loads models if ``load``."""
    problems = [*_unused_entries(config.settings.ops, graph.ops), *_loop_problems(graph, config.settings)]
    resolved: dict[str, OpSettings] = {}
    for name, op in graph.ops.items():
        try:
            resolved[name] = resolve_op_settings(op, config.settings)
        except ConfigError as error:
            problems += error.problems
        else:
            problems += [*_hook_problems(op), *_settings_without_effect(resolved[name])]
    problems += await trio.to_thread.run_sync(_replaced_settings, resolved.values())
    if load:
        problems += await _load(resolved.values(), is_thread_op=config.settings.dag.is_thread_op)
    # Loading reports unsupported devices too.
    return [config.place(problem) for problem in dict.fromkeys(problems)]


def _unused_entries(entries: Iterable[str], ops: Mapping[str, Op]) -> list[Problem]:
    return [
        Problem(
            f"the pipeline has no Op {name!r}",
            path=f"op.{name}",
            suggestion=did_you_mean(name, ops, otherwise=f"its Ops are {', '.join(ops)}"),
            severity="warning",
        )
        for name in entries
        if name not in ops
    ]


def _loop_problems(graph: OpGraph, settings: PipelineSettings) -> list[Problem]:
    try:
        reject_ambiguous_loops(graph, settings)
    except ConfigError as error:
        return [replace(problem, path="dag.channel_recv_frist_arrive") for problem in error.problems]
    return []


def _hook_problems(op: Op) -> list[Problem]:
    try:
        get_hooks(op)
    except ConfigError as error:
        return list(error.problems)
    return []


def _settings_without_effect(settings: OpSettings) -> list[Problem]:
    prefix = f"op.{settings.name}"
    problems = []
    if settings.batch_size > 1 and settings.batch_timeout_seconds is None:
        problems.append(
            Problem(
                f"partial batches of Op {settings.name} wait until the pipeline stalls",
                path=f"{prefix}.batch_size",
                suggestion="set auto_batching_timeout",
            )
        )
    if settings.batch_size == 1 and settings.batch_timeout_seconds is not None:
        problems.append(
            Problem(
                f"auto_batching_timeout of Op {settings.name} has no effect with batches of 1",
                path=f"{prefix}.auto_batching_timeout",
                suggestion="set batch_size",
            )
        )
    if settings.retry > 1 and settings.timeout_seconds is None:
        problems.append(
            Problem(
                f"retry of Op {settings.name} has no effect without a timeout",
                path=f"{prefix}.retry",
                suggestion="set timeout",
            )
        )
    return [replace(problem, severity="warning") for problem in problems]


def _replaced_settings(ops: Iterable[OpSettings]) -> list[Problem]:
    problems: list[Problem] = []
    for settings in ops:
        local = settings.local_service_conf
        if settings.server_endpoints or local.model_config is None:
            continue
        try:
            found = replaced_settings(local, settings.concurrency)
        except ConfigError as error:
            found = list(error.problems)
        problems += [locate_model_problem(problem, settings) for problem in found]
    return problems


async def _load(ops: Iterable[OpSettings], *, is_thread_op: bool) -> list[Problem]:
    """Load and release each Op's model; a model being loaded ignores cancellation."""
    problems: list[Problem] = []
    async with trio.open_nursery() as nursery:
        with open_crash_probe(nursery, "auto", verdicts_folder()) as probe:
            make = PredictorFactory(is_thread_op=is_thread_op, probe=probe)
            for settings in ops:
                problems += await _load_one(make, settings) if settings.has_model else ()
        nursery.cancel_scope.cancel()
    return problems


async def _load_one(make: PredictorFactory, settings: OpSettings) -> list[Problem]:
    try:
        predictor = await make(settings, 0)
    except ConfigError as error:
        return [locate_model_problem(each, settings) for each in error.problems]
    except NotReady as error:
        return [locate_model_problem(Problem(error.message), settings)]
    predictor.close()
    return []


def locate_model_problem(problem: Problem, settings: OpSettings) -> Problem:
    """Add the configuration key to a problem of a model; a problem in the model's files keeps its file."""
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
