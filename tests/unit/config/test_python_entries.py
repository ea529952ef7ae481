"""How entries say where the Python code of their services runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from ovmstrio.config.ovms_json import parse_config
from ovmstrio.config.specs import GraphSpec, PythonSpec, ServerSpec
from ovmstrio.core.errors import ConfigError
from ovmstrio.runtimes.table import KINDS
from ovmstrio.work.isolation.isolated_code import Isolation


def parse(folder: Path, **settings: Any) -> ServerSpec:
    """Read a configuration of one graph."""
    document = {"model_config_list": [], "mediapipe_config_list": [{"name": "g", **settings}]}
    return parse_config(KINDS.values(), json.dumps(document, indent=1).encode(), folder / "config.json")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, PythonSpec()),
        ({"python_isolation": "none"}, PythonSpec(isolation="none")),
        ({"python_isolation": "process"}, PythonSpec(isolation="process")),
        ({"python_processes": 4}, PythonSpec(isolation="process", processes=4)),
        ({"python_timeout_seconds": 5}, PythonSpec(isolation="process", timeout_seconds=5)),
        ({"python_memory_limit": 0}, PythonSpec(isolation="process", memory_limit=0)),
        ({"python": sys.executable}, PythonSpec(isolation="process", python=Path(sys.executable))),
    ],
)
def test_an_entry_that_says_anything_of_processes_asks_for_them(
    tmp_path: Path, settings: dict[str, Any], expected: PythonSpec
) -> None:
    """Unless it says that there are none."""
    (graph,) = parse(tmp_path, **settings).of(GraphSpec)
    assert (graph.python, graph.problems) == (expected, ())


def test_an_interpreter_is_looked_for_beside_the_file(tmp_path: Path) -> None:
    """It stays the link that it is, by which an environment knows itself."""
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    (graph,) = parse(tmp_path, python="venv/bin/python").of(GraphSpec)
    assert graph.python.python == python


@pytest.mark.parametrize(
    ("settings", "path", "text"),
    [
        ({"python": "venv/bin/python"}, "python", "which does not exist"),
        ({"python": "config.json"}, "python", "which cannot be run"),
        ({"python_isolation": "none", "python_processes": 2}, "python_processes", "set python_isolation to process"),
    ],
)
def test_settings_that_cannot_be_are_problems_of_the_graph(
    tmp_path: Path, settings: dict[str, Any], path: str, text: str
) -> None:
    """With file and line."""
    (tmp_path / "config.json").touch()
    (graph,) = parse(tmp_path, **settings).of(GraphSpec)
    (problem,) = graph.problems
    assert problem.path == f"mediapipe_config_list[0].{path}"
    assert (problem.file, problem.line) == (f"{tmp_path}/config.json", 6 + list(settings).index(path))
    assert text in str(problem)


@pytest.mark.parametrize(
    "settings",
    [
        {"python_isolation": "thread"},
        {"python_processes": 0},
        {"python_timeout_seconds": -1},
        {"python_memory_limit": "1G"},
        {"python": 3},
    ],
)
def test_settings_of_a_wrong_form_are_refused(tmp_path: Path, settings: dict[str, Any]) -> None:
    """As those of everything else."""
    with pytest.raises(ConfigError) as raised:
        parse(tmp_path, **settings)
    (problem,) = raised.value.problems
    assert problem.path == f"mediapipe_config_list[0].{next(iter(settings))}"


def test_what_an_entry_does_not_say_the_server_does() -> None:
    """Isolation, and the limit of memory."""
    own = PythonSpec(isolation="process", memory_limit=5, processes=2, timeout_seconds=3)
    assert Isolation.of(PythonSpec(), is_default=False, memory_limit=9) is None
    assert Isolation.of(PythonSpec(isolation="none"), is_default=True, memory_limit=9) is None
    assert Isolation.of(PythonSpec(), is_default=True, memory_limit=9) == Isolation(memory_limit=9)
    assert Isolation.of(own, is_default=False, memory_limit=9) == Isolation(2, None, 3, 5)


def test_a_change_of_the_settings_is_a_reload() -> None:
    """Of the graph."""
    plain = GraphSpec(name="g", base_path=Path("g"), graph_path=Path("g/graph.pbtxt"))
    assert plain.needs_reload(plain.model_copy(update={"python": PythonSpec(isolation="process")}))
