"""What the server's time goes to, for administrators: ``POST /v2/profile``.

The body may have ``seconds`` (5), ``rate`` (samples a second, 100) and ``models`` (names of those whose layers are
timed; by default the ones that were called meanwhile, and with an empty list none).
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

import orjson

from ovmstrio.core.errors import InvalidRequest
from ovmstrio.serving.profiling import CalledVersion, Profiler
from ovmstrio.transport.http.responses import json_answer
from ovmstrio.transport.http.router import rule
from ovmstrio.util.truncation import cut

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from ovmstrio.core.http import HttpAnswer, HttpRequest
    from ovmstrio.core.service import LayerTime, SampledThreads, StackFrame
    from ovmstrio.core.worker_peers import Siblings
    from ovmstrio.protocols.admin.changes import Changes
    from ovmstrio.serving.data_plane import DataPlane
    from ovmstrio.serving.profiling import ProfiledModel, ServerProfile
    from ovmstrio.transport.http.router import Rule

__all__ = ["WholeProfile", "merged_profiles", "profile_document", "profile_rules"]

# ----------------------------------------------------------------------
# A profile as plain data, as JSON has it
# ----------------------------------------------------------------------


def profile_document(profile: ServerProfile) -> dict[str, Any]:
    """Describe what was seen; stacks are numbers of frames, which are there once."""
    numbers: dict[StackFrame, int] = {}
    threads = [_threads(each, numbers) for each in profile.threads]
    return {
        "seconds": profile.seconds,
        "cpu_seconds": profile.cpu_seconds,
        "native_cpu_seconds": profile.native_seconds,
        "frames": [{"name": frame.name, "file": frame.file, "line": frame.line} for frame in numbers],
        "threads": threads,
        "processes": [asdict(each) for each in profile.processes],
        "models": [_model(each) for each in profile.models],
    }


def _threads(threads: SampledThreads, numbers: dict[StackFrame, int]) -> dict[str, Any]:
    """Describe threads; a stack is the numbers of its frames, the outermost first."""
    stacks = [
        {"frames": [numbers.setdefault(frame, len(numbers)) for frame in stack], "samples": count}
        for stack, count in threads.stacks.most_common()
    ]
    whose = {"process": threads.process, "service": threads.service} if threads.process else {}
    return {
        **whose,
        "name": threads.name,
        "samples": threads.samples,
        "waiting": threads.waiting,
        "cpu_seconds": threads.cpu_seconds,
        "stacks": stacks,
    }


def _model(model: ProfiledModel) -> dict[str, Any]:
    told = {"name": model.name, "version": model.version, "calls": model.calls}
    if model.times is None:
        return told | {"problem": model.problem}
    layers = [_layer(each) for each in model.times.layers]
    return told | {"runs": model.times.runs, "seconds": model.times.seconds, "layers": layers}


def _layer(layer: LayerTime) -> dict[str, Any]:
    return {"name": layer.name, "type": layer.type, "runs_as": layer.runs_as, "seconds": layer.seconds}


# ----------------------------------------------------------------------
# A profile of all processes of a server, of which each is looked at by itself, all at the same time
# ----------------------------------------------------------------------

_QUESTION: Final = "profile"
_MORE_SECONDS: Final = 10.0
"""How much longer than they look others may take to tell."""

_Document = dict[str, Any]


class WholeProfile:
    """Takes profiles of all processes.

    Args:
        profiler: of this process.
        siblings: the others.
    """

    def __init__(self, profiler: Profiler, siblings: Siblings) -> None:
        self._profiler = profiler
        self._siblings = siblings
        siblings.answer_with(_QUESTION, self._answer)

    async def take(self, seconds: float, rate: float, models: Sequence[str] | None) -> _Document:
        """Look for so long, and time the layers of models afterwards, which is done by this process alone.

        Raises, Cancellation: as :meth:`Profiler.take`; the others go on for as long as they were asked to.
        """
        told: dict[int, _Document] = {}

        async def others() -> list[CalledVersion]:
            questions = {row: [_QUESTION, seconds, rate] for row in self._siblings.others}
            for row, each in (await self._siblings.ask_soon(questions, seconds + _MORE_SECONDS)).items():
                told[row] = orjson.loads(each)
            return [CalledVersion(*called) for each in told.values() for called in each.pop("called")]

        own = profile_document(await self._profiler.take(seconds, rate, models, others))
        silent = [row for row in self._siblings.others if row not in told]
        return {**merged_profiles({self._siblings.row: own, **told}), "silent": silent}

    async def _answer(self, seconds: float, rate: float) -> bytes:
        profile = await self._profiler.take(seconds, rate, [])
        called = [[each.name, each.version, each.calls, each.seconds] for each in profile.called]
        return json_answer({**profile_document(profile), "called": called}).content


def merged_profiles(told: Mapping[int, _Document]) -> _Document:
    """Make one profile of those of some processes, by their numbers; frames are there once."""
    numbers: dict[tuple[str, str, int], int] = {}
    merged: _Document = {
        "seconds": max(each["seconds"] for each in told.values()),
        "cpu_seconds": sum(each["cpu_seconds"] for each in told.values()),
        "native_cpu_seconds": sum(each["native_cpu_seconds"] for each in told.values()),
        "threads": [],
        "processes": [],
        "models": [model for each in told.values() for model in each["models"]],
        "workers": [],
    }
    for row, each in sorted(told.items()):
        places = [numbers.setdefault(_key(frame), len(numbers)) for frame in each["frames"]]
        for threads in each["threads"]:
            stacks = [{**stack, "frames": [places[frame] for frame in stack["frames"]]} for stack in threads["stacks"]]
            merged["threads"].append({**threads, "stacks": stacks, "worker": row})
        merged["processes"] += ({**process, "worker": row} for process in each["processes"])
        figures = {key: each[key] for key in ("seconds", "cpu_seconds", "native_cpu_seconds")}
        merged["workers"].append({"worker": row, **figures})
    merged["frames"] = [{"name": name, "file": file, "line": line} for name, file, line in numbers]
    return merged


def _key(frame: Mapping[str, Any]) -> tuple[str, str, int]:
    return frame["name"], frame["file"], frame["line"]


# ----------------------------------------------------------------------
# What the server's time goes to, for administrators: ``POST /v2/profile``
# ----------------------------------------------------------------------

_DEFAULTS: Final[dict[str, Any]] = {"seconds": 5, "rate": 100, "models": None}


def profile_rules(
    plane: DataPlane, changes: Changes, read_document: Callable[[bytes], Awaitable[dict[str, Any]]]
) -> list[Rule]:
    """Make the rule; a profile shows paths and names of code, and costs what it takes, so that it counts as a change.

    Args:
        plane: whose calls are looked at.
        changes: says who may, and logs who did.
        read_document: reads a body.
    """
    profiler = Profiler(plane)
    whole = None if plane.siblings is None else WholeProfile(profiler, plane.siblings)

    async def profile(request: HttpRequest) -> HttpAnswer:
        with changes.requested("profile", request):
            asked = _asked(await read_document(request.body) if request.body else {})
            if whole is not None:
                return json_answer(await whole.take(**asked))
            return json_answer(profile_document(await profiler.take(**asked)))

    return [rule("/v2/profile", "POST", profile)]


def _asked(given: dict[str, Any]) -> dict[str, Any]:
    """Read what is asked for.

    Raises:
        InvalidRequest: something else is there, or of another type.
    """
    if unknown := given.keys() - _DEFAULTS.keys():
        raise InvalidRequest(
            f"profile: {cut(', '.join(sorted(unknown)), 200)} not known, expected {', '.join(_DEFAULTS)}"
        )
    asked = _DEFAULTS | given
    for name in ("seconds", "rate"):
        if isinstance(asked[name], bool) or not isinstance(asked[name], int | float):
            raise InvalidRequest(f"{name}: expected a number")
        try:
            asked[name] = float(asked[name])
        except OverflowError:
            raise InvalidRequest(f"{name}: expected a number that is not so large") from None
    models = asked["models"]
    if models is not None and not (isinstance(models, list) and all(isinstance(name, str) for name in models)):
        raise InvalidRequest("models: expected a list of names")
    return asked
