"""The graphs of a configuration file: those of its own list, and those among the models."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from ovmstrio.config.config_file import ConfigFile
from ovmstrio.config.documents import check_members
from ovmstrio.config.graph_entries import GraphEntry, check_graph_settings, find_graph
from ovmstrio.config.located import Located
from ovmstrio.config.python_entries import check_python, read_python
from ovmstrio.config.specs import GraphSpec, PythonSpec

__all__ = ["GRAPHS", "read_graphs"]

GRAPHS: Final = "mediapipe_config_list"


def read_graphs(file: ConfigFile) -> list[GraphSpec]:
    """Read every graph, and the models that belong to it, which take their names first."""
    checked = [replace(item, value=check_members(item, GraphEntry, file.findings)) for item in file.items(GRAPHS)]
    return [_read_graph(node, file) for node in _first_of_each_name([*file.models.graphs, *checked], file)]


def _first_of_each_name(nodes: Iterable[Located], file: ConfigFile) -> list[Located]:
    named = [node for node in nodes if "name" in node.value]  # of others it is told already that they are wrong
    return [node for node in named if file.is_first(GraphSpec.kind, node, node.find("name"))]


def _read_graph(node: Located, file: ConfigFile) -> GraphSpec:
    given = {key: member.plain() for key, member in node.value.items()}
    files = find_graph(given, file.directory)
    place = file.place(node)
    checked = [*check_graph_settings(given), *check_python(given, file.directory)]
    placed = [place.of(problem) for problem in checked]
    errors = [problem for problem in placed if problem.severity == "error"]
    file.findings.problems += [problem for problem in placed if problem.severity != "error"]
    if not errors:
        errors += file.subconfigs.read(files.subconfig)
    return GraphSpec(
        name=given["name"],
        origin=file.origin(node),
        problems=tuple(errors),
        place=place,
        python=PythonSpec() if errors else read_python(given, file.directory),
        **files._asdict(),
    )
