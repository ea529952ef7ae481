"""Profiling endpoint for administrators: ``POST /v2/profile``.

Body: ``seconds`` (5), ``rate`` (samples per second, 100), ``models`` (models whose layers are timed; default: the
models
called meanwhile; empty: none).
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

import orjson

from ovmstrio.core.callers import Permission
from ovmstrio.core.errors import InvalidRequest
from ovmstrio.serving.profiling import Profiler, VersionCalls
from ovmstrio.transport.http.responses import json_response
from ovmstrio.transport.http.router import rule
from ovmstrio.util.truncation import cut

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from ovmstrio.core.http_messages import HttpAnswer, HttpRequest
    from ovmstrio.core.service import SampledThreads, StackFrame
    from ovmstrio.core.worker_peers import WorkerPeers
    from ovmstrio.protocols.admin.changes import AdminChanges
    from ovmstrio.serving.data_plane import DataPlane
    from ovmstrio.serving.profiling import ProfiledModel, ServerProfile
    from ovmstrio.transport.http.router import Rule

# Document


def _profile_document(profile: ServerProfile) -> dict[str, Any]:
    """Return a profile as JSON; stacks refer to ``frames`` by index."""
    numbers: dict[StackFrame, int] = {}
    threads = [_threads(each, numbers) for each in profile.threads]
    return {
        "seconds": profile.seconds,
        "cpu_seconds": profile.cpu_seconds,
        "native_cpu_seconds": profile.native_seconds,
        "frames": [asdict(frame) for frame in numbers],
        "threads": threads,
        "processes": [asdict(each) for each in profile.processes],
        "models": [_model(each) for each in profile.models],
    }


def _threads(threads: SampledThreads, numbers: dict[StackFrame, int]) -> dict[str, Any]:
    stacks = [
        {"frames": [numbers.setdefault(frame, len(numbers)) for frame in stack], "samples": count}
        for stack, count in threads.stacks.most_common()
    ]
    owner = {"process": threads.process, "service": threads.service} if threads.process else {}
    return {
        **owner,
        "name": threads.name,
        "samples": threads.samples,
        "waiting": threads.waiting,
        "cpu_seconds": threads.cpu_seconds,
        "stacks": stacks,
    }


def _model(model: ProfiledModel) -> dict[str, Any]:
    document = {"name": model.name, "version": model.version, "calls": model.calls}
    if model.times is None:
        return document | {"problem": model.problem}
    layers = [asdict(each) for each in model.times.layers]
    return document | {"runs": model.times.runs, "seconds": model.times.seconds, "layers": layers}


# All workers

_RPC: Final = "profile"
_RPC_GRACE_SECONDS: Final = 10.0  # RPC timeout of peer workers beyond the sampling time

_Document = dict[str, Any]


class _AllWorkersProfiler:
    """Profiler of all workers, which are sampled concurrently; only this worker times model layers."""

    def __init__(self, profiler: Profiler, peers: WorkerPeers) -> None:
        self._profiler = profiler
        self._peers = peers
        peers.register_handler(_RPC, self._answer)

    async def take(self, seconds: float, rate: float, models: Sequence[str] | None) -> _Document:
        answers: dict[int, _Document] = {}

        async def others() -> list[VersionCalls]:
            calls = {worker: [_RPC, seconds, rate] for worker in self._peers.others}
            for worker, each in (await self._peers.call_within(calls, seconds + _RPC_GRACE_SECONDS)).items():
                answers[worker] = orjson.loads(each)
            return [VersionCalls(*called) for each in answers.values() for called in each.pop("called")]

        own = _profile_document(await self._profiler.take(seconds, rate, models, others))
        silent = [worker for worker in self._peers.others if worker not in answers]
        return {**merge_profiles({self._peers.row: own, **answers}), "silent": silent}

    async def _answer(self, seconds: float, rate: float) -> bytes:
        profile = await self._profiler.take(seconds, rate, [])
        called = [[each.name, each.version, each.calls, each.seconds] for each in profile.called]
        return json_response({**_profile_document(profile), "called": called}).content


def merge_profiles(profiles: Mapping[int, _Document]) -> _Document:
    """Merge profiles given by worker index; every frame is listed once."""
    numbers: dict[tuple[str, str, int], int] = {}
    merged: _Document = {
        "seconds": max(each["seconds"] for each in profiles.values()),
        "cpu_seconds": sum(each["cpu_seconds"] for each in profiles.values()),
        "native_cpu_seconds": sum(each["native_cpu_seconds"] for each in profiles.values()),
        "threads": [],
        "processes": [],
        "models": [model for each in profiles.values() for model in each["models"]],
        "workers": [],
    }
    for worker, each in sorted(profiles.items()):
        places = [
            numbers.setdefault((frame["name"], frame["file"], frame["line"]), len(numbers)) for frame in each["frames"]
        ]
        for threads in each["threads"]:
            stacks = [{**stack, "frames": [places[frame] for frame in stack["frames"]]} for stack in threads["stacks"]]
            merged["threads"].append({**threads, "stacks": stacks, "worker": worker})
        merged["processes"] += ({**process, "worker": worker} for process in each["processes"])
        figures = {key: each[key] for key in ("seconds", "cpu_seconds", "native_cpu_seconds")}
        merged["workers"].append({"worker": worker, **figures})
    merged["frames"] = [{"name": name, "file": file, "line": line} for name, file, line in numbers]
    return merged


# Route

_DEFAULTS: Final[dict[str, Any]] = {"seconds": 5, "rate": 100, "models": None}


def profile_rules(
    plane: DataPlane, changes: AdminChanges, read_document: Callable[[bytes], Awaitable[dict[str, Any]]]
) -> list[Rule]:
    """Return the route; it requires the admin scope because a profile shows code paths and costs CPU time."""
    profiler = Profiler(plane)
    all_workers = None if plane.peers is None else _AllWorkersProfiler(profiler, plane.peers)

    async def profile(request: HttpRequest) -> HttpAnswer:
        with changes.requested("profile", request):
            options = _read_options(await read_document(request.body) if request.body else {})
            if all_workers is not None:
                return json_response(await all_workers.take(**options))
            return json_response(_profile_document(await profiler.take(**options)))

    return [rule("/v2/profile", "POST", profile, need=Permission.ADMIN)]


def _read_options(given: dict[str, Any]) -> dict[str, Any]:
    if unknown := given.keys() - _DEFAULTS.keys():
        raise InvalidRequest(
            f"profile: {cut(', '.join(sorted(unknown)), 200)} not known, expected {', '.join(_DEFAULTS)}"
        )
    options = _DEFAULTS | given
    for name in ("seconds", "rate"):
        if isinstance(options[name], bool) or not isinstance(options[name], int | float):
            raise InvalidRequest(f"{name}: expected a number")
        try:
            options[name] = float(options[name])
        except OverflowError:
            raise InvalidRequest(f"{name}: number too large") from None
    models = options["models"]
    if models is not None and not (isinstance(models, list) and all(isinstance(name, str) for name in models)):
        raise InvalidRequest("models: expected a list of names")
    return options
