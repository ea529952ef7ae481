"""Try a custom node in a process of its own, and gather what it said or how it ended."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ovmstrio.config.pipeline_entries import find_library
from ovmstrio.core.errors import Problem
from ovmstrio.isolation.program import describe_probe_exit
from ovmstrio.pipelines.native.library import remove_leftovers

_PROBE: Final = "ovms_cli.custom_node_probe"
_OPENING: Final = "it was being loaded, initialized and asked for its inputs and outputs"
_STEPS: Final = {"open": _OPENING, "close": "it was being deinitialized"}


@dataclass(frozen=True, slots=True)
class Item:
    """An input or output; ``datatype`` is empty where the node says nothing that is known."""

    name: str
    datatype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LibraryVerdict:
    """What was found of a library."""

    inputs: tuple[Item, ...]
    outputs: tuple[Item, ...]
    problems: tuple[Problem, ...]


def check_library(library: str, params: Mapping[str, str], timeout: float) -> LibraryVerdict:
    """Try a library with parameters; what it prints itself goes to standard error.

    Args:
        library: as a configuration would name it; relative paths start here.
        params: of the node.
        timeout: seconds until the process is killed.
    """
    path = find_library(library, Path.cwd())
    with tempfile.TemporaryDirectory(prefix="ovms-custom-node-") as folder:
        report = Path(folder) / "report.json"
        question = json.dumps({"library": library, "params": dict(params), "report": str(report)})
        # Without -P, modules of the current directory would come before the server's.
        command = [sys.executable, "-P", "-m", _PROBE]
        try:
            done = subprocess.run(  # noqa: S603 - this interpreter
                command, input=question, text=True, check=False, stdout=sys.__stderr__, timeout=timeout
            )
        except subprocess.TimeoutExpired:
            remove_leftovers(path)
            return _verdict(library, _told(report), f"had not come to an end after {timeout:g} seconds")
        told = _told(report)
    if told.get("step") == "done":
        return _verdict(library, told, "")
    remove_leftovers(path)
    return _verdict(library, told, describe_probe_exit(done.returncode))


def _told(report: Path) -> dict[str, Any]:
    try:
        told: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return told


def _verdict(library: str, told: Mapping[str, Any], end: str) -> LibraryVerdict:
    problems = [Problem(**problem) for problem in told.get("problems", ())]
    if end:
        step = _STEPS.get(told.get("step", ""), "the check began")
        problems.append(Problem(f"the library {end} while {step}", file=library))
    return LibraryVerdict(_items(told.get("inputs", ())), _items(told.get("outputs", ())), tuple(problems))


def _items(told: Any) -> tuple[Item, ...]:
    return tuple(Item(name, datatype, tuple(shape)) for name, datatype, shape in told)
