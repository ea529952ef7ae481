"""Parser of ``model_config_list``, ``mediapipe_config_list`` and the model settings of repository load requests.

Paths of a graph::

    <directory of the file>/<base_path, else name>/<graph_path, else graph.pbtxt>
                                                  /<subconfig, else subconfig.json>
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, ClassVar, Final, NamedTuple

from pydantic import create_model

from ovmstrio.config.documents import Findings, Located, Place, did_you_mean, invalid_value_error, to_short_json
from ovmstrio.config.model_options import MODEL_OPTIONS, parse_model_options
from ovmstrio.config.schema import OPTIONAL, Schema, check_members
from ovmstrio.config.service_options import PythonEntry, ServiceEntry, check_base_path, check_name, check_path
from ovmstrio.config.shapes import parse_json_object
from ovmstrio.config.specs import ModelSpec
from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.util.regular_files import is_file

_NOT_SERVED: Final = "is not supported"

Object = dict[str, Any]


class _Entry(Schema):
    config: Object


_KEYS: Final[dict[str, Any]] = {
    "name": (str, ...),
    "base_path": (str, OPTIONAL),
    **{option: (each.form, OPTIONAL) for option, each in MODEL_OPTIONS.items()},
    "graph_path": (str, OPTIONAL),
    "subconfig": (str, OPTIONAL),
    "custom_loader_options": (Object, OPTIONAL),
}
ModelEntry = create_model("ModelEntry", __base__=ServiceEntry, **_KEYS)
"""Keys of ``config`` in an entry of ``model_config_list``."""


@dataclass(slots=True)
class ModelEntries:
    """Parser of the model entries of one file.

    Attributes:
        known: models of all files by name; parsed models are added.
        graphs: entries that are graphs.
        remotes: unparsed entries of remote models.
    """

    section: ClassVar[str] = "model_config_list"

    findings: Findings
    directory: Path
    cache_dir: Path | None
    known: dict[str, ModelSpec]
    graphs: list[Located] = field(default_factory=list)
    remotes: list[Located] = field(default_factory=list)

    def read(self, entries: Iterable[Located]) -> None:
        """Parse the entries in order; the first of a name is used."""
        for entry in entries:
            members = check_members(entry, _Entry, self.findings)
            if "config" in members:
                self._read_config(members["config"])

    def _read_config(self, config: Located) -> None:
        if "remote" in config.members:
            self.remotes.append(config)
            return
        good = check_members(config, ModelEntry, self.findings)
        given = {key: node.plain() for key, node in good.items()}
        if is_graph(given, self.directory):
            self.graphs.append(replace(config, value=good))
            return
        fields, problems = parse_model_options(given)
        problems += self._entry_problems(config, given)
        placed = [self.findings.place(config, problem) for problem in problems]
        errors = [problem for problem in placed if problem.severity == "error"]
        self.findings.problems += [problem for problem in placed if problem.severity != "error"]
        is_base_path_reported = "base_path" not in given and _is_reported("base_path", config, given)
        if "name" not in given or is_base_path_reported:
            self.findings.problems += errors
            return
        spec = ModelSpec(
            name=given["name"],
            base_path=self.directory / given.get("base_path", ""),
            cache_dir=self.cache_dir,
            origin=f"{self.findings.file}:{config.line}",
            problems=tuple(errors),
            place=Place(self.findings.file, config),
            **fields,
        )
        self._add(spec, config)

    def _entry_problems(self, config: Located, given: Mapping[str, Any]) -> list[Problem]:
        """Return problems that cannot occur on the command line."""
        problems = check_name(given["name"]) if "name" in given else []
        if "base_path" in given:
            problems += check_base_path(given["base_path"])
        elif not _is_reported("base_path", config, given):
            problems.append(Problem("the key 'base_path' is missing", suggestion="add it"))
        if "custom_loader_options" in given:
            problems.append(Problem(f"a custom loader {_NOT_SERVED}", path="custom_loader_options"))
        return problems

    def _add(self, spec: ModelSpec, config: Located) -> None:
        first = self.known.setdefault(spec.name, spec)
        if first is spec:
            return
        self.findings.problems += spec.problems
        other_file = first.place is None or first.place.file != self.findings.file
        # Graphs may share a model, configured in several subconfigs.
        if other_file and not first.needs_reload(spec):
            return
        where = first.origin if other_file else f"line {first.origin.rpartition(':')[2]}"
        problem = Problem(
            f"duplicate name {spec.name!r}, the model is ignored",
            path="name",
            expected="a unique name",
            suggestion=f"first defined in {where}",
            severity="warning" if other_file else "error",
        )
        self.findings.problems.append(self.findings.place(config, problem))


def _is_reported(key: str, config: Located, given: Mapping[str, Any]) -> bool:
    """Return whether a missing key was already reported as misspelt."""
    return bool(get_close_matches(key, config.value.keys() - given.keys()))


# Graphs

GRAPH_SUFFIX: Final = ".pbtxt"
_GRAPH_FILE: Final = f"graph{GRAPH_SUFFIX}"
_SUBCONFIG: Final = "subconfig.json"
_ONLY_VERSION: Final = "1"


class GraphEntry(PythonEntry, ServiceEntry):
    """Keys of an entry of ``mediapipe_config_list``."""

    name: str
    base_path: str = OPTIONAL
    graph_path: str = OPTIONAL
    subconfig: str = OPTIONAL


class GraphFiles(NamedTuple):
    """Paths of one graph; ``subconfig`` may be missing."""

    base_path: Path
    graph_path: Path
    subconfig: Path


def find_graph(given: Mapping[str, Any], directory: Path) -> GraphFiles:
    """Return the paths of a graph with defaults applied; a graph may also be in a version directory."""
    base_path = directory / (given.get("base_path") or given.get("name", ""))
    graph_path = given.get("graph_path") or _GRAPH_FILE
    versioned = base_path / _ONLY_VERSION
    if is_file(versioned / graph_path) and not is_file(base_path / graph_path):
        base_path = versioned
    return GraphFiles(base_path, base_path / graph_path, base_path / (given.get("subconfig") or _SUBCONFIG))


def is_graph(given: Mapping[str, Any], directory: Path) -> bool:
    """Return whether a model entry is a graph."""
    if "graph_path" in given or "subconfig" in given:
        return True
    return ("base_path" in given or "name" in given) and is_file(find_graph(given, directory).graph_path)


def check_graph_settings(given: Mapping[str, Any]) -> list[Problem]:
    """Return problems of a graph's name, paths and unknown options; paths are the keys."""
    problems = check_name(given["name"]) if "name" in given else []
    folder = "base_path" if given.get("base_path") else "name"
    for key in (folder, "graph_path", "subconfig"):
        if given.get(key):
            problems += check_path(key, given[key])
    problems += [
        Problem(
            f"{key!r} is an option of models and has no effect on graphs",
            path=key,
            found=to_short_json(given[key]),
            suggestion="remove it, or set it for the graph's model",
            severity="warning",
        )
        for key in given
        if key not in GraphEntry.model_fields
    ]
    return problems


# Path properties

_NAME: Final = re.compile(r"[A-Za-z0-9_.]+")
_IGNORED: Final = re.compile(r"[\s\"']+")
_WORDS: Final = frozenset({"DIR", "DIRS", "DIRECTORY", "FILE", "FILES", "FOLDER", "LIBRARY", "URI", "URL", "LOCATION"})
_ENDINGS: Final = ("DIR", "PATH", "PATHS", "FILENAME", "FOLDER")
_PARTS: Final = ("DUMP", "BLOB")
_PATH_PROPERTIES: Final = ("NPUW_PLAN", "COMPILATION_MODE_PARAMS", "COMPILATION_PARAMS")
"""``NPUW_PLAN`` names a file; the others hold compiler options, which may name files."""


def path_property_problems(properties: Mapping[str, str]) -> list[Problem]:
    """Return problems of properties that name files or directories, nested values included (``DEVICE_PROPERTIES``).

    Clients must not set them: only the server's configuration may.
    """
    problems = []
    for key, value in properties.items():
        text = _IGNORED.sub("", f"{key}:{value}")
        named = next((name for name in _names(text) if _names_path(name)), "")
        if named or re.search(r"[/\\]", text):
            name = named or _IGNORED.sub("", key)
            problems.append(
                Problem(
                    f"the property {name} names a path" if named else f"the value of the property {name} has a path",
                    path=f"config.plugin_config.{key}",
                    suggestion="only the server's own configuration may set it",
                )
            )
    return problems


def _names(text: str) -> Iterator[str]:
    return (match[0].upper() for match in _NAME.finditer(text))


def _names_path(name: str) -> bool:
    if name.endswith(_PATH_PROPERTIES):
        return True
    words = re.split(r"[_.]", name)
    return any(word in _WORDS or word.endswith(_ENDINGS) or any(part in word for part in _PARTS) for word in words)


# Load-request settings

_IGNORED_KEYS: Final = frozenset(
    {
        *("name", "platform", "backend", "runtime", "input", "output", "default_model_filename", "parameters"),
        *("sequence_batching", "dynamic_batching", "model_transaction_policy", "instance_group", "optimization"),
        *("model_warmup", "response_cache", "batch_input", "batch_output", "metric_tags", "cc_model_filenames"),
    }
)
_POLICY: Final = "version_policy"
_MAX_BATCH_SIZE: Final = "max_batch_size"
_MAX_ROWS: Final = 65_536
_MAX_UNKNOWN_KEYS: Final = 8
"""Limit, as each suggestion takes a millisecond."""


def parse_overrides(text: str) -> tuple[dict[str, Any], list[str]]:
    """Parse settings of a load request in the notation of ``config.json`` or Triton's ``ModelConfig``.

    Returns:
        Fields of ``ModelSpec``, and ignored keys.

    Raises:
        ConfigError: malformed, with all problems.
    """
    given = parse_json_object("config", text)
    unknown_keys = [key for key in given if key not in {*_IGNORED_KEYS, *MODEL_OPTIONS, _POLICY, _MAX_BATCH_SIZE}]
    problems = [
        Problem(f"unknown key {key!r}", path=f"config.{key}", suggestion=did_you_mean(key, MODEL_OPTIONS))
        for key in unknown_keys[:_MAX_UNKNOWN_KEYS]
    ]
    options = {key: value for key, value in given.items() if key in MODEL_OPTIONS}
    try:
        options |= _triton_options(given)
    except ConfigError as error:
        problems += error.problems
    fields, wrong_values = parse_model_options(options)
    problems += wrong_values
    problems += path_property_problems(fields.get("plugin_config", {}))
    if problems:
        # Warnings too: the client waits for the response.
        raise ConfigError(problems)
    return fields, sorted(_IGNORED_KEYS & given.keys())


def _triton_options(given: Mapping[str, Any]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if _POLICY in given:
        options["model_version_policy"] = given[_POLICY]
    if _MAX_BATCH_SIZE in given and (rows := _parse_rows(given[_MAX_BATCH_SIZE])):
        options["batch_size"] = f"1:{rows}"
    return options


def _parse_rows(value: Any) -> int:
    """Parse a number that protobuf's JSON may encode as a string."""
    text = str(value)
    if isinstance(value, bool) or not (text.isascii() and text.isdigit()) or int(text[:9]) > _MAX_ROWS:
        raise invalid_value_error(f"config.{_MAX_BATCH_SIZE}", value, f"an integer of 0 to {_MAX_ROWS}")
    return int(text)
