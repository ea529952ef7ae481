"""Handler projects: files, parsed configuration and opened handlers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from textwrap import dedent
from typing import Any, Final

import pytest
import yaml

from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.handlers.config.project_file import read_project
from ovmstrio.handlers.config.project_spec import ProjectSpec
from ovmstrio.handlers.handler_loading import LoadedHandler, open_handler


def write_project(folder: Path, code: str, **keys: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "handler.py").write_text(code, encoding="utf-8")
    file = folder / "nucleus.yaml"
    file.write_text(yaml.safe_dump({"type": "python", "path": "handler.py"} | keys), encoding="utf-8")
    return file


def make_project(folder: Path, code: str, **keys: Any) -> ProjectSpec:
    return read_project(write_project(folder, code, **keys))[0]


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
    spec, warnings = read_project(write(folder, text, **files))
    assert warnings == []
    return spec


def wrong(folder: Path, text: str, **files: str) -> list[Problem]:
    with pytest.raises(ConfigError) as caught:
        read_project(write(folder, text, **files))
    return list(caught.value.problems)


def problems_of(folder: Path, text: str, **files: str) -> list[tuple[int | None, str, str]]:
    return [(problem.line, problem.path, problem.message) for problem in wrong(folder, text, **files)]


FOUR_KINDS: Final = """
    syntax = "proto3";
    package {package};

    service Kinds {{
      rpc Alpha (Sample) returns (Sample);
      rpc Beta (stream Sample) returns (Sample);
      rpc Gamma (Sample) returns (stream Sample);
      rpc Delta (stream Sample) returns (stream Sample);
    }}

    message Sample {{
      string text = 1;
      int64 number = 2;
      bytes data = 3;
    }}
"""
"""A service with one method of each kind, in a package of any name."""

PRIMES: Final = """
    syntax = "proto3";
    package prime_generator;

    service Generator {
      rpc Predict (Input) returns (stream Output);
    }

    message Input {
      int64 prime_numbers_to_generate = 1;
    }

    message Output {
      int64 prime_number = 1;
    }
"""
"""A service that streams the requested number of prime numbers."""


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dedent(text))
    return path


def project(folder: Path, code: str, text: str = "", **files: str) -> ProjectSpec:
    """Write and read a project as :func:`write` does, with ``text`` added to its file unless that has a type."""
    sources = {name: dedent(content) for name, content in {"handler__py": code, **files}.items()}
    return read_project(write(folder, text if "type:" in text else PYTHON + text, **sources))[0]


@asynccontextmanager
async def opened(folder: Path, code: str, text: str = "", /, **settings: Any) -> AsyncIterator[LoadedHandler]:
    async with open_handler(project(folder, code, text), **settings) as handler:
        yield handler
