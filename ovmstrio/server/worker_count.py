"""Number of worker processes: configured, or derived from the services.

An event loop uses one core, and Python code on it delays all calls of its process; OpenVINO's threads use the other
cores from one process.  So the share of a call that runs on the event loop decides: a share of 100 % needs one process
per
core, 1 % needs one process.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ovmstrio.config.remote_entries import RemoteSpec
from ovmstrio.config.specs import GraphSpec, HandlerSpec, ModelSpec, OpPipelineSpec, PipelineSpec
from ovmstrio.util.container_limits import usable_cores

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ovmstrio.config.specs import ServableSpec, ServerSpec
    from ovmstrio.server.settings import ServerSettings

_PYTHON_KINDS: Final = (GraphSpec, HandlerSpec, OpPipelineSpec, PipelineSpec)
"""Kinds that may run user Python code."""
_SERVER_SECONDS: Final = 80e-6
"""Time of the server itself per call on the event loop."""
_MAX_MEMORY_SHARE: Final = 0.5
"""Share of memory for copies of models."""


@dataclass(frozen=True, slots=True)
class MeasuredCall:
    """CPU seconds of one call on the event loop and in other threads."""

    loop_seconds: float
    other_seconds: float

    @property
    def loop_part(self) -> float:
        """Share of the event loop, from 0 to 1, with the server's own time."""
        on_loop = self.loop_seconds + _SERVER_SECONDS
        return on_loop / (on_loop + self.other_seconds)


@dataclass(frozen=True, slots=True)
class WorkerChoice:
    """Number of workers and the reason."""

    count: int
    reason: str


def count_workers(settings: ServerSettings, spec: ServerSpec) -> int:
    """Return the configured number of workers, or an automatic one without measurements.

    Automatic is one for models, and the number of usable cores if user Python code may run.
    """
    return settings.workers or choose_count(spec.services, usable_cores(), {}).count


def find_loop_bound(services: Sequence[ServableSpec]) -> ServableSpec | None:
    """Return a service whose calls always run on the event loop or in Python code, or None."""
    return next((each for each in services if isinstance(each, (*_PYTHON_KINDS, RemoteSpec))), None)


def models_to_measure(services: Sequence[ServableSpec], cores: int) -> list[ModelSpec]:
    """Return the models to measure; none if the number of workers is already known."""
    if cores == 1 or find_loop_bound(services) is not None:
        return []
    return [each for each in services if isinstance(each, ModelSpec) and not each.stateful]


def choose_count(
    services: Sequence[ServableSpec],
    cores: int,
    measured: Mapping[str, MeasuredCall],
    *,
    model_bytes: int = 0,
    memory_bytes: int = 0,
) -> WorkerChoice:
    """Return the number of workers for services.

    Args:
        services: configured services.
        cores: usable cores.
        measured: measured calls by model name; other models count as compute only.
        model_bytes: size of all model files, of which each worker has a copy.
        memory_bytes: memory limit; 0 if unknown.
    """
    if cores == 1:
        return WorkerChoice(1, "one usable core")
    wanted = _wanted(services, cores, measured)
    most = int(_MAX_MEMORY_SHARE * memory_bytes / model_bytes) if model_bytes and memory_bytes else cores
    if wanted.count <= max(1, most):
        return wanted
    copies = f"more copies of {model_bytes / 1e9:.1f} GB of models do not fit into half of the memory"
    return WorkerChoice(max(1, most), f"{wanted.reason}; {copies}")


def _wanted(services: Sequence[ServableSpec], cores: int, measured: Mapping[str, MeasuredCall]) -> WorkerChoice:
    bound = find_loop_bound(services)
    if bound is not None:
        what = "is called from the event loop" if isinstance(bound, RemoteSpec) else "may run Python code"
        return WorkerChoice(cores, f"the {bound.kind} {bound.name!r} {what}, which uses one core per process")
    parts = {name: each.loop_part for name, each in measured.items()}
    if not parts:
        return WorkerChoice(1, "mostly OpenVINO compute, which uses all cores from one process")
    name = max(parts, key=lambda each: parts[each])
    count = min(cores, math.ceil(parts[name] * cores))
    times = f"{measured[name].other_seconds * 1e3:.2f} ms in other threads"
    reason = f"a call of model {name!r} spends {parts[name]:.0%} on the event loop, {times}"
    return WorkerChoice(count, reason)
