"""Handlers of projects that tests write."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from textwrap import dedent
from typing import Any

from ovmstrio.runtimes.handlers.config.project_file import read_project
from ovmstrio.runtimes.handlers.config.project_spec import ProjectSpec
from ovmstrio.runtimes.handlers.handler import LoadedHandler
from ovmstrio.runtimes.handlers.project import open_handler

_PYTHON = "type: python\npath: handler.py\n"


def project(folder: Path, code: str, text: str = "", **files: str) -> ProjectSpec:
    """Write a project; ``text`` is added to its file, and further files have ``__`` for a dot in their names."""
    folder.mkdir(exist_ok=True)
    (folder / "nucleus.yaml").write_text(text if "type:" in text else _PYTHON + text)
    if code:
        (folder / "handler.py").write_text(dedent(code))
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(dedent(content))
    return read_project(folder)[0]


@asynccontextmanager
async def opened(folder: Path, code: str, text: str = "", /, **settings: Any) -> AsyncIterator[LoadedHandler]:
    """Open the handler of a project that is written for it."""
    async with open_handler(project(folder, code, text), **settings) as handler:
        yield handler
