"""Parser and validator of ``nucleus.yaml``, for serving, checks and container images; reports all problems together."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final
from urllib.parse import unquote, urlsplit

import structlog
import yaml

from ovmstrio.config.documents import Document, Findings, Located
from ovmstrio.config.schema import OPTIONAL, Key, NoEffect, Reader, keys_of
from ovmstrio.config.yaml_documents import load_yaml
from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.handlers.config.dotenv import parse_dotenv
from ovmstrio.handlers.config.project_spec import (
    DEFAULT_MODEL,
    NO_SERVING,
    GpuVersion,
    ImageSpec,
    Limit,
    LogLevel,
    ModelEntry,
    ModelSettings,
    ModelsSpec,
    Port,
    Positive,
    ProjectBatching,
    ProjectSpec,
    ProjectType,
    Text,
    local_path,
)
from ovmstrio.util.regular_files import is_file, is_folder, read_regular_text

_NAMES: Final = ("nucleus.yaml", "nucleus.yml")
_SUFFIXES: Final = (".yaml", ".yml")


class _ProjectKeys(ImageSpec):
    """Keys of a project file; values without conversion are read by :class:`_ProjectReader`."""

    type: ProjectType
    path: Text
    serve_port: Port = OPTIONAL
    env: Any = OPTIONAL
    config: Any = OPTIONAL
    python_path: Text = OPTIONAL
    protobuf_path: Text = OPTIONAL
    models: Any = OPTIONAL
    multi_model_reloading: Any = OPTIONAL
    processes: Positive = OPTIONAL
    threads_per_process: Positive = OPTIONAL
    max_concurrency: Limit = OPTIONAL
    batching: Annotated[ProjectBatching, Key("server_side_batching")] = OPTIONAL
    tfs_container_dns: Annotated[Text, NoEffect(NO_SERVING)] = OPTIONAL
    log_level: LogLevel = OPTIONAL


class _ModelKeys(ModelSettings):
    """Keys of a models section."""

    path: Text = OPTIONAL
    paths: Any = OPTIONAL
    dir: Text = OPTIONAL


def find_project_file(path: Path) -> Path | None:
    """Return the project file for a path to a YAML file or a folder; None if there is none."""
    if is_folder(path):
        return next((path / name for name in _NAMES if is_file(path / name)), None)
    return path if path.suffix in _SUFFIXES else None


def read_project(path: Path, *, mounted_as: str = "") -> tuple[ProjectSpec, list[Problem]]:
    """Read a project and its ``.env``; return the project and warnings.

    ``path`` is the project file or its folder. ``mounted_as`` is the name in ``handler_config_list``, else that of the
    folder.

    Raises:
        ConfigError: the project is invalid; lists all problems, warnings included.
    """
    file = find_project_file(path) or path
    if is_folder(file):
        expected = " or ".join(_NAMES)
        raise ConfigError([Problem("the folder is not a project", str(path), expected=expected, found="neither file")])
    reader = _ProjectReader(load_yaml(file), file, mounted_as)
    spec = reader.read()
    if spec is None:
        raise ConfigError(reader.problems())
    return spec, reader.problems()


class _ProjectReader:
    def __init__(self, document: Document, file: Path, mounted_as: str) -> None:
        findings = Findings(str(file))
        findings.refuse_repeated(document, "")
        self._reader = Reader(findings, is_yaml=True)
        self._root = document.root
        self._given = {key for key, each in document.root.members.items() if each.value is not None}
        # In containers, the file may be a mounted link without the other project files next to it.
        self._directory = file.parent.resolve()
        self._file = self._directory / file.name
        self._mounted_as = mounted_as
        self._other_problems: list[Problem] = []

    def problems(self) -> list[Problem]:
        return [*self._reader.findings.all, *self._other_problems]

    def read(self) -> ProjectSpec | None:
        if not isinstance(self._root.value, dict):
            self._reader.refuse(self._root, "the file contains no project", "keys")
            return None
        fields = self._fields(self._reader.values(self._root, _ProjectKeys))
        if self._reader.findings.fatal or any(problem.severity == "error" for problem in self._other_problems):
            return None
        return ProjectSpec(**{key: value for key, value in fields.items() if value is not None})

    def _fields(self, given: dict[str, Any]) -> dict[str, Any]:
        env = self._env()
        models_key = self._find_models_section(given.get("type"))
        python_path = local_path(self._directory, given.get("python_path", "."))
        if not is_folder(python_path):
            self._refuse("python_path", "there is no such folder", f"the folder {python_path}")
        fields = {key: value for key, value in given.items() if key in ProjectSpec.model_fields} | {
            "name": self._mounted_as or self._directory.name,
            "directory": self._directory,
            "file": self._file,
            "env": env,
            "dotenv": self._dotenv(env),
            "config": self._mapping("config").plain(),
            "python_path": python_path,
            "handler_path": self._file_of("path", given.get("path"), python_path),
            "protobuf_path": self._file_of("protobuf_path", given.get("protobuf_path")),
            "models": self._models(models_key, given.get("type")) if models_key else None,
            "image": self._image(given),
        }
        self._check_together(fields)
        return fields

    def _refuse(self, key: str, message: str, expected: str = "", suggestion: str = "") -> None:
        self._reader.refuse(self._root.find(key), message, expected, suggestion)

    def _warn(self, node: Located, message: str, suggestion: str = "") -> None:
        self._reader.findings.warn(node, message, suggestion)

    def _mapping(self, key: str) -> Located:
        """Return the mapping of a key; empty if it is missing or not a mapping, which is reported."""
        node = self._root.members[key] if key in self._given else Located({})
        return node if self._reader.is_mapping(node) else Located({})

    # Contradictions

    def _check_together(self, fields: Mapping[str, Any]) -> None:
        models: ModelsSpec | None = fields["models"]
        if fields.get("type") == "python" and "tfs_container_dns" in self._given:
            self._refuse("tfs_container_dns", "the key is for the type tensorflow", suggestion="remove it")
        if models is not None and models.is_cached and fields.get("processes", 1) > 1:
            message = f"the cached models of {models.section!r} require a single process"
            self._refuse("processes", message, "1", "remove it, or the cache sizes")
        if self._mounted_as and fields.get("processes", 1) > 1:
            message = "handlers of config.json share one process"
            self._refuse("processes", message, "1", "remove it, or serve the project alone")
        if self._mounted_as and "serve_port" in self._given:
            self._warn(self._root.find("serve_port"), "handlers of config.json use the server's ports", "remove it")
        if {"server_side_batching", "protobuf_path"} <= self._given:
            message = "gRPC requests are not batched"
            self._refuse("server_side_batching", message, suggestion="remove it, or 'protobuf_path'")
        batching: ProjectBatching | None = fields.get("batching")
        threads = fields.get("threads_per_process", 1)
        if batching is not None and fields.get("type") == "python" and batching.max_batch_size > threads:
            node = self._root.find("server_side_batching", "max_batch_size")
            message = "batches may exceed 'threads_per_process', unlike in Nucleus"
            self._warn(node, message, f"set 'threads_per_process' to {batching.max_batch_size} for both")

    # Environment and files

    def _env(self) -> dict[str, str]:
        values: dict[str, str] = {}
        for key, node in self._mapping("env").members.items():
            name = str(key)
            if isinstance(node.value, dict | list):
                self._reader.refuse(node, "wrong type", "a text, a number or a boolean")
            elif not name or "=" in name or "\0" in name + str(node.value):
                self._reader.findings.refuse(node, "cannot be exported", expected="a name without '='")
            elif node.value is not None:
                values[name] = str(node.value)
        return values

    def _dotenv(self, env: Mapping[str, str]) -> dict[str, str]:
        file = self._directory / ".env"
        if not is_file(file):
            return {}
        try:
            text = read_regular_text(file, encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            self._other_problems.append(Problem(f"the file cannot be read: {error}", str(file)))
            return {}
        variables, problems = parse_dotenv(text, os.environ | env, str(file))
        self._other_problems += problems
        return variables

    def _file_of(self, key: str, text: str | None, *others: Path) -> Path | None:
        if text is None:
            return None
        candidates = list(dict.fromkeys(local_path(folder, text) for folder in (self._directory, *others)))
        found = next((file for file in candidates if is_file(file)), None)
        if found is None:
            self._refuse(key, "there is no such file", " or ".join(f"the file {each}" for each in candidates))
        return found

    # Models

    def _find_models_section(self, project_type: str | None) -> str | None:
        """Return the key of the models section; None if it is missing or wrong for the type.

        The key is ``models`` for TensorFlow, and ``multi_model_reloading`` or its deprecated alias ``models`` for
        Python.
        """
        given = [key for key in _OF_TYPE.values() if key in self._given]
        if project_type is None:
            return given[0] if given else None
        proper = _OF_TYPE[project_type]
        if project_type == "tensorflow":
            if "multi_model_reloading" in given:
                self._refuse("multi_model_reloading", "the key is for the type python", suggestion="write 'models'")
            elif not given:
                self._refuse("models", "the type tensorflow needs the key 'models'", suggestion="add it")
        elif len(given) > 1:
            self._refuse("models", "duplicate of 'multi_model_reloading' for the type python")
        elif "models" in given:
            self._warn(self._root.find("models"), "for the type python this key is deprecated", f"write {proper!r}")
            return "models"
        return proper if proper in given else None

    def _models(self, key: str, project_type: str | None) -> ModelsSpec | None:
        section = self._root.members[key]
        if not self._reader.is_mapping(section):
            return None
        before = len(self._reader.findings.fatal)
        fields = self._reader.values(section, _ModelKeys)
        given = [each for each in _ALTERNATIVES if section.find(each).value not in (None, section.value)]
        paths = {each: self._location(section.find(each), fields.get(each)) for each in ("path", "dir")}
        entries = self._entries(section.find("paths"), project_type) if "paths" in given else []
        self._warn_signature(section, fields.get("signature_key"), project_type)
        self._check_caches(section, given, fields)
        if len(given) != 1:
            found = f"found {' and '.join(map(repr, given))}" if given else "found none"
            self._refuse(key, f"exactly one of 'path', 'paths' and 'dir' is required, {found}")
        if len(self._reader.findings.fatal) > before:
            return None
        if paths["path"]:
            entries = [ModelEntry(name=DEFAULT_MODEL, path=paths["path"])]
        signature = fields.get("signature_key")
        return ModelsSpec(
            section=key,
            kind=given[0],
            entries=[each.model_copy(update={"signature_key": each.signature_key or signature}) for each in entries],
            dir=paths["dir"] or "",
            **{name: value for name, value in fields.items() if name in ModelSettings.model_fields},
        )

    def _check_caches(self, section: Located, alternatives: list[str], sizes: Mapping[str, Any]) -> None:
        given = [key for key in _CACHES if section.find(key).value not in (None, section.value)]
        memory, disk = (sizes.get(key) for key in _CACHES)
        if len(given) == 1:
            (other,) = {*_CACHES} - {*given}
            hint = f"add {other!r}, or remove this"
            self._reader.refuse(section.find(given[0]), f"the key requires {other!r}", suggestion=hint)
        if memory and disk and memory > disk:
            expected = f"{disk} or less, which is 'disk_cache_size'"
            message = "the memory cache must not exceed the disk cache"
            self._reader.refuse(section.find("cache_size"), message, expected)
        if "path" in alternatives and memory:
            hint = "use 'paths' or 'dir'"
            self._reader.refuse(section.find("cache_size"), "caching requires several models", suggestion=hint)

    def _warn_signature(self, node: Located, signature: str | None, project_type: str | None) -> None:
        if signature is not None and project_type == "python":
            self._warn(node.find("signature_key"), "only the type tensorflow has signatures")

    def _entries(self, node: Located, project_type: str | None) -> list[ModelEntry]:
        if node.value == []:
            self._reader.refuse(node, "the list is empty", suggestion="add a model with name and path")
        entries: dict[str, ModelEntry] = {}
        for item in self._reader.items(node):
            given = self._reader.values(item, ModelEntry)
            self._warn_signature(item, given.get("signature_key"), project_type)
            name, path = given.get("name"), self._location(item.find("path"), given.get("path"))
            if name is not None and ("/" in name or name in {".", ".."}):
                self._reader.refuse(item.find("name"), "invalid name", "a name without '/'")
            elif name in entries:
                self._reader.refuse(item.find("name"), f"the name {name!r} is used twice", "unique names")
            if name and path:
                entries[name] = ModelEntry(**given | {"path": path})
        return list(entries.values())

    def _location(self, node: Located, text: str | None) -> str | None:
        if text is None:
            return None
        url = _URL.fullmatch(text)
        folder = local_path(self._directory, text) if url is None else None
        if url is not None:
            scheme, rest = url[1].lower(), url[2]
            bucket, _, prefix = rest.partition("/")
            if scheme in _BUCKETS and not (bucket and prefix.strip("/")):
                self._reader.refuse(node, "bucket or folder missing", f"{scheme}://bucket/folder")
            elif not rest.strip("/"):
                self._reader.refuse(node, "the URL has no folder", "a folder, or a URL such as s3://bucket/folder")
            elif scheme == "file":
                folder = Path(unquote(urlsplit(text).path))
        if folder is not None and not is_folder(folder):
            self._warn(node, f"the folder {folder} does not exist", "models are served once it exists")
        return str(folder) if url is None else text

    # Images

    def _image(self, given: Mapping[str, Any]) -> ImageSpec:
        project_type = given.get("type")
        gpu: GpuVersion | None = given.get("gpu_version")
        if project_type == "python" and "tfs_version" in given:
            self._refuse("tfs_version", "the key is for the type tensorflow", suggestion="remove it")
        if project_type == "python" and given.get("gpu") and "gpu_version" not in self._given:
            self._refuse("gpu", "a GPU needs the key 'gpu_version'", suggestion="add it, with 'cuda' and 'cudnn'")
        if isinstance(self._root.find("gpu_version").value, dict) and "gpu_version" in self._given:
            if project_type == "tensorflow":
                self._refuse("gpu_version", "the key is for the type python", suggestion="remove it")
            elif not given.get("gpu"):
                message = "the key requires 'gpu: true'"
                self._refuse("gpu_version", message, suggestion="add it, or remove this")
        for key, (fits, consequence) in _IMAGE_VERSIONS.items():
            node = self._root.find("gpu_version", key) if key == "cuda" else self._root.find(key)
            version: str | None = (gpu.cuda if gpu else None) if key == "cuda" else given.get(key)
            if version is not None and fits(version) is None:
                self._warn(node, f"the server does not run with {version}", consequence)
        return ImageSpec(
            keys=tuple(key for key in self._root.members if key in self._given and key in _IMAGE_KEYS),
            **{key: value for key, value in given.items() if key in _IMAGE_KEYS},
        )


_ALTERNATIVES: Final = ("path", "paths", "dir")
_CACHES: Final = ("cache_size", "disk_cache_size")
_OF_TYPE: Final = {"tensorflow": "models", "python": "multi_model_reloading"}
_URL: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_BUCKETS: Final = ("s3", "s3a", "gs", "gcs", "az", "abfs")

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


_IMAGE_KEYS: Final = keys_of(ImageSpec)
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
        log.info("key is for images only", project=project.name, key=key, reason=_IMAGE_KEYS[key].no_effect)
    if project.tfs_container_dns is not None:
        log.info("key has no effect", project=project.name, key="tfs_container_dns", reason=NO_SERVING)


# The expanded file


def to_yaml(project: ProjectSpec) -> str:
    """Return the project as YAML, without keys that are unset and off by default."""
    own = project.model_dump(include=keys_of(_ProjectKeys).keys() - {"models", "protobuf_path", "tfs_container_dns"})
    image = project.image.model_dump(exclude={"keys"})
    paths = {"python_path": project.python_path, "path": project.handler_path, "protobuf_path": project.protobuf_path}
    values = own | image | {key: _below(path, project.directory) for key, path in paths.items() if path is not None}
    if project.type == "tensorflow":
        values["tfs_container_dns"] = project.tfs_container_dns or "localhost"
    else:
        del values["tfs_version"]
    if project.batching is not None:
        batching = {key: getattr(project.batching, each.name) for key, each in keys_of(ProjectBatching).items()}
        values["server_side_batching"] = batching
    if project.models is not None:
        values[project.models.section] = _models(project.models)
    given = {key: values[key] for key in keys_of(_ProjectKeys) if values.get(key) is not None}
    text: str = yaml.safe_dump(given, sort_keys=False, allow_unicode=True)
    return text


def _below(path: Path, directory: Path) -> str:
    return str(path.relative_to(directory) if path.is_relative_to(directory) else path)


def _models(models: ModelsSpec) -> dict[str, Any]:
    entries = [entry.model_dump(exclude_none=True) for entry in models.entries]
    alternatives = {"path": entries[0]["path"] if entries else None, "paths": entries, "dir": models.dir}
    settings = models.model_dump(include=set(ModelSettings.model_fields), exclude_none=True)
    return {models.kind: alternatives[models.kind], **settings}
