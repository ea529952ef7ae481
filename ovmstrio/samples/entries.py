"""Writers of samples' models and folders to a model repository, and of the configuration that serves them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from ovmstrio.conversion import new_folder, new_version
from ovmstrio.samples.catalog import ProjectSample, Sample

__all__ = ["prepared_folders", "write_config", "write_entries", "write_project"]

_NOT_SERVED: Final = ("__init__.py", "__pycache__", "README.md", "client.py", "train.py")


def write_entries(
    sample: Sample, files: Path, repository: Path, version: int = 1, *, force: bool = False
) -> list[Path]:
    """Write models to ``<repository>/<model>/<version>`` and other entries to ``<repository>/<name>``.

    Returns:
        The written folders.

    Raises:
        AlreadyExists: a folder exists and ``force`` is not set.
    """
    written = []
    for name, write in sample.entries.items():
        if sample.has_versions(name):
            target = repository / name / str(version)
            made = new_version(repository, name, version, force=force)
        else:
            target = repository / name
            made = new_folder(target, force=force)
        with made as directory:
            write(files, directory)
        written.append(target)
    return written


def write_project(sample: ProjectSample, repository: Path, *, force: bool = False) -> Path:
    """Copy the served files of a project to ``<repository>/<name>``, and return that folder.

    Raises:
        AlreadyExists: the folder exists and ``force`` is not set.
    """
    target = repository / sample.name
    with new_folder(target, force=force) as directory:
        shutil.copytree(sample.folder, directory, ignore=shutil.ignore_patterns(*_NOT_SERVED), dirs_exist_ok=True)
    return target


def prepared_folders(sample: Sample, repository: Path, version: int = 1) -> list[Path]:
    """Return the folders that :func:`write_entries` writes, whether or not they exist."""
    return [
        repository / name / str(version) if sample.has_versions(name) else repository / name for name in sample.entries
    ]


def write_config(samples: Sequence[Sample], path: Path) -> None:
    """Write the ``config.json`` that serves the samples from the folders next to it."""
    config: dict[str, list[dict[str, object]]] = {"model_config_list": []}
    for sample in samples:
        for key, entries in sample.config().items():
            config.setdefault(key, []).extend(entries)
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
