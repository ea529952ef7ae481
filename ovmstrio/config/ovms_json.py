"""OVMS's ``config.json``, read into specs with every problem of the file at once.

Two kinds of problem are told apart.  What breaks the form of the file (no JSON, an unknown key, a wrong type, a wrong
metric family) makes all of it unusable.  What is wrong with one model's settings stays with that model, which then
fails to load while the rest is served.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final

from pydantic import Field

from ovmstrio.config.documents import OPTIONAL, Schema, check_members, load_document
from ovmstrio.config.findings import Findings, by_line, did_you_mean
from ovmstrio.config.json_locations import JsonDocument, Located
from ovmstrio.config.model_options import LAYOUT_DEPENDENT, check_base_path, check_name, read_model_options
from ovmstrio.config.specs import MetricsSpec, ModelSpec, ServerSpec
from ovmstrio.errors import ConfigError, Problem
from ovmstrio.observability.families import FAMILIES

__all__ = ["Examined", "check_families", "examine_config", "parse_config"]

_NOT_SERVED: Final = "is not served by this version"
_GRAPH_FILE: Final = "graph.pbtxt"

Count = Annotated[int, Field(ge=0)]
Object = dict[str, Any]


class _File(Schema):
    model_config_list: list[Any]
    pipeline_config_list: list[Object] = OPTIONAL
    custom_node_library_config_list: list[Object] = OPTIONAL
    custom_loader_config_list: list[Object] = OPTIONAL
    mediapipe_config_list: list[Object] = OPTIONAL
    monitoring: Object = OPTIONAL


class _Entry(Schema):
    config: Object


class _Model(Schema):
    hints: ClassVar[Mapping[str, str]] = dict.fromkeys(LAYOUT_DEPENDENT, "it is an option of the command line only")

    name: str
    base_path: str = OPTIONAL
    batch_size: Count | str = OPTIONAL
    shape: str | dict[str, str] = OPTIONAL
    layout: str | dict[str, str] = OPTIONAL
    model_version_policy: Object = OPTIONAL
    nireq: Count = OPTIONAL
    target_device: str = OPTIONAL
    plugin_config: dict[str, str | bool | int | float] = OPTIONAL
    allow_cache: bool = OPTIONAL
    custom_loader_options: Object = OPTIONAL
    graph_path: str = OPTIONAL
    subconfig: str = OPTIONAL
    stateful: bool = OPTIONAL
    idle_sequence_cleanup: bool = OPTIONAL
    low_latency_transformation: bool = OPTIONAL
    max_sequence_number: Count = OPTIONAL


class _Monitoring(Schema):
    metrics: Object


class _Metrics(Schema):
    hints: ClassVar[Mapping[str, str]] = {"endpoint_path": "metrics are served on /metrics; remove it"}

    enable: bool
    metrics_list: list[str] = OPTIONAL


@dataclass(frozen=True, slots=True)
class Examined:
    """What was understood of a file: ``fatal`` problems make it unusable, whatever ``spec`` holds.

    ``places`` gives the settings of each model by its name.
    """

    spec: ServerSpec
    fatal: tuple[Problem, ...]
    places: Mapping[str, Located]


def parse_config(content: bytes, path: Path, *, cache_dir: Path | None = None) -> ServerSpec:
    """Read the content of a file.

    Who watches a file that others write reads it again after a pause when this fails, because it may be half written.

    Args:
        content: what the file holds.
        path: where it lies, for messages and for the paths in it, which lead on from its directory.
        cache_dir: where models keep what was compiled; the file cannot say.

    Returns:
        What to serve.  A model whose settings cannot be used is there with its problems, and must not be loaded;
        the specification's own problems are of no model, or warnings.

    Raises:
        ConfigError: the file as a whole cannot be used; lists every problem that it has.
    """
    examined = examine_config(content, path, cache_dir=cache_dir)
    if examined.fatal:
        own = [problem for model in examined.spec.models for problem in model.problems]
        raise ConfigError(by_line([*examined.fatal, *examined.spec.problems, *own]))
    return examined.spec


def examine_config(content: bytes, path: Path, *, cache_dir: Path | None = None) -> Examined:
    """Read the content of a file as far as it can be understood; see :func:`parse_config`.

    Raises:
        ConfigError: it is not JSON.
    """
    document = load_document(content, str(path))
    return _Reader(document, path, cache_dir).read()


def check_families(names: Sequence[str]) -> list[tuple[int, str, str]]:
    """Check a list of metric families; gives the position, the message and the suggestion of each wrong one."""
    wrong = []
    for index, name in enumerate(names):
        if name not in FAMILIES:
            suggestion = did_you_mean(name, FAMILIES, otherwise=f"known are {', '.join(FAMILIES)}")
            wrong.append((index, f"unknown metric family {name!r}", suggestion))
        elif name in names[:index]:
            wrong.append((index, f"the metric family {name!r} is given twice", "remove one of them"))
    return wrong


class _Reader:
    """Reads one document from the top down."""

    def __init__(self, document: JsonDocument, path: Path, cache_dir: Path | None) -> None:
        self._root = document.root
        # Paths in the file must not come to hold the `..` that led to the file.
        self._directory = path.parent.resolve()
        self._cache_dir = cache_dir
        self._findings = Findings(str(path))
        self._findings.refuse_repeated(document)
        self._named: dict[str, Located] = {}

    def read(self) -> Examined:
        top = check_members(self._root, _File, self._findings)
        entries = _items(top, "model_config_list")
        models = [model for model in map(self._entry, entries) if model is not None]
        metrics = self._monitoring(top["monitoring"]) if "monitoring" in top else None
        for section, name_of in _SECTIONS.items():
            for item in _items(top, section):
                self._findings.warn(item, f"{name_of(item)} {_NOT_SERVED}", "it is left out")
        spec = ServerSpec(models=tuple(models), metrics=metrics, problems=by_line(self._findings.problems))
        return Examined(spec, by_line(self._findings.fatal), self._named)

    def _entry(self, node: Located) -> ModelSpec | None:
        members = check_members(node, _Entry, self._findings)
        return self._model(members["config"]) if "config" in members else None

    def _model(self, config: Located) -> ModelSpec | None:
        good = check_members(config, _Model, self._findings)
        given = {key: node.plain() for key, node in good.items()}
        if self._is_graph(given):
            name = given.get("name", "")
            self._findings.warn(config, f"graph {name!r} {_NOT_SERVED}", "it is left out")
            return None
        fields, problems = read_model_options(given)
        problems += self._own_rules(config, given)
        placed = [self._findings.place(config, problem) for problem in problems]
        errors = [problem for problem in placed if problem.severity == "error"]
        self._findings.problems += [problem for problem in placed if problem.severity != "error"]
        if "name" not in given or not self._is_first(good["name"].value, config):
            self._findings.problems += errors
            return None
        return ModelSpec(
            name=given["name"],
            base_path=self._directory / given.get("base_path", ""),
            cache_dir=self._cache_dir,
            origin=f"{self._findings.file}:{config.line}",
            problems=tuple(errors),
            **fields,
        )

    def _own_rules(self, config: Located, given: Object) -> list[Problem]:
        """Check what the command line cannot get wrong, or not in this way."""
        problems = check_name(given["name"]) if "name" in given else []
        if "base_path" in given:
            problems += check_base_path(given["base_path"])
        elif not get_close_matches("base_path", config.value.keys() - given.keys()):  # told already, as wrong
            problems.append(Problem("the key 'base_path' is missing", suggestion="add it"))
        if "custom_loader_options" in given:
            problems.append(Problem(f"a custom loader {_NOT_SERVED}", path="custom_loader_options"))
        return problems

    def _is_first(self, name: str, config: Located) -> bool:
        first = self._named.setdefault(name, config)
        if first is not config:
            message = f"the name {name!r} is taken, so this model is not served"
            problem = Problem(
                message, path="name", expected="a name of its own", suggestion=f"line {first.line} has it"
            )
            self._findings.problems.append(self._findings.place(config, problem))
        return first is config

    def _is_graph(self, given: Object) -> bool:
        if "graph_path" in given or "subconfig" in given:
            return True
        if "base_path" not in given or "\0" in given["base_path"]:
            return False
        base = self._directory / given["base_path"]
        return any((folder / _GRAPH_FILE).is_file() for folder in (base, base / "1"))

    def _monitoring(self, node: Located) -> MetricsSpec | None:
        members = check_members(node, _Monitoring, self._findings)
        if "metrics" not in members:
            return None
        metrics = check_members(members["metrics"], _Metrics, self._findings)
        if "metrics_list" not in metrics:
            return MetricsSpec(enable=metrics["enable"].value) if "enable" in metrics else None
        names = metrics["metrics_list"].plain()
        for index, message, suggestion in check_families(names):
            self._findings.refuse(metrics["metrics_list"].find(index), message, suggestion=suggestion)
        return MetricsSpec(enable=metrics["enable"].value, families=tuple(names)) if "enable" in metrics else None


def _items(members: Mapping[str, Located], key: str) -> list[Located]:
    return members[key].value if key in members else []


def _name_in(kind: str, *keys: str) -> Callable[[Located], str]:
    def name_of(item: Located) -> str:
        return f"{kind} {item.find(*keys).plain()!r}" if isinstance(item.find(*keys).value, str) else kind

    return name_of


_SECTIONS: Final[Mapping[str, Callable[[Located], str]]] = {
    "pipeline_config_list": _name_in("pipeline", "name"),
    "mediapipe_config_list": _name_in("graph", "name"),
    "custom_node_library_config_list": _name_in("custom node library", "name"),
    "custom_loader_config_list": _name_in("custom loader", "config", "loader_name"),
}
"""Parts of the file that OVMS serves, with what to call one of their entries."""
