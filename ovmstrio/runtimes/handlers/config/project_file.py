"""``nucleus.yaml``: one reader for serving, checking and packing, which tells everything that is wrong at once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from ovmstrio.config.documents import load_yaml
from ovmstrio.config.findings import Findings, shown
from ovmstrio.config.located import Document
from ovmstrio.config.sections import Rules, Section, any_spelling, any_word, flag, number, whole, written
from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.runtimes.handlers.config.dotenv import parse_dotenv
from ovmstrio.runtimes.handlers.config.image_section import IMAGE_KEYS, read_image
from ovmstrio.runtimes.handlers.config.models_section import find_models_section, read_models
from ovmstrio.runtimes.handlers.config.project_spec import (
    ModelEntry,
    ModelsSpec,
    ProjectBatching,
    ProjectSpec,
    is_file,
    is_folder,
    local_path,
)
from ovmstrio.util.regular_files import read_regular_text

__all__ = ["expanded", "find_project_file", "read_project"]

_NAMES: Final = ("nucleus.yaml", "nucleus.yml")
_SUFFIXES: Final = (".yaml", ".yml")
_KEYS: Final[Rules] = {
    "type": any_word(("python", "tensorflow")),
    "serve_port": any_spelling(whole(1, 65_535)),
    "env": None,
    "config": None,
    "python_path": written,
    "path": written,
    "protobuf_path": written,
    "models": None,
    "multi_model_reloading": None,
    "processes": any_spelling(whole(1)),
    "threads_per_process": any_spelling(whole(1)),
    "max_concurrency": any_spelling(whole(0)),
    "server_side_batching": None,
    "tfs_container_dns": written,
    "log_level": any_word(("debug", "info", "warning", "error")),
    **IMAGE_KEYS,
}
_REQUIRED: Final = ("type", "path")
_BATCHING: Final[Rules] = {
    "max_batch_size": any_spelling(whole(1)),
    "batch_interval_seconds": any_spelling(number(0, "a number of seconds")),
    "retry_singly": any_spelling(flag),
}
_SMALL_BATCH: Final = "batches may be larger than 'threads_per_process' here; those of Nucleus never are"


def find_project_file(path: Path) -> Path | None:
    """Give the project's file that is meant by a path: a YAML file itself, or the one in a folder; None without."""
    if path.is_dir():
        return next((path / name for name in _NAMES if (path / name).is_file()), None)
    return path if path.suffix in _SUFFIXES else None


def read_project(path: Path, *, mounted_as: str = "") -> tuple[ProjectSpec, list[Problem]]:
    """Read a project with its ``.env``.

    Args:
        path: the file, whatever it is called, or the folder that has a ``nucleus.yaml``.
        mounted_as: the name under which it is served beside others; on its own it has its folder's.

    Returns:
        The project, and warnings.

    Raises:
        ConfigError: the project cannot be used; lists every problem, warnings included.
    """
    file = find_project_file(path) or path
    if file.is_dir():
        expected = " or ".join(_NAMES)
        raise ConfigError([Problem("the folder is no project", str(path), expected=expected, found="no such file")])
    reader = _ProjectReader(load_yaml(file), file, mounted_as)
    spec = reader.read()
    if spec is None:
        raise ConfigError(reader.problems())
    return spec, reader.problems()


class _ProjectReader:
    """Reads one document from the top down."""

    def __init__(self, document: Document, file: Path, mounted_as: str) -> None:
        self._findings = Findings(str(file))
        self._findings.refuse_repeated(document, "")
        self._top = Section(document.root, self._findings)
        # What is mounted into a container may be a link, beside which nothing lies.
        self._directory = file.parent.resolve()
        self._file = self._directory / file.name
        self._mounted_as = mounted_as
        self._elsewhere: list[Problem] = []

    def problems(self) -> list[Problem]:
        """Give all that was found so far, by file and line."""
        return [*self._findings.all, *self._elsewhere]

    def read(self) -> ProjectSpec | None:
        """Give the project, or None if something is wrong with it."""
        root = self._top.node
        if not isinstance(root.value, dict):
            self._findings.refuse(root, "the file holds no project", expected="keys", found=shown(root.plain()))
            return None
        fields = self._fields(self._top.read(_KEYS, required=_REQUIRED))
        if self._findings.fatal or any(problem.severity == "error" for problem in self._elsewhere):
            return None
        return ProjectSpec(**{key: value for key, value in fields.items() if value is not None})

    def _fields(self, given: dict[str, Any]) -> dict[str, Any]:
        top, project_type = self._top, given.get("type")
        image = read_image(top, given)
        given = {key: value for key, value in given.items() if key not in IMAGE_KEYS}
        env = self._env()
        models_key = find_models_section(top, project_type)
        python_path = self._python_path(given.pop("python_path", "."))
        if project_type == "python" and "tfs_container_dns" in given:
            top.refuse("tfs_container_dns", "the key is for the type tensorflow", suggestion="remove it")
        fields = given | {
            "name": self._mounted_as or self._directory.name,
            "directory": self._directory,
            "file": self._file,
            "env": env,
            "dotenv": self._dotenv(env),
            "config": self._config(),
            "python_path": python_path,
            "handler_path": self._file_of("path", given.pop("path", None), python_path),
            "protobuf_path": self._file_of("protobuf_path", given.get("protobuf_path")),
            "models": read_models(top, models_key, self._directory, project_type) if models_key else None,
            "batching": self._batching(),
            "image": image,
        }
        self._check_together(fields)
        return fields

    def _check_together(self, fields: Mapping[str, Any]) -> None:
        models: ModelsSpec | None = fields["models"]
        if models is not None and models.is_cached and fields.get("processes", 1) > 1:
            message = f"the models of {models.section!r} are cached, which one process alone can do"
            self._top.refuse("processes", message, expected="1", suggestion="remove it, or the cache sizes")
        if self._mounted_as:
            self._check_mounted(fields)
        batching: ProjectBatching | None = fields["batching"]
        if "server_side_batching" in self._top.members and "protobuf_path" in self._top.members:
            message = "requests of gRPC are not batched"
            self._top.refuse("server_side_batching", message, suggestion="remove it, or 'protobuf_path'")
        threads = fields.get("threads_per_process", 1)
        if batching is not None and fields.get("type") == "python" and batching.max_batch_size > threads:
            node = self._top.node.find("server_side_batching", "max_batch_size")
            self._findings.warn(node, _SMALL_BATCH, f"set 'threads_per_process' to {batching.max_batch_size} for both")

    def _check_mounted(self, fields: Mapping[str, Any]) -> None:
        if fields.get("processes", 1) > 1:
            message = "a handler that is served beside others has no processes of its own"
            self._top.refuse("processes", message, expected="1", suggestion="remove it, or serve the project alone")
        if "serve_port" in self._top.members:
            message = "a handler that is served beside others has no port of its own"
            self._top.warn("serve_port", message, "call it at the server's ports")

    def _env(self) -> dict[str, str]:
        section = self._top.section("env")
        values: dict[str, str] = {}
        for key, node in (section.members if section else {}).items():
            name = str(key)
            if isinstance(node.value, dict | list):
                found = shown(node.plain())
                self._findings.refuse(node, "wrong type", expected="a text, a number, or a truth value", found=found)
            elif not name or "=" in name or "\0" in name + str(node.value):
                self._findings.refuse(node, "this cannot be exported", expected="a name without '='")
            else:
                values[name] = str(node.value)
        return values

    def _dotenv(self, env: Mapping[str, str]) -> dict[str, str]:
        file = self._directory / ".env"
        if not file.is_file():
            return {}
        try:
            text = read_regular_text(file, encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            self._elsewhere.append(Problem(f"the file cannot be read: {error}", str(file)))
            return {}
        variables, problems = parse_dotenv(text, os.environ | env, str(file))
        self._elsewhere += problems
        return variables

    def _config(self) -> dict[str, Any]:
        section = self._top.section("config")
        plain: dict[str, Any] = section.node.plain() if section else {}
        return plain

    def _batching(self) -> ProjectBatching | None:
        section = self._top.section("server_side_batching")
        if section is None:
            return None
        size, interval = "max_batch_size", "batch_interval_seconds"
        values = section.read(_BATCHING, required=(size, interval))
        if not {size, interval} <= values.keys():
            return None
        return ProjectBatching(interval_seconds=values.pop(interval), **values)

    def _python_path(self, text: str) -> Path:
        folder = local_path(self._directory, text)
        if not is_folder(folder):
            self._top.refuse("python_path", "there is no such folder", expected=f"the folder {folder}")
        return folder

    def _file_of(self, key: str, text: str | None, *others: Path) -> Path | None:
        """Find a file that a key names: in the project's folder, or else in one of the others."""
        if text is None:
            return None
        candidates = list(dict.fromkeys(local_path(folder, text) for folder in (self._directory, *others)))
        found = next((file for file in candidates if is_file(file)), None)
        if found is None:
            self._top.refuse(
                key, "there is no such file", expected=" or ".join(f"the file {each}" for each in candidates)
            )
        return found


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
