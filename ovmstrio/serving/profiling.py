"""What the server's time goes to, looked at for a while on request: threads of Python, and layers of models.

::

    Profiler.take ─┬─ stacks of worker processes, sampled by each of them      dataplane/process_samples.py
                   ├─ stacks of all threads, sampled in a thread of its own      work/stack_sampling.py
                   └─ then layers of the models that were called meanwhile,      openvino/layer_clock.py
                      each on a copy that is compiled for it and gone afterwards
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from functools import partial
from threading import get_ident
from typing import TYPE_CHECKING, Final

import trio

from ovmstrio.core.errors import InvalidRequest, Overloaded, ServerError
from ovmstrio.core.resource_registry import current_census
from ovmstrio.core.service import LayeredServable
from ovmstrio.isolation.thread_pool import WorkerThreads
from ovmstrio.isolation.worker_process import WorkerEnded
from ovmstrio.telemetry.process_metrics import processor_seconds
from ovmstrio.telemetry.stack_sampling import StackSampler

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    from ovmstrio.core.resource_registry import CountedProcess
    from ovmstrio.core.service import LayerTimes, SampledThreads
    from ovmstrio.serving.data_plane import DataPlane

__all__ = [
    "MOST_RATE",
    "MOST_SECONDS",
    "CalledVersion",
    "ProcessSamples",
    "ProfiledModel",
    "ProfiledProcess",
    "Profiler",
    "ServerProfile",
]

# ----------------------------------------------------------------------
# What the threads of worker processes do, looked at for a while in all of them at the same time
# ----------------------------------------------------------------------


class ProcessSamples:
    """Samples of all worker processes that there are when they are taken.

    Attributes:
        threads: what was seen, of each process by itself.
        problems: why a process could not be looked at, by its number.
    """

    def __init__(self) -> None:
        self.threads: list[SampledThreads] = []
        self.problems: dict[int, str] = {}
        self._seen: set[int] = set()

    def problem_of(self, pid: int) -> str:
        """Tell why a process was not looked at; empty if it was."""
        return "" if pid in self._seen else self.problems.get(pid, "it was started meanwhile")

    async def take(self, seconds: float, rate: float) -> None:
        """Look at all of them for so long.

        Args:
            seconds: how long.
            rate: samples a second.

        Cancellation: at once; the processes go on for as long as they were asked to.
        """
        async with trio.open_nursery() as nursery:
            for service, process in current_census().processes():
                if process.pid is not None:
                    nursery.start_soon(self._sample, service, process, process.pid, seconds, rate)

    async def _sample(self, service: str, process: CountedProcess, pid: int, seconds: float, rate: float) -> None:
        try:
            sampled = await process.sample(seconds, rate)
        except WorkerEnded:
            self.problems[pid] = "it ended meanwhile"
        except (OSError, ValueError) as error:
            self.problems[pid] = str(error)
        else:
            self._seen.add(pid)
            for each in sampled:
                each.process, each.service = pid, service
            self.threads += sampled


# ----------------------------------------------------------------------
# What the server's time goes to, looked at for a while on request: threads of Python, and layers of models
# ----------------------------------------------------------------------

if TYPE_CHECKING:
    OfOthers = Callable[[], Awaitable[Iterable["CalledVersion"]]]


MOST_SECONDS: Final = 60.0
MOST_RATE: Final = 1000.0
_MOST_MODELS: Final = 8
_LAYER_SECONDS: Final = 1.0
"""How long the layers of each model are timed, beside compiling it."""

_WORK: Final = WorkerThreads._work.__qualname__  # noqa: SLF001 - the name of the loop of its threads
_DIGITS: Final = "0123456789"


@dataclass(frozen=True, slots=True)
class ProfiledModel:
    """One version of a model: the times of its layers, or why there are none."""

    name: str
    version: str
    calls: int
    times: LayerTimes | None = None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class CalledVersion:
    """One version of a service: how many calls of it were answered meanwhile, and how long they took in all."""

    name: str
    version: str
    calls: int
    seconds: float


@dataclass(frozen=True, slots=True)
class ProfiledProcess:
    """A process that works for a service: what it took, and why its threads were not looked at; empty if they were."""

    service: str
    pid: int
    cpu_seconds: float
    problem: str = ""


@dataclass(slots=True)
class ServerProfile:
    """What was seen in so many seconds.

    ``cpu_seconds`` are those of the whole process, of which ``native_seconds`` are of threads that Python knows nothing
    of, as OpenVINO's are; inferences on the event loop are the loop's.
    """

    seconds: float
    cpu_seconds: float
    native_seconds: float
    threads: list[SampledThreads]
    models: list[ProfiledModel] = field(default_factory=list)
    processes: list[ProfiledProcess] = field(default_factory=list)
    called: list[CalledVersion] = field(default_factory=list)


class Profiler:
    """Takes profiles of one server, one at a time.

    Args:
        plane: knows what is called.
    """

    def __init__(self, plane: DataPlane) -> None:
        self._plane = plane
        self._is_busy = False

    async def take(
        self, seconds: float, rate: float, models: Sequence[str] | None, others: OfOthers | None = None
    ) -> ServerProfile:
        """Look for so long, and time the layers of models afterwards.

        Args:
            seconds: how long, above 0 and up to ``MOST_SECONDS``.
            rate: samples a second, from 1 to ``MOST_RATE``.
            models: whose layers are timed; None for those that were called, the ones that took most first.
            others: is called to have other processes looked at meanwhile, and gives what was called there.

        Raises:
            InvalidRequest: an argument is out of its bounds, or there are too many models.
            NotFound: there is no such model.
            Overloaded: a profile is being taken already.

        Ownership: the thread that samples, and copies of models.
        Cancellation: at once; the thread ends within a sample, or when the layers of one model have been timed.
        """
        _check("seconds", seconds, 0.01, MOST_SECONDS)
        _check("rate", rate, 1, MOST_RATE)
        if models is not None and len(models) > _MOST_MODELS:
            raise InvalidRequest(f"models: expected at most {_MOST_MODELS}, got {len(models)}")
        for name in models or ():
            self._plane.registry.peek(name)
        if self._is_busy:
            raise Overloaded(
                "a profile is being taken already, and there is one at a time", retry_after_seconds=seconds
            )
        self._is_busy = True
        try:
            before, processes = self._work_of_versions(), _processes()
            elsewhere: list[CalledVersion] = []
            inside = ProcessSamples()
            async with trio.open_nursery() as nursery:
                if others is not None:
                    nursery.start_soon(_extend, elsewhere, others)
                nursery.start_soon(inside.take, seconds, rate)
                profile = await _sampled(seconds, rate)
                worked = _worked_since(processes)
                profile.called = self._called_since(before)
            profile.threads += inside.threads
            profile.processes = [replace(each, problem=inside.problem_of(each.pid)) for each in worked]
            found = _models_of([*profile.called, *elsewhere])
            if models is not None:
                found = [self._asked_for(name, found) for name in models]
            timed = [await self._timed(each, is_asked=models is not None) for each in found[:_MOST_MODELS]]
            profile.models = [each for each in timed if each.times is not None or each.problem]
            return profile
        finally:
            self._is_busy = False

    def _work_of_versions(self) -> dict[tuple[str, str], tuple[int, float]]:
        """Tell how many calls of each version were answered, and how long they took in all."""
        return {
            key: (each.compute.count, each.compute.seconds)
            for key, each in self._plane.call_statistics.versions.items()
        }

    def _called_since(self, before: dict[tuple[str, str], tuple[int, float]]) -> list[CalledVersion]:
        """List what was called."""
        found = []
        for (name, version), (count, seconds) in self._work_of_versions().items():
            calls, took = before.get((name, version), (0, 0.0))
            if count > calls:
                found.append(CalledVersion(name, version, count - calls, seconds - took))
        return found

    def _asked_for(self, name: str, called: Sequence[ProfiledModel]) -> ProfiledModel:
        """Give a model by its name, with the calls of all its versions."""
        return ProfiledModel(name, "", sum(each.calls for each in called if each.name == name))

    async def _timed(self, model: ProfiledModel, *, is_asked: bool) -> ProfiledModel:
        """Time the layers of one, if it has any; of others that is told only to who has asked for them."""
        name, version, calls = model.name, model.version, model.calls
        try:
            with await self._plane.registry.lease(name, version) as lease:
                servable, version = lease.servable, lease.version
                if isinstance(servable, LayeredServable):
                    return ProfiledModel(name, version, calls, await servable.layer_times(_LAYER_SECONDS))
        except ServerError as error:
            return ProfiledModel(name, version, calls, problem=error.message)
        problem = "it is no model that OpenVINO runs in this process" if is_asked else ""
        return ProfiledModel(name, version, calls, problem=problem)


async def _extend(elsewhere: list[CalledVersion], others: OfOthers) -> None:
    elsewhere += await others()


def _models_of(called: Iterable[CalledVersion]) -> list[ProfiledModel]:
    """List what was called anywhere, what took most first."""
    sums: dict[tuple[str, str], tuple[float, int]] = {}
    for each in called:
        seconds, calls = sums.get((each.name, each.version), (0.0, 0))
        sums[each.name, each.version] = seconds + each.seconds, calls + each.calls
    return [ProfiledModel(*key, calls) for key, (_, calls) in sorted(sums.items(), key=lambda pair: -pair[1][0])]


async def _sampled(seconds: float, rate: float) -> ServerProfile:
    """Sample all threads.

    Cancellation: at once; the thread ends within a sample.
    """
    sampler = StackSampler(rate, partial(_role, get_ident()))
    begun, worked = time.perf_counter(), time.process_time()
    try:
        threads = await trio.to_thread.run_sync(sampler.run, seconds, abandon_on_cancel=True)
    finally:
        sampler.stop()
    worked = time.process_time() - worked
    native = max(0.0, worked - sum(each.cpu_seconds or 0.0 for each in threads))
    return ServerProfile(time.perf_counter() - begun, worked, native, threads)


def _processes() -> dict[tuple[str, int], float]:
    """Tell how long the processes of services have had processors."""
    pids = [(owner, process.pid) for owner, process in current_census().processes() if process.pid is not None]
    return {(owner, pid): took for owner, pid in pids if (took := processor_seconds(pid)) is not None}


def _worked_since(before: dict[tuple[str, int], float]) -> list[ProfiledProcess]:
    """List the processes that there are, what took most first; one that was started meanwhile took all that it has."""
    took = [ProfiledProcess(*key, round(now - before.get(key, 0.0), 3)) for key, now in _processes().items()]
    return sorted(took, key=lambda each: -each.cpu_seconds)


def _role(loop: int, number: int, name: str, functions: frozenset[str]) -> str:
    if number == loop:
        return "event loop"
    if _WORK in functions:
        return "worker threads"
    # Threads of trio's are called after what they run, and for whom; those of a kind have numbers.
    return name.partition(" from ")[0].rstrip(_DIGITS).rstrip(" -_") or "native threads that call Python"


def _check(name: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:
        raise InvalidRequest(f"{name}: expected {least:g} to {most:g}, got {value:g}")
