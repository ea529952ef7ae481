"""Projects of handlers, written as their users write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from ovmstrio.runtimes.handlers.config.project_file import read_project
from ovmstrio.runtimes.handlers.config.project_spec import ProjectSpec


def write_project(folder: Path, code: str, **keys: Any) -> Path:
    """Write a project's folder, with keys for its ``nucleus.yaml``, and give that file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "handler.py").write_text(code, encoding="utf-8")
    file = folder / "nucleus.yaml"
    file.write_text(yaml.safe_dump({"type": "python", "path": "handler.py"} | keys), encoding="utf-8")
    return file


def make_project(folder: Path, code: str, **keys: Any) -> ProjectSpec:
    """Write a project as :func:`write_project`, and read it."""
    return read_project(write_project(folder, code, **keys))[0]
