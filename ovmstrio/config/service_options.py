"""Options of all service kinds: limits, readiness, cluster placement and isolation of Python code."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeVar

from pydantic import Field

from ovmstrio.config.documents import to_short_json
from ovmstrio.config.schema import OPTIONAL, Schema
from ovmstrio.config.specs import PythonSpec, read_placement
from ovmstrio.core.errors import Problem
from ovmstrio.util.regular_files import is_file

if TYPE_CHECKING:
    from ovmstrio.config.documents import Findings
    from ovmstrio.config.specs import ServableSpec

SpecT = TypeVar("SpecT", bound="ServableSpec")


class ServiceEntry(Schema):
    """Keys of all entries."""

    max_concurrency: Annotated[int, Field(ge=0)] = OPTIONAL
    max_queue: Annotated[int, Field(ge=0)] = OPTIONAL
    max_queue_time: Annotated[float, Field(ge=0)] = OPTIONAL
    placement: str | dict[str, Any] = OPTIONAL
    required: bool = OPTIONAL


_COPIED: Final[Mapping[str, tuple[type, ...]]] = {
    "max_concurrency": (int,),
    "max_queue": (int,),
    "max_queue_time": (int, float),
    "required": (bool,),
}
"""Keys that are fields of the spec, and their types."""
_PLACEMENT: Final = "placement"


def apply_entry_options(spec: SpecT, findings: Findings) -> SpecT:
    """Return the spec with limits, placement and readiness requirement of its entry."""
    if spec.place is None or not isinstance(spec.place.settings.value, dict):
        return spec
    entry = spec.place.settings.value
    given: dict[str, Any] = {
        key: entry[key].value for key, kinds in _COPIED.items() if key in entry and type(entry[key].value) in kinds
    }
    for key in given.keys() & {"max_queue", "max_queue_time"}:
        if not given.get("max_concurrency", spec.max_concurrency) and not spec.queues_itself:
            problem = Problem(
                f"{key} has no effect without max_concurrency",
                path=key,
                suggestion="set max_concurrency",
                severity="warning",
            )
            findings.problems.append(spec.place.of(problem))
    if _PLACEMENT in entry:
        given["placement"], problems = read_placement(entry[_PLACEMENT].plain())
        if problems:
            given["problems"] = (*spec.problems, *map(spec.place.of, problems))
    return spec.model_copy(update=given) if given else spec


# Names and paths

_REMOTE: Final = ("s3:/", "gs:/", "az:/", "azfs:/")
"""With one slash, as a path has lost the other."""
_SERVER_PATHS: Final = ("v1", "v2", "v3", "metrics", "health")
"""First segments of the server's own REST paths."""


def check_name(name: str, *, is_mounted: bool = False) -> list[Problem]:
    """Return the problems of a service's name; a mounted service is called at ``/{name}``."""
    problem = Problem("the name cannot be used", path="name", found=to_short_json(name))
    if is_mounted and name in _SERVER_PATHS:
        message = "the name is reserved for the server's paths"
        return [replace(problem, message=message, expected=f"a name other than {', '.join(_SERVER_PATHS)}")]
    if is_mounted and "/" in name:
        return [replace(problem, expected="a name without '/'")]
    if not {".", ".."}.isdisjoint(re.split("[/:]", name)):
        # HTTP clients remove such segments from a path.
        return [replace(problem, expected="a name without the segments '.' and '..'")]
    if re.search("[\ud800-\udfff]", name):
        # The name of a folder that is not UTF-8; no protocol can send it.
        return [replace(problem, expected="a name in UTF-8")]
    return [] if name else [replace(problem, message="the name is empty", expected="a text that is not empty")]


def check_path(key: str, path: str, content: str = "", *, has_parents: bool = True) -> list[Problem]:
    """Return the problems of a local path; existence is checked at load time.

    Args:
        key: key of the path.
        path: the configured path.
        content: description of the file or directory, if the path must not be empty.
        has_parents: whether ``..`` is allowed.
    """
    problem = Problem("the path cannot be used", path=key, found=to_short_json(path))
    if not path and content:
        return [replace(problem, message=f"the {key} is empty", expected=content)]
    if path.startswith(_REMOTE):
        message, hint = "remote storage is not supported", "copy the model to a local path, or mount the storage"
        return [replace(problem, message=message, expected="a local path", suggestion=hint)]
    if "\0" in path:
        return [replace(problem, expected="a path without the character NUL")]
    if not has_parents and ".." in PurePosixPath(path).parts:
        hint = "use an absolute path, or one relative to the configuration"
        return [replace(problem, expected="a path without '..'", suggestion=hint)]
    return []


def check_base_path(base_path: str) -> list[Problem]:
    """Return the problems of a model path."""
    return check_path("base_path", base_path, "the directory that holds the model's versions", has_parents=False)


# Python code


class PythonEntry(Schema):
    """Keys of entries with user Python code."""

    python_isolation: Literal["none", "process"] = OPTIONAL
    python: str = OPTIONAL
    python_processes: Annotated[int, Field(ge=1, le=64)] = OPTIONAL
    python_timeout_seconds: Annotated[float, Field(ge=0)] = OPTIONAL
    python_memory_limit: Annotated[int, Field(ge=0)] = OPTIONAL


PYTHON_KEYS: Final = tuple(PythonEntry.model_fields)
_ISOLATION: Final = "python_isolation"
_PROCESS_KEYS: Final = tuple(key for key in PYTHON_KEYS if key != _ISOLATION)


def check_python(given: Mapping[str, Any], directory: Path) -> list[Problem]:
    """Return problems of the Python settings; paths are the keys."""
    problems = [
        Problem(
            f"{key!r} requires process isolation, and {_ISOLATION!r} is none",
            path=key,
            found=to_short_json(given[key]),
            suggestion=f"remove it, or set {_ISOLATION} to process",
        )
        for key in _PROCESS_KEYS
        if key in given and given.get(_ISOLATION) == "none"
    ]
    if "python" in given:
        file = directory / given["python"]
        if not is_file(file) or not os.access(file, os.X_OK):
            expected = "the path of a Python interpreter, such as venv/bin/python"
            hint = f"create one with python -m venv; relative paths start at {directory}"
            found = f"{file}, which {'is not executable' if is_file(file) else 'does not exist'}"
            problems.append(
                Problem("Python interpreter not found", path="python", expected=expected, found=found, suggestion=hint)
            )
    return problems


def parse_python(given: Mapping[str, Any], directory: Path) -> PythonSpec:
    """Return the validated Python settings of an entry; any process option implies process isolation."""
    isolation = given.get(_ISOLATION, "process" if any(key in given for key in _PROCESS_KEYS) else None)
    fields = {key.removeprefix("python_"): given[key] for key in _PROCESS_KEYS if key in given and key != "python"}
    python = directory / given["python"] if "python" in given else None
    return PythonSpec(isolation=isolation, python=python, **fields)
