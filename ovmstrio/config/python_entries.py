"""How code of users is run that an entry of the configuration names: in the server, or in processes beside it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from ovmstrio.config.documents import OPTIONAL, Schema
from ovmstrio.config.findings import shown
from ovmstrio.config.specs import PythonSpec
from ovmstrio.core.errors import Problem

__all__ = ["PYTHON_KEYS", "PythonEntry", "check_python", "read_python"]


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
