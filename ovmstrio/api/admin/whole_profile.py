"""A profile of all processes of a server, of which each is looked at by itself, all at the same time.

::

    POST /v2/profile ──> own threads ───────────────┐
                     └─> the others', side by side ─┴──> layers of what was called in any of them, timed here
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import orjson

from ovmstrio.api.admin.profile_documents import profile_document
from ovmstrio.dataplane.profiling import CalledVersion
from ovmstrio.wire.http.answers import json_answer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ovmstrio.core.siblings import Siblings
    from ovmstrio.dataplane.profiling import Profiler

__all__ = ["WholeProfile", "merged_profiles"]

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
