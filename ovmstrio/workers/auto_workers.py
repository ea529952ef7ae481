"""Automatic number of workers: measures models before the first worker starts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import structlog
import trio

from ovmstrio.config.specs import ModelSpec
from ovmstrio.isolation.worker_process import WorkerExited, WorkerProcess
from ovmstrio.models.sequences.store import stored_worker_counts
from ovmstrio.server.worker_count import MeasuredCall, WorkerChoice, choose_count, models_to_measure
from ovmstrio.util.container_limits import memory_limit, usable_cores

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ovmstrio.server.plan import Plan

log = structlog.get_logger(__name__)

_PROGRAM: Final = "ovmstrio.workers.measuring"


@dataclass(frozen=True, slots=True)
class MeasurementSettings:
    """Limits of the measurement of models.

    Attributes:
        timeout_seconds: time limit of all measurements; models that are not measured in time count as compute only.
        max_model_bytes: larger models are not loaded: their compute outweighs the event loop.
        program: module of the measuring process.
    """

    timeout_seconds: float = 60.0
    max_model_bytes: int = 64 * 2**20
    program: str = _PROGRAM


async def choose_workers(plan: Plan, measuring: MeasurementSettings = MeasurementSettings()) -> Plan:
    """Return the plan with a number of workers, and log the reason."""
    choice = await trio.to_thread.run_sync(_stored_choice, plan, abandon_on_cancel=True) or await _choose(
        plan, measuring
    )
    log.info("workers chosen", workers=choice.count, cores=usable_cores(), reason=choice.reason)
    return replace(plan, processes=choice.count, workers_reason=choice.reason)


def _stored_choice(plan: Plan) -> WorkerChoice | None:
    """Return the number of workers of stored sequences, as another number would not find them; None without any."""
    folder = plan.settings.sequence_store
    counts = () if folder is None else stored_worker_counts(folder)
    return (
        WorkerChoice(counts[0], "--sequence-store has sequences of this number of workers")
        if len(counts) == 1
        else None
    )


async def _choose(plan: Plan, measuring: MeasurementSettings) -> WorkerChoice:
    spec, cores = plan.spec, usable_cores()
    sizes = await trio.to_thread.run_sync(_model_sizes, spec.of(ModelSpec), abandon_on_cancel=True)
    # Models loaded on request are not loaded for measurements.
    models = () if plan.settings.model_control == "explicit" else models_to_measure(spec.services, cores)
    names = [each.name for each in models if sizes[each.name] <= measuring.max_model_bytes]
    measured = await _measured(plan, names, measuring)
    return choose_count(spec.services, cores, measured, model_bytes=sum(sizes.values()), memory_bytes=memory_limit())


async def _measured(plan: Plan, names: Sequence[str], measuring: MeasurementSettings) -> dict[str, MeasuredCall]:
    """Measure calls in a subprocess; omits models that cannot be measured in time."""
    if not names:
        return {}
    options = plan.settings.model_dump(mode="json", exclude_unset=True)
    found: dict[str, Any] = {}
    problem = ""
    with trio.move_on_after(measuring.timeout_seconds) as scope:
        async with trio.open_nursery() as nursery:
            try:
                request = {"options": options, "names": list(names)}
                found, problem = await WorkerProcess(measuring.program).start(nursery, request)
            except (OSError, WorkerExited) as error:
                problem = str(error)
            nursery.cancel_scope.cancel()
    if scope.cancelled_caught:
        problem = f"models not loaded within {measuring.timeout_seconds:g} s"
    if problem:
        log.warning("calls not measured", reason=problem)
    return {name: MeasuredCall(*seconds) for name, seconds in found.items()}


def _model_sizes(models: Sequence[ModelSpec]) -> dict[str, int]:
    return {spec.name: _size(spec.base_path) for spec in models}


def _size(folder: Path) -> int:
    """Return the size of the largest version; 0 on errors, which loading reports."""
    try:
        if folder.is_file():
            return folder.stat().st_size
        versions = [each for each in folder.glob("*") if each.is_dir()] or [folder]
        return max(sum(map(_file_size, each.rglob("*"))) for each in versions)
    except OSError:
        return 0


def _file_size(file: Path) -> int:
    try:
        return file.stat().st_size if file.is_file() else 0
    except OSError:
        return 0
