"""How graphs are configured, in a ``mediapipe_config_list`` or among the models: keys, defaults and relative paths.

::

    <directory of the file>/<base_path, else name>/<graph_path, else graph.pbtxt>
                                                  /<subconfig, else subconfig.json>
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from ovmstrio.config.documents import OPTIONAL, shown
from ovmstrio.config.model_options import check_local_path, check_name
from ovmstrio.config.service_options import PythonEntry, ServiceEntry
from ovmstrio.core.errors import Problem

__all__ = ["GRAPH_SUFFIX", "GraphEntry", "GraphFiles", "check_graph_settings", "find_graph", "is_graph"]

GRAPH_SUFFIX: Final = ".pbtxt"
_GRAPH_FILE: Final = f"graph{GRAPH_SUFFIX}"
_SUBCONFIG: Final = "subconfig.json"
_ONLY_VERSION: Final = "1"


class GraphEntry(PythonEntry, ServiceEntry):
    """What an entry of a ``mediapipe_config_list`` may hold."""

    name: str
    base_path: str = OPTIONAL
    graph_path: str = OPTIONAL
    subconfig: str = OPTIONAL


class GraphFiles(NamedTuple):
    """Where the parts of one graph lie; ``subconfig`` need not exist."""

    base_path: Path
    graph_path: Path
    subconfig: Path


def find_graph(given: Mapping[str, Any], directory: Path) -> GraphFiles:
    """Apply the defaults to a graph's settings; ``directory`` is where relative paths lead on from.

    A graph may also lie in a version directory, as models do.
    """
    base_path = directory / (given.get("base_path") or given.get("name", ""))
    graph_path = given.get("graph_path") or _GRAPH_FILE
    versioned = base_path / _ONLY_VERSION
    if (versioned / graph_path).is_file() and not (base_path / graph_path).is_file():
        base_path = versioned
    return GraphFiles(base_path, base_path / graph_path, base_path / (given.get("subconfig") or _SUBCONFIG))


def is_graph(given: Mapping[str, Any], directory: Path) -> bool:
    """Tell whether the settings of an entry among the models are those of a graph."""
    if "graph_path" in given or "subconfig" in given:
        return True
    return ("base_path" in given or "name" in given) and find_graph(given, directory).graph_path.is_file()


def check_graph_settings(given: Mapping[str, Any]) -> list[Problem]:
    """Check a graph's name, the spelling of its paths, and for options that are not for it; paths are the keys."""
    problems = check_name(given["name"]) if "name" in given else []
    folder = "base_path" if given.get("base_path") else "name"
    for key in (folder, "graph_path", "subconfig"):
        if given.get(key):
            problems += [replace(problem, path=key) for problem in check_local_path(given[key])]
    problems += [
        Problem(
            f"{key!r} is an option of models, and this is a graph; it has no effect",
            path=key,
            found=shown(given[key]),
            suggestion="remove it, or set it for the model that the graph calls",
            severity="warning",
        )
        for key in given
        if key not in GraphEntry.model_fields
    ]
    return problems
