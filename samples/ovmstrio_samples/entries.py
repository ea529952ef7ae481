"""Write what samples consist of into a model repository, and the configuration that serves it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from ovmstrio.openvino.convert import new_folder, new_version
from ovmstrio_samples.catalog import Sample

__all__ = ["write_config", "write_entries"]


def write_entries(
    sample: Sample, files: Path, repository: Path, version: int = 1, *, force: bool = False
) -> list[Path]:
    """Write ``<repository>/<model>/<version>`` for models and ``<repository>/<graph>`` for graphs; gives these folders.

    Raises:
        AlreadyExists: a folder exists and ``force`` is not set.
    """
    written = []
    for name, write in sample.entries.items():
        target = repository / name if sample.graph else repository / name / str(version)
        made = new_folder(target, force=force) if sample.graph else new_version(repository, name, version, force=force)
        with made as directory:
            write(files, directory)
        written.append(target)
    return written


def write_config(samples: Sequence[Sample], path: Path) -> None:
    """Write the ``config.json`` that serves all these samples from the folders beside it."""
    config: dict[str, list[dict[str, object]]] = {"model_config_list": []}
    for sample in samples:
        for key, entries in sample.config().items():
            config.setdefault(key, []).extend(entries)
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
