"""Handler projects on disk, and their problems."""

from __future__ import annotations

from pathlib import Path

import pytest

from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.runtimes.handlers.config.project_file import read_project
from ovmstrio.runtimes.handlers.config.project_spec import ProjectSpec

PYTHON = "type: python\npath: handler.py\n"
TENSORFLOW = "type: tensorflow\npath: handler.py\n"


def write(folder: Path, text: str = PYTHON, **files: str) -> Path:
    """Write a project with an empty handler; further files have ``__`` for a dot in their names."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "nucleus.yaml").write_text(text)
    (folder / "handler.py").touch()
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(content)
    return folder


def good(folder: Path, text: str = PYTHON, **files: str) -> ProjectSpec:
    """Read a project that has neither problems nor warnings."""
    spec, warnings = read_project(write(folder, text, **files))
    assert warnings == []
    return spec


def wrong(folder: Path, text: str, **files: str) -> list[Problem]:
    """Return every problem of a project that cannot be used."""
    with pytest.raises(ConfigError) as caught:
        read_project(write(folder, text, **files))
    return list(caught.value.problems)


def problems_of(folder: Path, text: str, **files: str) -> list[tuple[int | None, str, str]]:
    """Return line, key and message of every problem of a project that cannot be used."""
    return [(problem.line, problem.path, problem.message) for problem in wrong(folder, text, **files)]
