"""Graph configuration in ``mediapipe_config_list`` or among models: keys, defaults and relative paths.

::

    <directory of the file>/<base_path, else name>/<graph_path, else graph.pbtxt>
                                                  /<subconfig, else subconfig.json>
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from ovmstrio.config.documents import to_short_json
from ovmstrio.config.model_options import check_local_path, check_name
from ovmstrio.config.schema import OPTIONAL
from ovmstrio.config.service_options import PythonEntry, ServiceEntry
from ovmstrio.core.errors import Problem

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
    if (versioned / graph_path).is_file() and not (base_path / graph_path).is_file():
        base_path = versioned
    return GraphFiles(base_path, base_path / graph_path, base_path / (given.get("subconfig") or _SUBCONFIG))


def is_graph(given: Mapping[str, Any], directory: Path) -> bool:
    """Return whether a model entry is a graph."""
    if "graph_path" in given or "subconfig" in given:
        return True
    return ("base_path" in given or "name" in given) and find_graph(given, directory).graph_path.is_file()


def check_graph_settings(given: Mapping[str, Any]) -> list[Problem]:
    """Return problems of a graph's name, paths and unknown options; paths are the keys."""
    problems = check_name(given["name"]) if "name" in given else []
    folder = "base_path" if given.get("base_path") else "name"
    for key in (folder, "graph_path", "subconfig"):
        if given.get(key):
            problems += [replace(problem, path=key) for problem in check_local_path(given[key])]
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
