"""Parser and validator of ``nucleus.yaml``, for serving, checks and container images; reports all problems together."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

import structlog
import yaml

from ovmstrio.config.documents import Findings, load_yaml, to_short_json
from ovmstrio.config.located import Document
from ovmstrio.config.yaml_rules import (
    Rules,
    Section,
    boolean,
    choice_ci,
    integer,
    lenient,
    nonempty_str,
    number,
    rules_of,
)
from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.handlers.config.dotenv import parse_dotenv
from ovmstrio.handlers.config.project_spec import (
    DEFAULT_MODEL,
    Dependencies,
    GpuVersion,
    ImageSpec,
    ModelEntry,
    ModelsSpec,
    ProjectBatching,
    ProjectSpec,
    is_file,
    is_folder,
    local_path,
)
from ovmstrio.util.regular_files import read_regular_text

_ALTERNATIVES: Final = ("path", "paths", "dir")
_MODEL_KEYS: Final[Rules] = {
    "path": nonempty_str,
    "paths": None,
    "dir": nonempty_str,
    "signature_key": nonempty_str,
    "cache_size": lenient(integer(1)),
    "disk_cache_size": lenient(integer(1)),
    "latest_versions": lenient(integer(1)),
    "reload_interval_seconds": lenient(number(0, "a number of seconds")),
    "storage_timeout_seconds": lenient(number(0, "a number of seconds")),
}
_CACHES: Final = ("cache_size", "disk_cache_size")
_OF_TYPE: Final = {"tensorflow": "models", "python": "multi_model_reloading"}
_URL: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_BUCKETS: Final = ("s3", "s3a", "gs", "gcs", "az", "abfs")
_WHERE: Final = "a folder, or a URL such as s3://bucket/folder"


def find_models_section(top: Section, project_type: str | None) -> str | None:
    """Return the key of the models section; None if it is missing or wrong for the type.

    The key is ``models`` for TensorFlow, and ``multi_model_reloading`` or its deprecated alias ``models`` for Python.
    """
    given = [key for key in _OF_TYPE.values() if key in top.members]
    if project_type is None:
        return given[0] if given else None
    proper = _OF_TYPE[project_type]
    if project_type == "tensorflow":
        if "multi_model_reloading" in given:
            top.refuse("multi_model_reloading", "the key is for the type python", suggestion="write 'models'")
        elif not given:
            top.refuse("models", "the type tensorflow needs the key 'models'", suggestion="add it")
    elif len(given) > 1:
        top.refuse("models", "duplicate of 'multi_model_reloading' for the type python")
    elif "models" in given:
        message = "for the type python this key is deprecated"
        top.warn("models", message, f"write {proper!r}")
        return "models"
    return proper if proper in given else None


def read_models(top: Section, key: str, directory: Path, project_type: str | None) -> ModelsSpec | None:
    """Read the models section ``key``, with paths relative to ``directory``; return None after a problem."""
    section = top.section(key)
    if section is None:
        return None
    before = len(section.findings.fatal)
    fields = {"section": key, **section.read(_MODEL_KEYS)}
    _warn_signature(section, fields, project_type)
    _check_caches(section, fields)
    given = [each for each in _ALTERNATIVES if each in section.members]
    path, folder = (_location(section, each, fields.pop(each, None), directory) for each in ("path", "dir"))
    if path:
        fields["entries"] = (ModelEntry(name=DEFAULT_MODEL, path=path, signature_key=fields.get("signature_key")),)
    elif folder:
        fields["dir"] = folder
    if "paths" in given:
        fields["entries"] = _entries(section, directory, project_type, fields.get("signature_key"))
    if len(given) != 1:
        found = f"found {' and '.join(map(repr, given))}" if given else "found none"
        top.refuse(key, f"exactly one of 'path', 'paths' and 'dir' is required, {found}")
    if "path" in given and "cache_size" in fields:
        section.refuse("cache_size", "caching requires several models", suggestion="use 'paths' or 'dir'")
    return ModelsSpec(kind=given[0], **fields) if len(section.findings.fatal) == before else None


def _check_caches(section: Section, sizes: Mapping[str, Any]) -> None:
    given = [key for key in _CACHES if key in section.members]
    if len(given) == 1:
        (other,) = {*_CACHES} - {*given}
        section.refuse(given[0], f"the key requires {other!r}", suggestion=f"add {other!r}, or remove this")
    memory, disk = (sizes.get(key) for key in _CACHES)
    if memory and disk and memory > disk:
        expected = f"{disk} or less, which is 'disk_cache_size'"
        section.refuse("cache_size", "the memory cache must not exceed the disk cache", expected=expected)


def _warn_signature(section: Section, given: Mapping[str, Any], project_type: str | None) -> None:
    if "signature_key" in given and project_type == "python":
        section.warn("signature_key", "only the type tensorflow has signatures")


def _entries(
    section: Section, directory: Path, project_type: str | None, signature: str | None
) -> tuple[ModelEntry, ...]:
    items = section.sections("paths")
    if section.members["paths"].value == []:
        section.refuse("paths", "the list is empty", suggestion="add a model with name and path")
    entries: dict[str, ModelEntry] = {}
    for item in items or []:
        given = item.read(rules_of(ModelEntry), required=("name", "path"))
        _warn_signature(item, given, project_type)
        name, path = given.get("name"), _location(item, "path", given.get("path"), directory)
        _check_name(item, name, entries)
        if name and path:
            entries[name] = ModelEntry(name=name, path=path, signature_key=given.get("signature_key", signature))
    return tuple(entries.values())


def _check_name(item: Section, name: str | None, taken: Mapping[str, ModelEntry]) -> None:
    if name is not None and ("/" in name or name in {".", ".."}):
        item.refuse("name", "invalid name", expected="a name without '/'")
    elif name in taken:
        item.refuse("name", f"the name {name!r} is used twice", expected="unique names")


def _location(section: Section, key: str, text: str | None, directory: Path) -> str | None:
    if text is None:
        return None
    url = _URL.fullmatch(text)
    if url is None:
        path = local_path(directory, text)
        _warn_missing(section, key, path)
        return str(path)
    scheme, rest = url[1].lower(), url[2]
    bucket, _, prefix = rest.partition("/")
    if scheme in _BUCKETS and not (bucket and prefix.strip("/")):
        section.refuse(key, "bucket or folder missing", expected=f"{scheme}://bucket/folder")
    elif not rest.strip("/"):
        section.refuse(key, "the URL has no folder", expected=_WHERE)
    elif scheme == "file":
        _warn_missing(section, key, Path(unquote(urlsplit(text).path)))
    return text


def _warn_missing(section: Section, key: str, path: Path) -> None:
    if not is_folder(path):
        section.warn(key, f"the folder {path} does not exist", "models are served once it exists")


# Settings for images

DEFAULT_PYTHON: Final = "3.11"
_VERSION: Final = re.compile(r"(\d+)\.(\d+)(\.\d+)?")
_PYTHONS: Final = ((3, 11), (3, 14))
_FIRST_TENSORFLOW: Final = (2, 12)
"""First TensorFlow for the Pythons that the server supports."""
_SYSTEMS: Final = (((11, 7), "22.04"), ((11, 0), "20.04"))
"""Ubuntu versions by the first CUDA version with such an image."""


def supported_python(version: str) -> str | None:
    """Return the Python version of an image; None if the server does not support it."""
    numbers = _numbers(version)
    return version if numbers is not None and _PYTHONS[0] <= numbers < _PYTHONS[1] else None


def supported_tensorflow(version: str) -> str | None:
    """Return the TensorFlow version of an image; None if none exists for the server's Pythons."""
    numbers = _numbers(version)
    return version if numbers is not None and numbers >= _FIRST_TENSORFLOW else None


def ubuntu_for_cuda(cuda: str) -> str | None:
    """Return the Ubuntu version of a CUDA image; None if its C library is too old for OpenVINO."""
    numbers = _numbers(cuda)
    if numbers is None:
        return None
    return next((system for first, system in _SYSTEMS if numbers >= first), None)


def _numbers(version: str) -> tuple[int, int] | None:
    match = _VERSION.fullmatch(version)
    return None if match is None else (int(match[1]), int(match[2]))


IMAGE_KEYS: Final[Rules] = {
    "py_version": nonempty_str,
    "tfs_version": nonempty_str,
    "gpu": lenient(boolean),
    "gpu_version": None,
    "dependencies": None,
    "use_local_cortex_libs": lenient(boolean),
}
_NO_SERVING: Final = "the server runs SavedModels itself, without TensorFlow Serving"
_EXPLANATIONS: Final = {
    "py_version": "handlers run in the server's Python",
    "tfs_version": _NO_SERVING,
    "gpu": "serving uses the devices of the machine",
    "gpu_version": "serving uses the CUDA version of the machine",
    "dependencies": "dependencies must be installed in the server's environment",
    "use_local_cortex_libs": "serving uses the running server",
}
_IMAGE_VERSIONS: Final = {
    "py_version": (supported_python, f"the image gets Python {DEFAULT_PYTHON}; supported: 3.11 to 3.13"),
    "tfs_version": (
        supported_tensorflow,
        "the image gets no TensorFlow unless the requirements name one; supported: 2.12 or newer",
    ),
    "cuda": (ubuntu_for_cuda, "its images are too old for OpenVINO; supported: 11.0 or newer"),
}
"""By key: the function that selects the version in the image, and the consequence if there is none."""
log = structlog.get_logger(__name__)


def log_image_only_keys(project: ProjectSpec) -> None:
    """Log why serving ignores the keys that only concern images."""
    for key in project.image.keys:
        log.info("key is for images only", project=project.name, key=key, reason=_EXPLANATIONS[key])
    if project.tfs_container_dns is not None:
        log.info("key has no effect", project=project.name, key="tfs_container_dns", reason=_NO_SERVING)


def read_image(top: Section, given: Mapping[str, Any]) -> ImageSpec:
    """Read the image settings and report conflicts with the type; ``given`` are the parsed values of ``top``."""
    _warn_unsupported(top, given)
    if given.get("type") == "python" and "tfs_version" in given:
        top.refuse("tfs_version", "the key is for the type tensorflow", suggestion="remove it")
    dependencies = top.section("dependencies")
    return ImageSpec(
        keys=tuple(key for key in top.members if key in IMAGE_KEYS),
        gpu_version=_gpu_version(top, given.get("type"), gpu=given.get("gpu", False)),
        dependencies=Dependencies(**dependencies.read(rules_of(Dependencies))) if dependencies else Dependencies(),
        **{key: value for key, value in given.items() if key in IMAGE_KEYS},
    )


def _warn_unsupported(section: Section, given: Mapping[str, Any]) -> None:
    for key, (fits, consequence) in _IMAGE_VERSIONS.items():
        if key in given and fits(given[key]) is None:
            section.warn(key, f"the server does not run with {given[key]}", consequence)


def _gpu_version(top: Section, project_type: str | None, *, gpu: bool) -> GpuVersion | None:
    section = top.section("gpu_version")
    if section is None:
        if project_type == "python" and gpu and "gpu_version" not in top.members:
            top.refuse("gpu", "a GPU needs the key 'gpu_version'", suggestion="add it, with 'cuda' and 'cudnn'")
        return None
    if project_type == "tensorflow":
        top.refuse("gpu_version", "the key is for the type python", suggestion="remove it")
    elif not gpu:
        top.refuse("gpu_version", "the key requires 'gpu: true'", suggestion="add it, or remove this")
    values = section.read(rules_of(GpuVersion), required=("cuda", "cudnn"))
    _warn_unsupported(section, values)
    return GpuVersion(**values) if {"cuda", "cudnn"} <= values.keys() else None


# Project

_NAMES: Final = ("nucleus.yaml", "nucleus.yml")
_SUFFIXES: Final = (".yaml", ".yml")
_PROJECT_KEYS: Final[Rules] = {
    "type": choice_ci(("python", "tensorflow")),
    "serve_port": lenient(integer(1, 65_535)),
    "env": None,
    "config": None,
    "python_path": nonempty_str,
    "path": nonempty_str,
    "protobuf_path": nonempty_str,
    "models": None,
    "multi_model_reloading": None,
    "processes": lenient(integer(1)),
    "threads_per_process": lenient(integer(1)),
    "max_concurrency": lenient(integer(0)),
    "server_side_batching": None,
    "tfs_container_dns": nonempty_str,
    "log_level": choice_ci(("debug", "info", "warning", "error")),
    **IMAGE_KEYS,
}
_REQUIRED: Final = ("type", "path")
_BATCHING: Final[Rules] = {
    "max_batch_size": lenient(integer(1)),
    "batch_interval_seconds": lenient(number(0, "a number of seconds")),
    "retry_singly": lenient(boolean),
}
_SMALL_BATCH: Final = "batches may exceed 'threads_per_process', unlike in Nucleus"


def find_project_file(path: Path) -> Path | None:
    """Return the project file for a path to a YAML file or a folder; None if there is none."""
    if path.is_dir():
        return next((path / name for name in _NAMES if (path / name).is_file()), None)
    return path if path.suffix in _SUFFIXES else None


def read_project(path: Path, *, mounted_as: str = "") -> tuple[ProjectSpec, list[Problem]]:
    """Read a project and its ``.env``; return the project and warnings.

    ``path`` is the project file or its folder. ``mounted_as`` is the name in ``handler_config_list``, else that of the
    folder.

    Raises:
        ConfigError: the project is invalid; lists all problems, warnings included.
    """
    file = find_project_file(path) or path
    if file.is_dir():
        expected = " or ".join(_NAMES)
        raise ConfigError([Problem("the folder is not a project", str(path), expected=expected, found="neither file")])
    reader = _ProjectReader(load_yaml(file), file, mounted_as)
    spec = reader.read()
    if spec is None:
        raise ConfigError(reader.problems())
    return spec, reader.problems()


class _ProjectReader:
    def __init__(self, document: Document, file: Path, mounted_as: str) -> None:
        self._findings = Findings(str(file))
        self._findings.refuse_repeated(document, "")
        self._top = Section(document.root, self._findings)
        # In containers, the file may be a mounted link without the other project files next to it.
        self._directory = file.parent.resolve()
        self._file = self._directory / file.name
        self._mounted_as = mounted_as
        self._other_problems: list[Problem] = []

    def problems(self) -> list[Problem]:
        return [*self._findings.all, *self._other_problems]

    def read(self) -> ProjectSpec | None:
        root = self._top.node
        if not isinstance(root.value, dict):
            self._findings.refuse(
                root, "the file contains no project", expected="keys", found=to_short_json(root.plain())
            )
            return None
        fields = self._fields(self._top.read(_PROJECT_KEYS, required=_REQUIRED))
        if self._findings.fatal or any(problem.severity == "error" for problem in self._other_problems):
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
            message = f"the cached models of {models.section!r} require a single process"
            self._top.refuse("processes", message, expected="1", suggestion="remove it, or the cache sizes")
        if self._mounted_as:
            self._check_mounted(fields)
        batching: ProjectBatching | None = fields["batching"]
        if "server_side_batching" in self._top.members and "protobuf_path" in self._top.members:
            message = "gRPC requests are not batched"
            self._top.refuse("server_side_batching", message, suggestion="remove it, or 'protobuf_path'")
        threads = fields.get("threads_per_process", 1)
        if batching is not None and fields.get("type") == "python" and batching.max_batch_size > threads:
            node = self._top.node.find("server_side_batching", "max_batch_size")
            self._findings.warn(node, _SMALL_BATCH, f"set 'threads_per_process' to {batching.max_batch_size} for both")

    def _check_mounted(self, fields: Mapping[str, Any]) -> None:
        if fields.get("processes", 1) > 1:
            message = "handlers of config.json share one process"
            self._top.refuse("processes", message, expected="1", suggestion="remove it, or serve the project alone")
        if "serve_port" in self._top.members:
            message = "handlers of config.json use the server's ports"
            self._top.warn("serve_port", message, "remove it")

    def _env(self) -> dict[str, str]:
        section = self._top.section("env")
        values: dict[str, str] = {}
        for key, node in (section.members if section else {}).items():
            name = str(key)
            if isinstance(node.value, dict | list):
                found = to_short_json(node.plain())
                self._findings.refuse(node, "wrong type", expected="a text, a number or a boolean", found=found)
            elif not name or "=" in name or "\0" in name + str(node.value):
                self._findings.refuse(node, "cannot be exported", expected="a name without '='")
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
            self._other_problems.append(Problem(f"the file cannot be read: {error}", str(file)))
            return {}
        variables, problems = parse_dotenv(text, os.environ | env, str(file))
        self._other_problems += problems
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
        if text is None:
            return None
        candidates = list(dict.fromkeys(local_path(folder, text) for folder in (self._directory, *others)))
        found = next((file for file in candidates if is_file(file)), None)
        if found is None:
            self._top.refuse(
                key, "there is no such file", expected=" or ".join(f"the file {each}" for each in candidates)
            )
        return found


def to_yaml(project: ProjectSpec) -> str:
    """Return the project as YAML, without keys that are unset and off by default."""
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
        "paths": [entry.model_dump(exclude_none=True) for entry in models.entries] if models.kind == "paths" else None,
        "dir": models.dir or None,
        "signature_key": models.signature_key,
        "cache_size": models.cache_size,
        "disk_cache_size": models.disk_cache_size,
        "latest_versions": models.latest_versions,
        "reload_interval_seconds": models.reload_interval_seconds,
    }
    return {models.section: {key: value for key, value in values.items() if value is not None}}
