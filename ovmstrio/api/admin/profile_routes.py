"""What the server's time goes to, for administrators: ``POST /v2/profile``.

The body may have ``seconds`` (5), ``rate`` (samples a second, 100) and ``models`` (names of those whose layers are
timed; by default the ones that were called meanwhile, and with an empty list none).
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from ovmstrio.core.errors import InvalidRequest
from ovmstrio.dataplane.profiling import Profiler
from ovmstrio.wire.http.answers import json_answer
from ovmstrio.wire.http.router import rule

if TYPE_CHECKING:
    from collections.abc import Callable

    from ovmstrio.api.admin.changes import Changes
    from ovmstrio.core.http import HttpAnswer, HttpRequest
    from ovmstrio.core.layer_times import LayerTime
    from ovmstrio.dataplane.plane import DataPlane
    from ovmstrio.dataplane.profiling import ProfiledModel, ServerProfile
    from ovmstrio.observability.stack_sampling import SampledThreads, StackFrame
    from ovmstrio.wire.http.router import Rule

__all__ = ["profile_rules"]

_DEFAULTS: Final[dict[str, Any]] = {"seconds": 5, "rate": 100, "models": None}


def profile_rules(plane: DataPlane, changes: Changes, parse: Callable[[bytes], dict[str, Any]]) -> list[Rule]:
    """Make the rule; a profile shows paths and names of code, and costs what it takes, so that it counts as a change.

    Args:
        plane: whose calls are looked at.
        changes: says who may, and logs who did.
        parse: reads a body.
    """
    profiler = Profiler(plane)

    async def profile(request: HttpRequest) -> HttpAnswer:
        with changes.requested("profile", request):
            asked = _asked(parse(request.body) if request.body else {})
            return json_answer(_document(await profiler.take(**asked)))

    return [rule("/v2/profile", "POST", profile)]


def _asked(given: dict[str, Any]) -> dict[str, Any]:
    """Read what is asked for.

    Raises:
        InvalidRequest: something else is there, or of another type.
    """
    if unknown := given.keys() - _DEFAULTS.keys():
        raise InvalidRequest(f"profile: {', '.join(sorted(unknown))} not known, expected {', '.join(_DEFAULTS)}")
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


def _document(profile: ServerProfile) -> dict[str, Any]:
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
    return {
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
