"""What an entry of any list may say, whatever kind of service it configures: how many calls it takes, where it runs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeVar

from pydantic import Field

from ovmstrio.config.documents import OPTIONAL, Schema, shown
from ovmstrio.config.specs import PythonSpec, read_placement
from ovmstrio.core.errors import Problem

if TYPE_CHECKING:
    from ovmstrio.config.documents import Findings
    from ovmstrio.config.specs import ServableSpec

__all__ = ["PYTHON_KEYS", "PythonEntry", "ServiceEntry", "check_python", "read_python", "with_limits"]

# ----------------------------------------------------------------------
# What an entry of any list may say, whatever kind of service it configures: how many calls it takes, where it runs
# ----------------------------------------------------------------------

SpecT = TypeVar("SpecT", bound="ServableSpec")


class ServiceEntry(Schema):
    """The keys that entries of all kinds have."""

    max_concurrency: Annotated[int, Field(ge=0)] = OPTIONAL
    max_queue: Annotated[int, Field(ge=0)] = OPTIONAL
    placement: str | dict[str, Any] = OPTIONAL


_LIMITS: Final = ("max_concurrency", "max_queue")
_PLACEMENT: Final = "placement"


def with_limits(spec: SpecT, findings: Findings) -> SpecT:
    """Give a spec the limits and the place that its entry says, which has been checked."""
    if spec.place is None or not isinstance(spec.place.settings.value, dict):
        return spec
    entry = spec.place.settings.value
    given: dict[str, Any] = {key: entry[key].value for key in _LIMITS if key in entry and type(entry[key].value) is int}
    if "max_queue" in given and not given.get("max_concurrency") and not spec.queues_itself:
        problem = Problem(
            "the limit has no effect: any number of calls may be under way, so that none waits",
            path="max_queue",
            suggestion="set max_concurrency as well",
            severity="warning",
        )
        findings.problems.append(spec.place.of(problem))
    if _PLACEMENT in entry:
        given["placement"], problems = read_placement(entry[_PLACEMENT].plain())
        if problems:
            given["problems"] = (*spec.problems, *map(spec.place.of, problems))
    return spec.model_copy(update=given) if given else spec


# ----------------------------------------------------------------------
# How code of users is run that an entry of the configuration names: in the server, or in processes beside it
# ----------------------------------------------------------------------


class PythonEntry(Schema):
    """The keys of an entry whose service runs Python code of users."""

    python_isolation: Literal["none", "process"] = OPTIONAL
    python: str = OPTIONAL
    python_processes: Annotated[int, Field(ge=1, le=64)] = OPTIONAL
    python_timeout_seconds: Annotated[float, Field(ge=0)] = OPTIONAL
    python_memory_limit: Annotated[int, Field(ge=0)] = OPTIONAL


PYTHON_KEYS: Final = tuple(PythonEntry.model_fields)
_ISOLATION: Final = "python_isolation"
_OF_PROCESSES: Final = tuple(key for key in PYTHON_KEYS if key != _ISOLATION)


def check_python(given: Mapping[str, Any], directory: Path) -> list[Problem]:
    """Check that settings fit each other and that the interpreter is there; paths of the problems are the keys."""
    problems = [
        Problem(
            f"{key!r} is for code in processes of its own, and {_ISOLATION!r} says that there are none",
            path=key,
            found=shown(given[key]),
            suggestion=f"remove it, or set {_ISOLATION} to process",
        )
        for key in _OF_PROCESSES
        if key in given and given.get(_ISOLATION) == "none"
    ]
    if "python" in given:
        file = directory / given["python"]
        if not file.is_file() or not os.access(file, os.X_OK):
            expected = "the path of a Python interpreter, such as venv/bin/python"
            way_out = f"python -m venv makes one; a relative path starts at {directory}"
            found = f"{file}, which {'cannot be run' if file.exists() else 'does not exist'}"
            problems.append(
                Problem(
                    "there is no such interpreter", path="python", expected=expected, found=found, suggestion=way_out
                )
            )
    return problems


def read_python(given: Mapping[str, Any], directory: Path) -> PythonSpec:
    """Read the settings of an entry that :func:`check_python` found nothing wrong with.

    An entry that says anything of processes asks for them.
    """
    asked = given.get(_ISOLATION, "process" if any(key in given for key in _OF_PROCESSES) else None)
    fields = {key.removeprefix("python_"): given[key] for key in _OF_PROCESSES if key in given and key != "python"}
    python = directory / given["python"] if "python" in given else None
    return PythonSpec(isolation=asked, python=python, **fields)
