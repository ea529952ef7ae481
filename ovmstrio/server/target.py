"""Detection of what a path serves: a model file, a folder, a configuration, a project; as settings that exist already.

::

    path ─> Target ─┬─> options of ServerSettings    model, graph, text model, configuration, repository
                    ├─> project file                 handler project
                    └─> configuration and script     pipeline of Ops

A repository, a folder of folders that can be served, is a configuration with an entry for each of them
(:func:`read_config`); it is read again like a configuration file, so folders may be added and removed.
All functions read the disk.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Final

from ovmstrio.config.documents import did_you_mean
from ovmstrio.config.model_entries import GRAPH_SUFFIX, is_graph
from ovmstrio.config.service_options import check_name
from ovmstrio.config.text_entries import detect_task
from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.server.kinds import KINDS
from ovmstrio.server.settings import ServerSettings
from ovmstrio.serving.model_versions import (
    EXPECTED_MODEL,
    MODEL_SUFFIXES,
    check_regular_files,
    companion_file,
    find_model_file,
)
from ovmstrio.util.regular_files import file_kind, is_file, read_regular_bytes

SERVABLE: Final = (
    "a model file or its folder, a folder of several models, the folder of a language model, config.json, "
    "graph.pbtxt, nucleus.yaml, or config.yml of a pipeline of Ops"
)


class TargetKind(Enum):
    """Form of what a path serves."""

    MODEL = "model"
    TEXT_MODEL = "text model"
    GRAPH = "graph"
    CONFIG = "configuration"
    REPOSITORY = "repository"
    HANDLER = "handler project"
    OPS = "pipeline of Ops"
    ADDRESS = "address"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Services of a path, in the terms of the settings.

    Attributes:
        name: name of the service; of a configuration or repository, the name of its file or folder.
        path: absolute path of the model, graph, configuration, project file or folder; symbolic links are kept.
        options: values of ``ServerSettings`` by name; empty for handler projects and pipelines of Ops.
        scripts: scripts that may create the Ops, the default first.
        members: services of a repository by name.
        skipped: folders of a repository that cannot be served, with the reasons.
    """

    kind: TargetKind
    name: str
    path: Path
    options: Mapping[str, Any] = field(default_factory=dict)
    scripts: tuple[Path, ...] = ()
    members: Mapping[str, Target] = field(default_factory=dict)
    skipped: tuple[Problem, ...] = ()

    @property
    def script(self) -> Path:
        """The script that creates the Ops.

        Raises:
            ConfigError: there is none, or several.
        """
        if len(self.scripts) == 1:
            return self.scripts[0]
        names = ", ".join(script.name for script in self.scripts)
        hint = f"choose one: --service {self.scripts[0]}" if names else "name it: --service SCRIPT"
        found = names or f"no script that calls run_service next to {self.path.name}"
        message = "several scripts create Ops" if names else "the script of the pipeline of Ops is missing"
        raise _refusal(message, self.path, expected=f"{_DEFAULT_SCRIPT}, or one script", found=found, suggestion=hint)


def find_target(location: str | os.PathLike[str]) -> Target:
    """Return what a file, folder or address serves.

    An address (``scheme://...``) is not examined.

    Raises:
        ConfigError: nothing can be served there; the problem has what was found, what was expected, and a fix.
    """
    text = os.fspath(location)
    if "://" in text:
        last = re.split(r"[@?#]", text.rstrip("/").rpartition("/")[2])[0]
        stem = Path(last).stem if Path(last).suffix.lower() in _SUFFIXES else last
        name = servable_name(stem)
        options = {"config_path": text} if last.endswith(".json") else {"model_name": name, "model_path": text}
        return Target(kind=TargetKind.ADDRESS, name=name, path=Path(text), options=options)
    path, mode = _existing(text)
    if stat.S_ISDIR(mode):
        return _in_folder(path)
    if not stat.S_ISREG(mode):
        raise _refusal("the path cannot be served", path, expected=SERVABLE, found=file_kind(mode))
    return _of_file(path)


def settings_of(location: str | os.PathLike[str], **options: Any) -> ServerSettings:
    """Return the settings that serve a file or folder; ``options`` are further settings by name.

    A handler project or pipeline of Ops is mounted at ``/NAME``, as from a configuration.

    Raises:
        ConfigError: as :func:`find_target`.
    """
    target = find_target(location)
    if target.kind is TargetKind.OPS:
        target.script  # noqa: B018 - raises if there is none
    own = target.options or {"config_path": target.path}
    return ServerSettings(**{**own, **options})


def read_config(path: Path) -> bytes:
    """Return the content of a configuration file, or the configuration of a folder or project.

    Raises:
        OSError: the file cannot be read.
        ConfigError: there is nothing to serve in a folder.
    """
    if not path.is_dir() and path.suffix not in _YAML:
        return read_regular_bytes(path)
    target = find_target(path)
    if target.kind is TargetKind.CONFIG:
        return read_regular_bytes(target.path)
    parts = target.members if target.kind is TargetKind.REPOSITORY else {target.name: target}
    lists: dict[str, list[dict[str, Any]]] = {"model_config_list": []}
    for name, part in parts.items():
        section, entry = _entry(name, part)
        lists.setdefault(section, []).append(entry)
    return json.dumps(lists).encode()


class ConfigReader:
    """:func:`read_config` for polls: an unchanged folder is not examined again."""

    def __init__(self) -> None:
        self._known: tuple[list[tuple[str, int]], bytes] = [], b""

    def __call__(self, path: Path) -> bytes:
        """Return the content of a configuration file, or the configuration of a folder or project."""
        if not path.is_dir():
            return read_config(path)
        mark = list(_folder_times(str(path), _DEEPEST))
        if mark != self._known[0]:
            self._known = mark, read_config(path)
        return self._known[1]


def _folder_times(folder: str, depth: int) -> Iterator[tuple[str, int]]:
    """Yield the modification times of a folder and the folders below it, as deep as models are."""
    try:
        yield folder, Path(folder).stat().st_mtime_ns
        entries = [each.path for each in os.scandir(folder) if depth and each.name[0] != "." and each.is_dir()]
    except OSError:
        return
    for each in entries:
        yield from _folder_times(each, depth - 1)


def servable_name(text: str) -> str:
    """Return a name for a service: ``text``, with ``_`` for characters that names cannot have, or ``model``."""
    plain = "".join(letter if letter.isprintable() and letter not in "/:" else "_" for letter in text).strip()
    return "model" if check_name(plain) else plain


# Files

_SUFFIXES: Final = {*dict(MODEL_SUFFIXES), ".gguf"}
_WEIGHTS: Final = {weights: suffix for suffix, weights in MODEL_SUFFIXES if weights}
_SAVED_MODEL: Final = "saved_model.pb"
_YAML: Final = (".yml", ".yaml")
_DEFAULT_SCRIPT: Final = "web_service.py"
_PREPARE: Final = "convert it: ovms prepare {}"
_HINTS: Final = {
    **dict.fromkeys((".pt", ".pt2", ".pth", ".ckpt", ".h5", ".keras"), _PREPARE),
    ".safetensors": "convert its folder: optimum-cli export openvino --model FOLDER OUTPUT",
    ".py": "serve the folder with its nucleus.yaml or config.yml; of a pipeline of Ops: ovms paddle run {}",
    ".zip": "unpack it, and serve its folder",
    ".gz": "unpack it, and serve its folder",
}
"""Fixes for files that cannot be served, by suffix."""


def _existing(text: str) -> tuple[Path, int]:
    """Return the absolute path of a file or folder, and its mode; backslashes may separate the parts of the path."""
    if not text:
        raise _refusal("the path is empty", Path(), expected=SERVABLE)
    path = Path(text)
    if "\\" in text and not path.exists() and Path(text.replace("\\", "/")).exists():
        path = Path(text.replace("\\", "/"))
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        if path.is_symlink():
            raise _refusal("the link leads nowhere", path, expected=SERVABLE, found=str(path.readlink())) from None
        near = did_you_mean(path.name, _names_in(path.parent))
        raise _refusal("no such file or directory", path, expected=SERVABLE, suggestion=near) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise _refusal(f"the path cannot be read: {reason}", path) from None
    # A link gives the name, so that links are followed only for `..`.
    return path.resolve() if ".." in path.parts else path.absolute(), mode


def _of_file(path: Path) -> Target:  # noqa: C901, PLR0911 - a case for each form
    _check_readable(path)
    suffix = path.suffix.lower()
    if path.name == _SAVED_MODEL:
        return _model(servable_name(path.parent.name), path.parent)
    if suffix in _YAML:
        return _of_yaml(path)
    if suffix == ".json":
        return _of_json(path)
    if path.name == "config.pbtxt":
        hint = f"serve its folder: ovms serve {path.parent}"
        raise _refusal("the file is a configuration of Triton", path, expected=SERVABLE, suggestion=hint)
    if suffix == GRAPH_SUFFIX:
        return _graph(path)
    if suffix == ".pdiparams" and (program := companion_file(path, ".json")) is not None:
        return _of_json(program)
    partner = companion_file(path, _WEIGHTS[suffix]) if suffix in _WEIGHTS else None
    if partner is not None:
        return _of_file(partner)
    if suffix == ".gguf":
        return _text_model(servable_name(path.stem), path)
    if suffix in _SUFFIXES:
        find_model_file(path)
        return _model(servable_name(path.stem), path)
    if path.is_symlink() and path.resolve().suffix.lower() in _SUFFIXES:
        return _model(servable_name(path.name), find_model_file(path.resolve()))
    hint = _missing_partner(path.name) or _HINTS.get(suffix, "").format(path)
    raise _refusal("the file cannot be served", path, expected=SERVABLE, found=path.name, suggestion=hint)


def _missing_partner(name: str) -> str:
    """Return the hint for a file of weights without its model; empty for other files."""
    suffix = _WEIGHTS.get(Path(name).suffix.lower())
    return "" if suffix is None else f"{name} needs {Path(name).stem}{suffix} in the same folder"


def _check_readable(path: Path) -> None:
    try:
        path.open("rb").close()
    except OSError as error:
        raise _refusal(f"the file cannot be read: {error.strerror}", path) from None


def _of_json(path: Path) -> Target:
    if companion_file(path, ".pdiparams") is not None:
        hint = "export the model with FLAGS_enable_pir_api=0, which writes a .pdmodel"
        raise _refusal(
            "the model is in the format of Paddle 3, which OpenVINO cannot read",
            path,
            expected=EXPECTED_MODEL,
            found=path.name,
            suggestion=hint,
        )
    if not _is_config(path) and detect_task(path.parent) is not None:
        return _in_folder(path.parent)
    return _config(path)


def _of_yaml(path: Path) -> Target:
    target = _ops(path)
    if target is not None:
        return target
    return Target(kind=TargetKind.HANDLER, name=servable_name(path.parent.name), path=path)


def _is_config(path: Path) -> bool:
    """Return whether a JSON file is a configuration of the server, judged by its keys; also if it is not JSON."""
    try:
        read = json.loads(read_regular_bytes(path))
    except (OSError, ValueError, RecursionError):
        return path.is_file()
    return isinstance(read, dict) and any(key.endswith("_config_list") or key == "monitoring" for key in read)


# Targets


def _model(name: str, path: Path, **options: Any) -> Target:
    named = {"model_name": name, "model_path": path, **options}
    return Target(kind=TargetKind.MODEL, name=name, path=path, options=named)


def _text_model(name: str, path: Path) -> Target:
    named = {"model_name": name, "model_path": path}
    return Target(kind=TargetKind.TEXT_MODEL, name=name, path=path, options=named)


def _graph(path: Path) -> Target:
    """Return the graph of a file or folder, whose name is that of the folder."""
    name = servable_name(path.parent.name if path.is_file() else path.name)
    return Target(kind=TargetKind.GRAPH, name=name, path=path, options={"model_name": name, "model_path": path})


def _config(path: Path) -> Target:
    return Target(kind=TargetKind.CONFIG, name=servable_name(path.stem), path=path, options={"config_path": path})


_OPS_NAMES: Final = ("config.yml", "config.yaml")
_OPS_KEYS: Final = re.compile(rb"(?m)^(rpc_port|http_port|dag|op)\s*:")
"""Keys that only the configuration of a pipeline of Ops has, not that of a handler project."""
_RUNS_SERVICE: Final = re.compile(rb"\.\s*run_service\s*\(")


def find_ops_config(path: Path) -> Path | None:
    """Return the configuration of a pipeline of Ops: the YAML file, or that of a folder; None if there is none."""
    if not path.is_dir():
        return path if path.suffix.lower() in _YAML else None
    return next((path / name for name in _OPS_NAMES if is_file(path / name)), None)


def _ops(config: Path) -> Target | None:
    """Return the pipeline of Ops of a configuration, judged by its keys and the scripts next to it."""
    scripts = find_scripts(config)
    content = _content(config)
    is_named = config.name in _OPS_NAMES and bool(scripts) and not content.lstrip().startswith(b"{")
    if not is_named and _OPS_KEYS.search(content) is None:
        return None
    return Target(kind=TargetKind.OPS, name=servable_name(config.parent.name), path=config, scripts=scripts)


def find_scripts(config: Path) -> tuple[Path, ...]:
    """Return the scripts next to a configuration that may create the Ops; ``web_service.py`` alone if it exists."""
    default = config.with_name(_DEFAULT_SCRIPT)
    return (default,) if is_file(default) else tuple(filter(_runs_service, sorted(config.parent.glob("*.py"))))


def _runs_service(script: Path) -> bool:
    return _RUNS_SERVICE.search(_content(script)) is not None


def _content(path: Path) -> bytes:
    try:
        return read_regular_bytes(path)
    except OSError:
        return b""


# Folders

_DEEPEST: Final = 3
"""Organizations may have folders between a repository and its models."""
_MAX_FOLDERS: Final = 2_000
_CONFIG_NAME: Final = "config.json"


def _in_folder(folder: Path) -> Target:
    """Return what a folder serves.

    Raises:
        ConfigError: nothing, or several models without a folder each.
    """
    target = _itself(folder)
    if target is not None and (target.kind is not TargetKind.MODEL or not _model_files(folder)):
        return target
    found_below = dict(_members(folder))
    members = {name: each for name, each in found_below.items() if isinstance(each, Target)}
    errors = [each for each in found_below.values() if isinstance(each, ConfigError)]
    if target is not None and members:
        found = ", ".join([file.name for file in _model_files(folder)[:2]] + [f"{name}/" for name in [*members][:3]])
        expected, hint = "one model, or a folder for each", f"choose one: ovms serve {_model_files(folder)[0]}"
        raise _refusal("several models in one folder", folder, expected=expected, found=found, suggestion=hint)
    if target is not None:
        return target
    if not members:
        raise _nothing_in(folder, errors)
    skipped = tuple(problem for each in errors for problem in each.problems)
    options = {"config_path": folder}
    name = servable_name(folder.name)
    return Target(kind=TargetKind.REPOSITORY, name=name, path=folder, options=options, members=members, skipped=skipped)


def _itself(folder: Path) -> Target | None:
    """Return what a folder serves without its subfolders other than versions; None for nothing."""
    from ovmstrio.handlers.config.project_file import find_project_file  # noqa: PLC0415 - reads YAML, slow to import

    name = servable_name(folder.name)
    try:
        names = [each.name for each in folder.iterdir()]
    except OSError as error:
        raise _refusal(f"the folder cannot be read: {error.strerror}", folder) from None
    project = find_project_file(folder)
    if project is not None:
        return Target(kind=TargetKind.HANDLER, name=name, path=project)
    config = folder / _CONFIG_NAME if _CONFIG_NAME in names and _is_config(folder / _CONFIG_NAME) else None
    ops = find_ops_config(folder)
    if ops is not None and config is None and (target := _ops(ops)) is not None:
        return target
    if is_graph({"base_path": str(folder)}, folder):
        return _config(config) if config else _graph(folder)
    text = _find_text_model(folder, names)
    if text is not None:
        return _text_model(name, text)
    versions = _versions(folder)
    if versions:
        texts = [each for each in map(_text_in, versions) if each is not None]
        if not texts and not any(map(_is_complete, versions)):
            check_regular_files(versions[-1])
            find_model_file(versions[-1])
        return _text_model(name, texts[-1]) if texts else _model(name, folder)
    if config is not None:
        return _config(config)
    return _only_model(folder)


def _is_complete(folder: Path) -> bool:
    try:
        find_model_file(folder)
    except ConfigError:
        return False
    return True


def _only_model(folder: Path) -> Target | None:
    """Return the model whose files are in a folder; of a version folder, that version of the folder above."""
    models = _model_files(folder)
    if len({model.stem for model in models}) > 1 and _SAVED_MODEL not in {model.name for model in models}:
        found = ", ".join(model.name for model in models[:5])
        hint = f"choose one: ovms serve {models[0]}"
        expected = "one model, or a folder for each"
        raise _refusal("several models in one folder", folder, expected=expected, found=found, suggestion=hint)
    if not models:
        return None
    check_regular_files(folder)
    find_model_file(folder)
    if folder.name.isdecimal() and int(folder.name):
        policy = json.dumps({"specific": {"versions": [int(folder.name)]}})
        return _model(servable_name(folder.parent.name), folder.parent, model_version_policy=policy)
    return _model(servable_name(folder.name), folder)


def _model_files(folder: Path) -> list[Path]:
    """Return the model files of a folder by name, complete or not."""
    return [file for file in _files(folder) if file.suffix.lower() in dict(MODEL_SUFFIXES)]


def _files(folder: Path) -> list[Path]:
    return [each for each in _visible(folder) if os.path.isfile(each)]  # noqa: PTH113 - never raises


def _subfolders(folder: Path) -> list[Path]:
    return [each for each in _visible(folder) if os.path.isdir(each)]  # noqa: PTH112 - never raises


def _visible(folder: Path) -> list[Path]:
    return [folder / name for name in sorted(_names_in(folder)) if not name.startswith(".")]


def _names_in(folder: Path) -> list[str]:
    try:
        return [each.name for each in folder.iterdir()]
    except OSError:
        return []


def _versions(folder: Path) -> list[Path]:
    """Return the version folders that hold a model, ascending; names such as ``1abc`` only without other folders."""
    folders = _subfolders(folder)
    numbers = [each for each in folders if each.name.isdecimal()]
    if not numbers and all(re.match(r"\d", each.name) for each in folders):
        numbers = folders
    held = [each for each in numbers if _model_files(each) or _text_in(each)]
    return sorted(held, key=lambda each: int(re.match(r"\d+", each.name)[0]))  # type: ignore[index]


def _text_in(folder: Path) -> Path | None:
    return _find_text_model(folder, _names_in(folder))


def _find_text_model(folder: Path, names: list[str]) -> Path | None:
    """Return the path of the text model of a folder: the folder, or its .gguf file; of several parts, the first."""
    if detect_task(folder) is not None:
        return folder
    files = sorted(name for name in names if name.lower().endswith(".gguf"))
    models = [name for name in files if not re.search(r"-(?!00001)\d{5}-of-\d{5}\.", name)]
    if len(models) > 1:
        hint = f"choose one: ovms serve {folder / models[0]}"
        found = ", ".join(models[:5])
        raise _refusal("several models in one folder", folder, expected="one .gguf", found=found, suggestion=hint)
    return folder / models[0] if models else None


def _members(folder: Path) -> Iterator[tuple[str, Target | ConfigError]]:
    """Yield the folders below one that can be served, by name (``organization/model``), or why one cannot.

    Raises:
        ConfigError: there are too many folders, as in a home folder.
    """
    yield from _below(folder, 1, iter(range(_MAX_FOLDERS)))


def _below(folder: Path, depth: int, left: Iterator[int]) -> Iterator[tuple[str, Target | ConfigError]]:
    for each in _subfolders(folder):
        if next(left, None) is None:
            hint = f"serve one of its folders, such as ovms serve {each}"
            expected = f"at most {_MAX_FOLDERS} folders"
            message = "too many folders for a repository of models"
            raise _refusal(message, folder, expected=expected, found="more", suggestion=hint)
        try:
            target = _itself(each)
        except ConfigError as error:
            yield each.name, error
            continue
        except OSError:
            # Its entries cannot be examined, as those of other users' folders.
            continue
        if target is not None and target.kind is not TargetKind.CONFIG:
            yield each.name, target
        elif target is None and depth < _DEEPEST:
            yield from ((f"{each.name}/{name}", found) for name, found in _below(each, depth + 1, left))


def _entry(name: str, target: Target) -> tuple[str, dict[str, Any]]:
    """Return the list of the configuration that a target belongs to, and its entry."""
    mounted = {"name": name.replace("/", "_"), "path": str(target.path)}
    if target.kind is TargetKind.HANDLER:
        return KINDS["handler"].section, mounted
    if target.kind is TargetKind.OPS:
        return KINDS["op pipeline"].section, {**mounted, "service": str(target.script)}
    section = KINDS["text model" if target.kind is TargetKind.TEXT_MODEL else "model"].section
    own = {"name": name, "base_path": str(target.path)}
    if "model_version_policy" in target.options:
        own["model_version_policy"] = json.loads(target.options["model_version_policy"])
    return section, {"config": own}


def _nothing_in(folder: Path, errors: list[ConfigError]) -> ConfigError:
    """Return the error of a folder in which nothing can be served, with the nearest fix."""
    if len(errors) == 1:
        return errors[0]
    for version in filter(str.isdecimal, names := sorted(_names_in(folder))):
        check_regular_files(folder / version)
    found = ", ".join(names[:5]) + (", ..." if len(names) > len(names[:5]) else "") or "nothing"
    suffixes = {Path(name).suffix.lower() for name in names}
    hint = next((hint for hint in map(_missing_partner, names) if hint), "")
    if any(name.endswith(".pdiparams") for name in names) and ".json" in suffixes:
        hint = "Paddle 3 writes a .pdmodel, which OpenVINO can read, with FLAGS_enable_pir_api=0"
    elif hint:
        pass
    elif version := next((name for name in names if name.isdecimal()), ""):
        hint = f"copy a model into {folder / version}"
    elif "__model__" in names:
        hint = _PREPARE.format(folder)
    elif known := suffixes & _HINTS.keys():
        first = next(name for name in names if Path(name).suffix.lower() == min(known))
        hint = _HINTS[min(known)].format(folder / first)
    elif not names:
        hint = "copy a model there"
    return _refusal("the folder has nothing to serve", folder, expected=SERVABLE, found=found, suggestion=hint)


def _refusal(message: str, path: Path, *, expected: str = "", found: str = "", suggestion: str = "") -> ConfigError:
    return ConfigError([Problem(message, file=str(path), expected=expected, found=found, suggestion=suggestion)])
