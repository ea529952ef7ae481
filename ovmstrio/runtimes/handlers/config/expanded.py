"""A project with every default filled in, as the file could have said it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from ovmstrio.runtimes.handlers.config.project_spec import ModelEntry, ModelsSpec, ProjectSpec

__all__ = ["expanded"]


def expanded(project: ProjectSpec) -> str:
    """Give the project as YAML; keys that are off by default and not given are left out."""
    image = project.image
    values: dict[str, Any] = {
        "type": project.type,
        "py_version": image.py_version,
        "tfs_version": image.tfs_version if project.type == "tensorflow" else None,
        "gpu": image.gpu,
        "gpu_version": image.gpu_version.model_dump() if image.gpu_version else None,
        "dependencies": image.dependencies.model_dump(),
        "serve_port": project.serve_port,
        "env": project.env,
        "config": project.config,
        "python_path": _below(project.python_path, project.directory),
        "path": _below(project.handler_path, project.directory),
        "protobuf_path": _below(project.protobuf_path, project.directory) if project.protobuf_path else None,
        **_models(project.models),
        "processes": project.processes,
        "threads_per_process": project.threads_per_process,
        "max_concurrency": project.max_concurrency,
        "server_side_batching": _batching(project),
        "tfs_container_dns": (project.tfs_container_dns or "localhost") if project.type == "tensorflow" else None,
        "log_level": project.log_level,
        "use_local_cortex_libs": image.use_local_cortex_libs,
    }
    given = {key: value for key, value in values.items() if value is not None}
    text: str = yaml.safe_dump(given, sort_keys=False, allow_unicode=True)
    return text


def _below(path: Path, directory: Path) -> str:
    return str(path.relative_to(directory) if path.is_relative_to(directory) else path)


def _batching(project: ProjectSpec) -> dict[str, Any] | None:
    batching = project.batching
    if batching is None:
        return None
    values = {"max_batch_size": batching.max_batch_size, "batch_interval_seconds": batching.interval_seconds}
    return values | ({"retry_singly": True} if batching.retry_singly else {})


def _models(models: ModelsSpec | None) -> dict[str, Any]:
    if models is None:
        return {}
    values: dict[str, Any] = {
        "path": models.entries[0].path if models.kind == "path" else None,
        "paths": [_entry(entry) for entry in models.entries] if models.kind == "paths" else None,
        "dir": models.dir or None,
        "signature_key": models.signature_key,
        "cache_size": models.cache_size,
        "disk_cache_size": models.disk_cache_size,
        "latest_versions": models.latest_versions,
        "reload_interval_seconds": models.reload_interval_seconds,
    }
    return {models.section: {key: value for key, value in values.items() if value is not None}}


def _entry(entry: ModelEntry) -> dict[str, str]:
    return entry.model_dump(exclude_none=True)
