"""A profile as plain data, as JSON has it."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ovmstrio.core.layer_times import LayerTime
    from ovmstrio.core.stacks import SampledThreads, StackFrame
    from ovmstrio.dataplane.profiling import ProfiledModel, ServerProfile

__all__ = ["profile_document"]


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
