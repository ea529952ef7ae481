"""On-request profiling: stack samples of Python threads, and layer times of models.

::

    Profiler.take ─┬─ stacks of worker processes, sampled by each of them
                   ├─ stacks of all threads, sampled in a separate thread
                   └─ then layer times of the models called meanwhile, each on a temporary compiled copy
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from functools import partial
from threading import get_ident
from typing import TYPE_CHECKING, Final

import trio

from ovmstrio.core.errors import InvalidRequest, Overloaded, ServerError
from ovmstrio.core.resource_registry import current_resource_registry
from ovmstrio.core.service import LayeredServable
from ovmstrio.isolation.thread_pool import WorkerThreads
from ovmstrio.isolation.worker_process import WorkerExited
from ovmstrio.telemetry.process_metrics import process_cpu_seconds
from ovmstrio.telemetry.stack_sampling import StackSampler

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    from ovmstrio.core.resource_registry import ProcessResource
    from ovmstrio.core.service import LayerTimes, SampledThreads
    from ovmstrio.serving.data_plane import DataPlane


class WorkerSamples:
    """Stack samples of all worker processes.

    Attributes:
        threads: samples by process.
        problems: why a process was not sampled, by pid.
    """

    def __init__(self) -> None:
        self.threads: list[SampledThreads] = []
        self.problems: dict[int, str] = {}
        self._sampled_pids: set[int] = set()

    def problem_of(self, pid: int) -> str:
        """Return why a process was not sampled; empty if it was."""
        return "" if pid in self._sampled_pids else self.problems.get(pid, "started during the profile")

    async def take(self, seconds: float, rate: float) -> None:
        """Sample all worker processes for ``seconds``, at ``rate`` samples per second."""
        async with trio.open_nursery() as nursery:
            for service, process in current_resource_registry().processes():
                if process.pid is not None:
                    nursery.start_soon(self._sample, service, process, process.pid, seconds, rate)

    async def _sample(self, service: str, process: ProcessResource, pid: int, seconds: float, rate: float) -> None:
        try:
            sampled = await process.sample(seconds, rate)
        except WorkerExited:
            self.problems[pid] = "ended during the profile"
        except (OSError, ValueError) as error:
            self.problems[pid] = str(error)
        else:
            self._sampled_pids.add(pid)
            for each in sampled:
                each.process, each.service = pid, service
            self.threads += sampled


if TYPE_CHECKING:
    ProfileOthers = Callable[[], Awaitable[Iterable["VersionCalls"]]]


MAX_SECONDS: Final = 60.0
MAX_RATE: Final = 1000.0
_MAX_MODELS: Final = 8
_LAYER_SECONDS: Final = 1.0
"""Duration of layer timing per model, without compilation."""

_WORK_LOOP_NAME: Final = WorkerThreads._work.__qualname__  # noqa: SLF001 - function name in its threads' stacks
_DIGITS: Final = "0123456789"


@dataclass(frozen=True, slots=True)
class ProfiledModel:
    """Layer times of one model version, or why there are none."""

    name: str
    version: str
    calls: int
    times: LayerTimes | None = None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class VersionCalls:
    """A version called during the profile: number of finished calls and their total duration."""

    name: str
    version: str
    calls: int
    seconds: float


@dataclass(frozen=True, slots=True)
class ProfiledProcess:
    """A worker process of a service: its CPU time, and why it was not sampled (empty if it was)."""

    service: str
    pid: int
    cpu_seconds: float
    problem: str = ""


@dataclass(slots=True)
class ServerProfile:
    """Profile of the server over ``seconds``.

    ``cpu_seconds`` is the CPU time of the process; ``native_seconds`` is its part in threads unknown to Python, such as
    OpenVINO's.  Inferences on the event loop count for the loop's thread.
    """

    seconds: float
    cpu_seconds: float
    native_seconds: float
    threads: list[SampledThreads]
    models: list[ProfiledModel] = field(default_factory=list)
    processes: list[ProfiledProcess] = field(default_factory=list)
    called: list[VersionCalls] = field(default_factory=list)


class Profiler:
    """Takes profiles of one server, one at a time."""

    def __init__(self, plane: DataPlane) -> None:
        self._plane = plane
        self._is_busy = False

    async def take(
        self, seconds: float, rate: float, models: Sequence[str] | None, others: ProfileOthers | None = None
    ) -> ServerProfile:
        """Sample for ``seconds``, then time the layers of models.

        Args:
            seconds: duration, up to ``MAX_SECONDS``.
            rate: samples per second, from 1 to ``MAX_RATE``.
            models: models whose layers are timed; None for the called ones with the largest total duration.
            others: profiles the other worker processes meanwhile and returns what was called there.

        Raises:
            InvalidRequest: an argument is out of range, or there are too many models.
            NotFound: a model is unknown.
            Overloaded: another profile is running.
        """
        _check("seconds", seconds, 0.01, MAX_SECONDS)
        _check("rate", rate, 1, MAX_RATE)
        if models is not None and len(models) > _MAX_MODELS:
            raise InvalidRequest(f"models: expected at most {_MAX_MODELS}, got {len(models)}")
        for name in models or ():
            self._plane.registry.peek(name)
        if self._is_busy:
            raise Overloaded("another profile is running; try again later", retry_after_seconds=seconds)
        self._is_busy = True
        try:
            before, processes = self._version_totals(), _process_cpu_seconds()
            elsewhere: list[VersionCalls] = []
            inside = WorkerSamples()
            async with trio.open_nursery() as nursery:
                if others is not None:
                    nursery.start_soon(_extend, elsewhere, others)
                nursery.start_soon(inside.take, seconds, rate)
                profile = await _sample_threads(seconds, rate)
                worked = _cpu_since(processes)
                profile.called = self._called_since(before)
            profile.threads += inside.threads
            profile.processes = [replace(each, problem=inside.problem_of(each.pid)) for each in worked]
            found = _models_of([*profile.called, *elsewhere])
            if models is not None:
                found = [self._requested_model(name, found) for name in models]
            timed = [await self._time_layers(each, is_requested=models is not None) for each in found[:_MAX_MODELS]]
            profile.models = [each for each in timed if each.times is not None or each.problem]
            return profile
        finally:
            self._is_busy = False

    def _version_totals(self) -> dict[tuple[str, str], tuple[int, float]]:
        return {
            key: (each.compute.count, each.compute.seconds)
            for key, each in self._plane.call_statistics.versions.items()
        }

    def _called_since(self, before: dict[tuple[str, str], tuple[int, float]]) -> list[VersionCalls]:
        found = []
        for (name, version), (count, seconds) in self._version_totals().items():
            calls, took = before.get((name, version), (0, 0.0))
            if count > calls:
                found.append(VersionCalls(name, version, count - calls, seconds - took))
        return found

    def _requested_model(self, name: str, called: Sequence[ProfiledModel]) -> ProfiledModel:
        return ProfiledModel(name, "", sum(each.calls for each in called if each.name == name))

    async def _time_layers(self, model: ProfiledModel, *, is_requested: bool) -> ProfiledModel:
        """Time the layers of a model; a model without layers is a problem only if it was requested by name."""
        name, version, calls = model.name, model.version, model.calls
        try:
            with await self._plane.registry.lease(name, version) as lease:
                servable, version = lease.servable, lease.version
                if isinstance(servable, LayeredServable):
                    return ProfiledModel(name, version, calls, await servable.layer_times(_LAYER_SECONDS))
        except ServerError as error:
            return ProfiledModel(name, version, calls, problem=error.message)
        problem = "not an OpenVINO model of this process" if is_requested else ""
        return ProfiledModel(name, version, calls, problem=problem)


async def _extend(elsewhere: list[VersionCalls], others: ProfileOthers) -> None:
    elsewhere += await others()


def _models_of(called: Iterable[VersionCalls]) -> list[ProfiledModel]:
    """Sum calls over all workers, longest total duration first."""
    sums: dict[tuple[str, str], tuple[float, int]] = {}
    for each in called:
        seconds, calls = sums.get((each.name, each.version), (0.0, 0))
        sums[each.name, each.version] = seconds + each.seconds, calls + each.calls
    return [ProfiledModel(*key, calls) for key, (_, calls) in sorted(sums.items(), key=lambda pair: -pair[1][0])]


async def _sample_threads(seconds: float, rate: float) -> ServerProfile:
    sampler = StackSampler(rate, partial(_role, get_ident()))
    begun, worked = time.perf_counter(), time.process_time()
    try:
        threads = await trio.to_thread.run_sync(sampler.run, seconds, abandon_on_cancel=True)
    finally:
        sampler.stop()
    worked = time.process_time() - worked
    native = max(0.0, worked - sum(each.cpu_seconds or 0.0 for each in threads))
    return ServerProfile(time.perf_counter() - begun, worked, native, threads)


def _process_cpu_seconds() -> dict[tuple[str, int], float]:
    pids = [
        (owner, process.pid) for owner, process in current_resource_registry().processes() if process.pid is not None
    ]
    return {(owner, pid): took for owner, pid in pids if (took := process_cpu_seconds(pid)) is not None}


def _cpu_since(before: dict[tuple[str, int], float]) -> list[ProfiledProcess]:
    """Return the CPU time of each process since ``before``, largest first; for a new process, all of it."""
    took = [ProfiledProcess(*key, round(now - before.get(key, 0.0), 3)) for key, now in _process_cpu_seconds().items()]
    return sorted(took, key=lambda each: -each.cpu_seconds)


def _role(loop: int, number: int, name: str, functions: frozenset[str]) -> str:
    if number == loop:
        return "event loop"
    if _WORK_LOOP_NAME in functions:
        return "worker threads"
    # Trio names threads "<function> from <task>"; pools append numbers.
    return name.partition(" from ")[0].rstrip(_DIGITS).rstrip(" -_") or "native threads that call Python"


def _check(name: str, value: float, minimum: float, maximum: float) -> None:
    if not minimum <= value <= maximum:
        raise InvalidRequest(f"{name}: expected {minimum:g} to {maximum:g}, got {value:g}")
