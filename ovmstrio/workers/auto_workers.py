"""How many processes serve a plan that leaves it open: measured before the first of them is started."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import structlog
import trio

from ovmstrio.config.specs import ModelSpec
from ovmstrio.isolation.worker_process import WorkerEnded, WorkerProcess
from ovmstrio.models.sequences.store import kept_counts
from ovmstrio.server.memory_limit import memory_limit
from ovmstrio.server.worker_count import MeasuredCall, WorkerChoice, choose_count, worth_measuring
from ovmstrio.util.cores import usable_cores

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ovmstrio.server.plan import Plan

__all__ = ["choose_workers"]

log = structlog.get_logger(__name__)

_PROGRAM: Final = "ovmstrio.workers.measuring"


@dataclass(frozen=True, slots=True)
class Measuring:
    """How calls of models are measured.

    Attributes:
        timeout_seconds: bound of all measurements together; a model that is not measured then counts as computing.
        max_model_bytes: models of larger files are not loaded to be measured: their computing outweighs the event loop.
        program: the module that a process runs to measure.
    """

    timeout_seconds: float = 60.0
    max_model_bytes: int = 64 * 2**20
    program: str = _PROGRAM


async def choose_workers(plan: Plan, measuring: Measuring = Measuring()) -> Plan:
    """Decide how many processes serve a plan, and give it with that; the log tells why.

    Cancellation: at once; what measures is killed.
    """
    choice = await trio.to_thread.run_sync(_kept, plan, abandon_on_cancel=True) or await _choose(plan, measuring)
    log.info("workers chosen", workers=choice.count, cores=usable_cores(), reason=choice.reason)
    return replace(plan, processes=choice.count, workers_reason=choice.reason)


def _kept(plan: Plan) -> WorkerChoice | None:
    """Choose those whose sequences are kept, which a server of another number would not find; None if none are."""
    folder = plan.settings.sequence_store
    counts = () if folder is None else kept_counts(folder)
    return WorkerChoice(counts[0], "--sequence_store has the sequences of so many") if len(counts) == 1 else None


async def _choose(plan: Plan, measuring: Measuring) -> WorkerChoice:
    spec, cores = plan.spec, usable_cores()
    sizes = await trio.to_thread.run_sync(_sizes, spec.of(ModelSpec), abandon_on_cancel=True)
    # Where models are loaded when somebody asks for them, none is loaded without that.
    models = () if plan.settings.model_control == "explicit" else worth_measuring(spec.services, cores)
    names = [each.name for each in models if sizes[each.name] <= measuring.max_model_bytes]
    measured = await _measured(plan, names, measuring)
    return choose_count(spec.services, cores, measured, model_bytes=sum(sizes.values()), memory_bytes=memory_limit())


async def _measured(plan: Plan, names: Sequence[str], measuring: Measuring) -> dict[str, MeasuredCall]:
    """Have a process measure calls of models; nothing of those that cannot be measured in time."""
    if not names:
        return {}
    options = plan.settings.model_dump(mode="json", exclude_unset=True)
    found: dict[str, Any] = {}
    problem = ""
    with trio.move_on_after(measuring.timeout_seconds) as scope:
        async with trio.open_nursery() as nursery:
            try:
                asked = {"options": options, "names": list(names)}
                found, problem = await WorkerProcess(measuring.program).start(nursery, asked)
            except (OSError, WorkerEnded) as error:
                problem = str(error)
            nursery.cancel_scope.cancel()
    if scope.cancelled_caught:
        problem = f"the models were not loaded in {measuring.timeout_seconds:g} s"
    if problem:
        log.warning("calls not measured", reason=problem)
    return {name: MeasuredCall(*seconds) for name, seconds in found.items()}


def _sizes(models: Sequence[ModelSpec]) -> dict[str, int]:
    """Tell how large the files of models are, of the largest version of each."""
    return {spec.name: _size(spec.base_path) for spec in models}


def _size(folder: Path) -> int:
    """Tell how large the largest version is; 0 of what cannot be looked at, which loading it will tell."""
    try:
        if folder.is_file():
            return folder.stat().st_size
        versions = [each for each in folder.glob("*") if each.is_dir()] or [folder]
        return max(sum(map(_length, each.rglob("*"))) for each in versions)
    except OSError:
        return 0


def _length(file: Path) -> int:
    try:
        return file.stat().st_size if file.is_file() else 0
    except OSError:
        return 0
