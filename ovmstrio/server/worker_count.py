"""How many processes serve a configuration: as many as was said, or as its event loops need.

An event loop is one core's, and what it does for a call, Python code above all, holds up everything else in its
process.  What OpenVINO's threads do fills the other cores from one process.  So it is the part of a call that is the
loop's which tells how many processes fill a machine: all of it, and there is one for each core; a hundredth, and one is
enough.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ovmstrio.config.remote_entries import RemoteSpec
from ovmstrio.config.specs import GraphSpec, HandlerSpec, ModelSpec, OpPipelineSpec, PipelineSpec
from ovmstrio.util.cores import usable_cores

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ovmstrio.config.specs import ServableSpec, ServerSpec
    from ovmstrio.server.settings import ServerSettings

__all__ = ["MeasuredCall", "WorkerChoice", "choose_count", "count_workers", "loop_bound", "worth_measuring"]

_OF_PYTHON: Final = (GraphSpec, HandlerSpec, OpPipelineSpec, PipelineSpec)
"""What may run Python code of users, which is not called without a client that wants it."""
_OWN_SECONDS: Final = 80e-6
"""What the server itself does for a call on the event loop: it is read, checked, answered and counted."""
_PART_OF_MEMORY: Final = 0.5
"""How much of the memory copies of models may take."""


@dataclass(frozen=True, slots=True)
class MeasuredCall:
    """What one call of a model takes: processor time of the event loop, and of threads beside it, in seconds."""

    loop_seconds: float
    other_seconds: float

    @property
    def loop_part(self) -> float:
        """How much of all is the event loop's, with what the server does for a call: from 0 to 1."""
        on_loop = self.loop_seconds + _OWN_SECONDS
        return on_loop / (on_loop + self.other_seconds)


@dataclass(frozen=True, slots=True)
class WorkerChoice:
    """How many processes, and why."""

    count: int
    reason: str


def count_workers(settings: ServerSettings, spec: ServerSpec) -> int:
    """Tell how many processes serve a configuration: as many as was said, or as is known without measuring.

    For ``auto`` that is one for models, and as many as there are cores that the process may use where there may be
    Python code of users.
    """
    return settings.workers or choose_count(spec.services, usable_cores(), {}).count


def loop_bound(services: Sequence[ServableSpec]) -> ServableSpec | None:
    """Give one of the services whose calls are work of an event loop or of Python code, whatever they are."""
    return next((each for each in services if isinstance(each, (*_OF_PYTHON, RemoteSpec))), None)


def worth_measuring(services: Sequence[ServableSpec], cores: int) -> list[ModelSpec]:
    """List the models by whose times the number is decided: none where it is known already."""
    if cores == 1 or loop_bound(services) is not None:
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
    """Decide how many processes serve some services.

    Args:
        services: what is configured.
        cores: how many the server may use.
        measured: what calls of models take, by name; of those that are not there computing is taken to be nearly all.
        model_bytes: how large the files of all models are, of which each process has a copy.
        memory_bytes: what the server may have; 0 if nobody knows.
    """
    if cores == 1:
        return WorkerChoice(1, "the server may use one core")
    wanted = _wanted(services, cores, measured)
    most = int(_PART_OF_MEMORY * memory_bytes / model_bytes) if model_bytes and memory_bytes else cores
    if wanted.count <= max(1, most):
        return wanted
    copies = f"more copies of {model_bytes / 1e9:.1f} GB of models than that do not fit into half of the memory"
    return WorkerChoice(max(1, most), f"{wanted.reason}; {copies}")


def _wanted(services: Sequence[ServableSpec], cores: int, measured: Mapping[str, MeasuredCall]) -> WorkerChoice:
    bound = loop_bound(services)
    if bound is not None:
        what = "is asked by the event loop" if isinstance(bound, RemoteSpec) else "may run Python code"
        return WorkerChoice(cores, f"the {bound.kind} {bound.name!r} {what}, of which one process fills one core")
    parts = {name: each.loop_part for name, each in measured.items()}
    if not parts:
        return WorkerChoice(1, "computing is most of what is served, and fills all cores from one process")
    name = max(parts, key=lambda each: parts[each])
    count = min(cores, math.ceil(parts[name] * cores))
    times = f"{measured[name].other_seconds * 1e3:.2f} ms beside it"
    reason = f"of a call of the model {name!r} {parts[name]:.0%} is work of the event loop, and {times}"
    return WorkerChoice(count, reason)
