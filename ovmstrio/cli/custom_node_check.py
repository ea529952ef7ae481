"""Check of a custom node in a subprocess, so that a crash of the library is reported as a problem."""

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
from ovmstrio.isolation.worker_process import describe_probe_exit
from ovmstrio.pipelines.native.library import remove_leftovers

_PROBE: Final = "ovmstrio.cli.custom_node_probe"
_OPENING: Final = "it was being loaded, initialized and queried for its inputs and outputs"
_STEPS: Final = {"open": _OPENING, "close": "it was being deinitialized"}


@dataclass(frozen=True, slots=True)
class Item:
    """An input or output; ``datatype`` is empty if the node declares no known datatype."""

    name: str
    datatype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LibraryReport:
    """Inputs, outputs and problems of a library."""

    inputs: tuple[Item, ...]
    outputs: tuple[Item, ...]
    problems: tuple[Problem, ...]


def check_library(library: str, params: Mapping[str, str], timeout: float) -> LibraryReport:
    """Run a library with parameters in a separate process; the library's own output goes to standard error.

    Args:
        library: the library as in a configuration; relative paths start at the current directory.
        params: parameters of the node.
        timeout: seconds until the process is killed.
    """
    path = find_library(library, Path.cwd())
    with tempfile.TemporaryDirectory(prefix="ovms-custom-node-") as folder:
        report = Path(folder) / "report.json"
        question = json.dumps({"library": library, "params": dict(params), "report": str(report)})
        # Without -P, modules of the current directory would shadow the server's.
        command = [sys.executable, "-P", "-m", _PROBE]
        try:
            done = subprocess.run(  # noqa: S603 - this interpreter
                command, input=question, text=True, check=False, stdout=sys.__stderr__, timeout=timeout, process_group=0
            )
        except subprocess.TimeoutExpired:
            remove_leftovers(path)
            return _verdict(library, _read_report(report), f"did not finish within {timeout:g} seconds")
        facts = _read_report(report)
    if facts.get("step") == "done":
        return _verdict(library, facts, "")
    remove_leftovers(path)
    return _verdict(library, facts, describe_probe_exit(done.returncode))


def _read_report(report: Path) -> dict[str, Any]:
    try:
        facts: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return facts


def _verdict(library: str, facts: Mapping[str, Any], end: str) -> LibraryReport:
    problems = [Problem(**problem) for problem in facts.get("problems", ())]
    if end:
        step = _STEPS.get(facts.get("step", ""), "the check began")
        problems.append(Problem(f"the library {end} while {step}", file=library))
    return LibraryReport(_items(facts.get("inputs", ())), _items(facts.get("outputs", ())), tuple(problems))


def _items(facts: Any) -> tuple[Item, ...]:
    return tuple(Item(name, datatype, tuple(shape)) for name, datatype, shape in facts)
