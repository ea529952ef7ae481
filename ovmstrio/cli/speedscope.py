"""Profiles in speedscope's file format: one for each kind of thread, and one for each model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from ovmstrio.cli.profile_tables import named

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_SCHEMA: Final = "https://www.speedscope.app/file-format-schema.json"
_WAITS: Final = "idle"
_MICROSECONDS: Final = 1e6


def speedscope_document(report: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the profile of a server to a speedscope document."""
    frames = [dict(frame) for frame in report["frames"]]
    waits = len(frames)
    frames.append({"name": _WAITS})
    profiles = []
    for threads in report["threads"]:
        pause = report["seconds"] / max(1, threads["samples"])
        stacks = [(stack["frames"], stack["samples"] * pause) for stack in threads["stacks"]]
        stacks.append(([waits], threads["waiting"] * pause))
        profiles.append(_profile(named(threads, threads["name"]), "seconds", stacks))
    for model in report["models"]:
        layers = model.get("layers", ())
        first = len(frames)
        frames += [{"name": f"{layer['name']} ({layer['type']}, {layer['runs_as']})"} for layer in layers]
        times = [([first + place], layer["seconds"] * _MICROSECONDS) for place, layer in enumerate(layers)]
        if times:
            profiles.append(_profile(f"layers of {model['name']}", "microseconds", times))
    return {
        "$schema": _SCHEMA,
        "exporter": "ovmstrio",
        "name": "ovms profile",
        "activeProfileIndex": 0,
        "shared": {"frames": frames},
        "profiles": profiles,
    }


def _profile(name: str, unit: str, stacks: Iterable[tuple[Sequence[int], float]]) -> dict[str, Any]:
    samples = [(list(stack), weight) for stack, weight in stacks if weight > 0]
    return {
        "type": "sampled",
        "name": name,
        "unit": unit,
        "startValue": 0,
        "endValue": sum(weight for _, weight in samples),
        "samples": [stack for stack, _ in samples],
        "weights": [weight for _, weight in samples],
    }
