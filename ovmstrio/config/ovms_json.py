"""OVMS's ``config.json``, read into specs with every problem of the file at once.

Two kinds of problem are told apart.  What breaks the form of the file (no JSON, an unknown key, a wrong type, a wrong
metric family) makes all of it unusable.  What is wrong with the settings of one model, pipeline, graph or handler
stays with it; it then fails to load while the rest is served.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Final, TypeVar

from ovmstrio.config.documents import OPTIONAL, Schema, check_members, items_of, load_document
from ovmstrio.config.findings import Findings, by_line, did_you_mean
from ovmstrio.config.graph_entries import GraphEntry, check_graph_settings, find_graph
from ovmstrio.config.handler_entries import HandlerEntries
from ovmstrio.config.located import Document, Located
from ovmstrio.config.model_entries import ModelEntries, Place
from ovmstrio.config.node_libraries import NodeLibraries
from ovmstrio.config.pipeline_circles import refuse_circles
from ovmstrio.config.pipeline_entries import PipelineEntries
from ovmstrio.config.specs import GraphSpec, HandlerSpec, MetricsSpec, PipelineSpec, ServableSpec, ServerSpec
from ovmstrio.config.subconfigs import Subconfigs
from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.core.metric_families import FAMILIES

__all__ = ["Examined", "check_families", "examine_config", "parse_config"]

_NOT_SERVED: Final = "is not served by this version"
_OCCUPIED: Final = {
    PipelineSpec.kind: "Pipeline has the same name as model",
    GraphSpec.kind: "Given mediapipe graph name is already occupied",
    HandlerSpec.kind: "Handler has a name that is taken",
}
"""What OVMS says of a name that something else has taken; handlers are unknown to it."""

_Single = TypeVar("_Single", bound=ServableSpec)

Object = dict[str, Any]


class _File(Schema):
    model_config_list: list[Any]
    pipeline_config_list: list[Object] = OPTIONAL
    custom_node_library_config_list: list[Object] = OPTIONAL
    custom_loader_config_list: list[Object] = OPTIONAL
    mediapipe_config_list: list[Object] = OPTIONAL
    handler_config_list: list[Object] = OPTIONAL
    monitoring: Object = OPTIONAL


class _Monitoring(Schema):
    metrics: Object


class _Metrics(Schema):
    hints: ClassVar[Mapping[str, str]] = {"endpoint_path": "metrics are served on /metrics; remove it"}

    enable: bool
    metrics_list: list[str] = OPTIONAL


@dataclass(frozen=True, slots=True)
class Examined:
    """What was understood of a file: ``fatal`` problems make it unusable, whatever ``spec`` holds.

    ``places`` tells where each model, pipeline, graph and handler is configured, by its name.
    """

    spec: ServerSpec
    fatal: tuple[Problem, ...]
    places: Mapping[str, Place]


def parse_config(content: bytes, path: Path, *, cache_dir: Path | None = None) -> ServerSpec:
    """Read the content of a file.

    Who watches a file that others write reads it again after a pause when this fails, because it may be half written.

    Args:
        content: what the file holds.
        path: where it lies, for messages and for the paths in it, which lead on from its directory.
        cache_dir: where models keep what was compiled; the file cannot say.

    Returns:
        What to serve.  Anything whose settings cannot be used is there with its problems, and must not be
        loaded; the specification's own problems are of neither, or warnings.

    Raises:
        ConfigError: the file as a whole cannot be used; lists every problem that it has.
    """
    examined = examine_config(content, path, cache_dir=cache_dir)
    if examined.fatal:
        spec = examined.spec
        own = [problem for servable in (*spec.servables, *spec.handlers) for problem in servable.problems]
        raise ConfigError(by_line([*examined.fatal, *spec.problems, *own]))
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

    def __init__(self, document: Document, path: Path, cache_dir: Path | None) -> None:
        self._root = document.root
        # Paths in the file must not come to hold the `..` that led to the file.
        self._directory = path.parent.resolve()
        self._findings = Findings(str(path))
        self._findings.refuse_repeated(document)
        self._models = ModelEntries(self._findings, self._directory, cache_dir, {})
        self._subconfigs = Subconfigs(cache_dir, self._models.known)
        self._libraries = NodeLibraries(self._findings, self._directory)
        self._pipelines = PipelineEntries(self._findings, self._directory, self._libraries)
        self._handlers = HandlerEntries(self._findings, self._directory)
        self._graph_places: dict[str, Place] = {}

    def read(self) -> Examined:
        top = check_members(self._root, _File, self._findings)
        self._models.read(items_of(top, "model_config_list"))
        graphs = self._graphs(items_of(top, "mediapipe_config_list"))
        self._libraries.read(items_of(top, "custom_node_library_config_list"))
        pipelines = self._pipelines.read(items_of(top, "pipeline_config_list"))
        handlers = self._handlers.read(items_of(top, "handler_config_list"))
        metrics = self._monitoring(top["monitoring"]) if "monitoring" in top else None
        for item in items_of(top, "custom_loader_config_list"):
            self._findings.warn(item, f"{_loader_name(item)} {_NOT_SERVED}", "it is left out")
        known = self._models.known
        taken: dict[str, ServableSpec] = {name: model.spec for name, model in known.items()}
        pipelines = refuse_circles(self._free(pipelines, taken, self._pipelines.places))
        taken |= {pipeline.name: pipeline for pipeline in pipelines}
        graphs = self._free(graphs, taken, self._graph_places)
        taken |= {graph.name: graph for graph in graphs}
        handlers = self._free(handlers, taken, self._handlers.places)
        spec = ServerSpec(
            models=tuple(model.spec for model in known.values()),
            pipelines=tuple(pipelines),
            graphs=tuple(graphs),
            handlers=tuple(handlers),
            metrics=metrics,
            problems=(*by_line(self._findings.problems), *self._subconfigs.problems),
            further_files=self._subconfigs.contents,
        )
        places = {name: model.place for name, model in known.items()}
        places |= self._pipelines.places | self._graph_places | self._handlers.places
        return Examined(spec, by_line(self._findings.fatal), places)

    def _graphs(self, items: Sequence[Located]) -> list[GraphSpec]:
        """Read every graph, and the models that belong to it, which take their names first."""
        checked = [replace(item, value=check_members(item, GraphEntry, self._findings)) for item in items]
        return [self._graph(node) for node in self._first_of_each_name([*self._models.graphs, *checked])]

    def _first_of_each_name(self, nodes: Iterable[Located]) -> list[Located]:
        for node in nodes:
            if "name" not in node.value:  # told already, as wrong
                continue
            name = node.value["name"].value
            first = self._graph_places.setdefault(name, Place(self._findings.file, node)).settings
            if first is not node:
                message = f"there is a graph {name!r} already, so this one is left out"
                self._findings.warn(node.find("name"), message, f"line {first.line} has it")
        return [place.settings for place in self._graph_places.values()]

    def _graph(self, node: Located) -> GraphSpec:
        given = {key: member.plain() for key, member in node.value.items()}
        files = find_graph(given, self._directory)
        placed = [self._findings.place(node, problem) for problem in check_graph_settings(given)]
        errors = [problem for problem in placed if problem.severity == "error"]
        self._findings.problems += [problem for problem in placed if problem.severity != "error"]
        if not errors:
            errors += self._subconfigs.read(files.subconfig)
        return GraphSpec(
            name=given["name"],
            origin=f"{self._findings.file}:{node.line}",
            problems=tuple(errors),
            **files._asdict(),
        )

    def _free(
        self, specs: Iterable[_Single], taken: Mapping[str, ServableSpec], places: dict[str, Place]
    ) -> list[_Single]:
        """Leave out whatever has the name of something that is served already."""
        free = []
        for spec in specs:
            if spec.name in taken:
                self._refuse_occupied(spec, taken[spec.name], places.pop(spec.name))
            else:
                free.append(spec)
        return free

    def _refuse_occupied(self, spec: ServableSpec, other: ServableSpec, place: Place) -> None:
        problem = Problem(
            f"{_OCCUPIED[spec.kind]}: {spec.name!r} is a {other.kind}'s, which is served",
            path="name",
            expected="a name of its own",
            suggestion=f"{other.origin} has it",
        )
        self._findings.problems.append(self._findings.place(place.settings, problem))

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


def _loader_name(item: Located) -> str:
    name = item.find("config", "loader_name").value
    return f"custom loader {name!r}" if isinstance(name, str) else "custom loader"
