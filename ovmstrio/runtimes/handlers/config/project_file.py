"""``nucleus.yaml``: one reader for serving, checking and packing, which tells everything that is wrong at once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ovmstrio.config.findings import Findings, by_line, shown
from ovmstrio.config.yaml_locations import YamlDocument, YamlSyntaxError, parse_yaml
from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.runtimes.handlers.config.dotenv import parse_dotenv
from ovmstrio.runtimes.handlers.config.image_section import IMAGE_KEYS, read_image
from ovmstrio.runtimes.handlers.config.models_section import find_models_section, read_models
from ovmstrio.runtimes.handlers.config.sections import Section, is_file, is_folder, local_path
from ovmstrio.runtimes.handlers.config.specs import ModelsSpec, ProjectBatching, ProjectSpec

__all__ = ["find_project_file", "read_project"]

_NAMES: Final = ("nucleus.yaml", "nucleus.yml")
_SUFFIXES: Final = (".yaml", ".yml")
_REQUIRED: Final = ("type", "path")
_TYPES: Final = ("python", "tensorflow")
_LEVELS: Final = ("debug", "info", "warning", "error")
_KEYS: Final = (
    "type",
    "serve_port",
    "env",
    "config",
    "python_path",
    "path",
    "protobuf_path",
    "models",
    "multi_model_reloading",
    "processes",
    "threads_per_process",
    "max_concurrency",
    "server_side_batching",
    "tfs_container_dns",
    "log_level",
    *IMAGE_KEYS,
)
_BATCHING: Final = ("max_batch_size", "batch_interval_seconds")
_RETRY: Final = "retry_singly"
_MAX_PORT: Final = 65535
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
    document = _load(file)
    reader = _Reader(document, file, mounted_as)
    spec = reader.read()
    if spec is None:
        raise ConfigError(reader.problems())
    return spec, reader.problems()


def _load(file: Path) -> YamlDocument:
    try:
        return parse_yaml(file.read_bytes().decode("utf-8-sig"))
    except OSError as error:
        raise ConfigError([Problem(f"the file cannot be read: {error.strerror or error}", str(file))]) from None
    except UnicodeDecodeError as error:
        message = f"the file is not UTF-8: {error.reason} at byte {error.start}"
        raise ConfigError([Problem(message, str(file))]) from None
    except YamlSyntaxError as error:
        message = f"the file is not usable YAML: {error.message}"
        raise ConfigError([Problem(message, str(file), error.line, suggestion=error.suggestion)]) from None


@dataclass(slots=True)
class _Reader:
    """Reads one document from the top down."""

    _top: Section
    _findings: Findings
    _file: Path
    _directory: Path
    _mounted_as: str
    _elsewhere: list[Problem]

    def __init__(self, document: YamlDocument, file: Path, mounted_as: str) -> None:
        self._findings = Findings(str(file))
        for node in document.repeated:
            self._findings.refuse(node, "the key is given twice", suggestion="remove one of them")
        self._top = Section(document.root, self._findings, document.texts)
        # What is mounted into a container may be a link, beside which nothing lies.
        self._directory = file.parent.resolve()
        self._file = self._directory / file.name
        self._mounted_as = mounted_as
        self._elsewhere = []

    def problems(self) -> list[Problem]:
        """Give all that was found so far, by file and line."""
        return [*by_line([*self._findings.fatal, *self._findings.problems]), *self._elsewhere]

    def read(self) -> ProjectSpec | None:
        """Give the project, or None if something is wrong with it."""
        root = self._top.node
        if not isinstance(root.value, dict):
            self._findings.refuse(root, "the file holds no project", expected="keys", found=shown(root.plain()))
            return None
        self._top.warn_unknown(_KEYS, _REQUIRED)
        fields = self._fields()
        if self._findings.fatal or any(problem.severity == "error" for problem in self._elsewhere):
            return None
        return ProjectSpec(**{key: value for key, value in fields.items() if value is not None})

    def _fields(self) -> dict[str, Any]:
        top = self._top
        project_type = top.choice("type", _TYPES)
        env = self._env()
        models_key = find_models_section(top, project_type)
        fields: dict[str, Any] = {
            "name": self._mounted_as or self._directory.name,
            "directory": self._directory,
            "file": self._file,
            "type": project_type,
            "serve_port": top.whole("serve_port", 1, _MAX_PORT),
            "env": env,
            "dotenv": self._dotenv(env),
            "config": self._config(),
            "python_path": self._python_path(),
            "protobuf_path": self._protobuf_path(),
            "models": read_models(top, models_key, self._directory, project_type) if models_key else None,
            "processes": top.whole("processes", 1),
            "threads_per_process": top.whole("threads_per_process", 1),
            "max_concurrency": top.whole("max_concurrency", 0),
            "batching": self._batching(),
            "tfs_container_dns": self._tfs_container_dns(project_type),
            "log_level": top.choice("log_level", _LEVELS),
            "image": read_image(top, project_type),
        }
        fields["handler_path"] = self._handler_path(fields["python_path"])
        self._check_together(fields)
        return fields

    def _check_together(self, fields: Mapping[str, Any]) -> None:
        models: ModelsSpec | None = fields["models"]
        if models is not None and models.is_cached and (fields["processes"] or 1) > 1:
            message = f"the models of {models.section!r} are cached, which one process alone can do"
            self._top.refuse("processes", message, expected="1", suggestion="remove it, or the cache sizes")
        if self._mounted_as:
            self._check_mounted(fields)
        batching: ProjectBatching | None = fields["batching"]
        if "server_side_batching" in self._top.members and "protobuf_path" in self._top.members:
            message = "requests of gRPC are not batched"
            self._top.refuse("server_side_batching", message, suggestion="remove it, or 'protobuf_path'")
        threads = fields["threads_per_process"] or 1
        if batching is not None and fields["type"] == "python" and batching.max_batch_size > threads:
            node = self._top.node.find("server_side_batching", "max_batch_size")
            self._findings.warn(node, _SMALL_BATCH, f"set 'threads_per_process' to {batching.max_batch_size} for both")

    def _check_mounted(self, fields: Mapping[str, Any]) -> None:
        if (fields["processes"] or 1) > 1:
            message = "a handler that is served beside others has no processes of its own"
            self._top.refuse("processes", message, expected="1", suggestion="remove it, or serve the project alone")
        if "serve_port" in self._top.members:
            message = "a handler that is served beside others has no port of its own"
            self._findings.warn(self._top.node.find("serve_port"), message, "call it at the server's ports")

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
            text = file.read_text(encoding="utf-8-sig")
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
        section.warn_unknown((*_BATCHING, _RETRY), _BATCHING)
        size, interval = section.whole(_BATCHING[0], 1), section.seconds(_BATCHING[1])
        retry = section.flag(_RETRY)
        if not (size and interval):
            return None
        return ProjectBatching(max_batch_size=size, interval_seconds=interval, retry_singly=retry)

    def _tfs_container_dns(self, project_type: str | None) -> str | None:
        host = self._top.text("tfs_container_dns")
        if host is not None and project_type == "python":
            self._top.refuse("tfs_container_dns", "the key is for the type tensorflow", suggestion="remove it")
        return host

    def _python_path(self) -> Path:
        text = self._top.text("python_path") or "."
        folder = local_path(self._directory, text)
        if not is_folder(folder):
            self._top.refuse("python_path", "there is no such folder", expected=f"the folder {folder}")
        return folder

    def _protobuf_path(self) -> Path | None:
        text = self._top.text("protobuf_path")
        if text is None:
            return None
        file = local_path(self._directory, text)
        if not is_file(file):
            self._top.refuse("protobuf_path", "there is no such file", expected=f"the file {file}")
        return file

    def _handler_path(self, python_path: Path) -> Path | None:
        """Find the handler's file: in the project's folder, or else in its folder of Python code."""
        text = self._top.text("path")
        if text is None:
            return None
        candidates = list(dict.fromkeys(local_path(folder, text) for folder in (self._directory, python_path)))
        found = next((file for file in candidates if is_file(file)), None)
        if found is None:
            expected = " or ".join(f"the file {file}" for file in candidates)
            self._top.refuse("path", "there is no such file", expected=expected)
        return found
