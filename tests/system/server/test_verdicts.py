"""What ``check`` says of a configuration is what a server comes to: random ones, broken in one random place."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from ovmstrio.config.ovms_json import parse_config
from ovmstrio.registry import Registry
from ovmstrio.runtimes.table import KINDS
from ovmstrio.server.checking import LoadedVersion, check_config
from tests.support import ir
from tests.support.examples import examples
from tests.support.graphs import graph_text, python_node, session_text
from tests.support.projects import PYTHON, write
from tests.support.stub_registry import running

_NODE = """
from pyovms import Tensor
class OvmsPythonModel:
    def execute(self, inputs):
        return inputs
"""
_HANDLER = "class Handler:\n    def handle_post(self, payload): return payload\n"

Document = dict[str, Any]


def _pipeline(name: str, called: str, item: str, given: str) -> Document:
    return {
        "name": name,
        "inputs": ["in"],
        "nodes": [
            {
                "name": "n",
                "type": "DL model",
                "model_name": called,
                "inputs": [{item: {"node_name": "request", "data_item": "in"}}],
                "outputs": [{"data_item": given, "alias": "y"}],
            }
        ],
        "outputs": [{"y": {"node_name": "n", "data_item": "y"}}],
    }


def _site(root: Path) -> Document:
    """Write everything that is configured, all of which works."""
    ir.save(ir.dummy(), root, "m", 1)
    ir.save(ir.dummy(), root, "m", 2)
    for name in ("g", "caller"):
        folder = root / name
        folder.mkdir()
        (folder / "node.py").write_text(_NODE)
    (root / "g/graph.pbtxt").write_text(graph_text(python_node("node.py")))
    (root / "caller/graph.pbtxt").write_text(graph_text(python_node("node.py")) + session_text("p"))
    (write(root / "h", PYTHON) / "handler.py").write_text(_HANDLER)
    return {
        "model_config_list": [{"config": {"name": "m", "base_path": "m", "model_version_policy": {"all": {}}}}],
        "mediapipe_config_list": [{"name": "g"}, {"name": "caller"}],
        "pipeline_config_list": [_pipeline("p", "m", "b", "a"), _pipeline("outer", "p", "in", "y"),
                                 _pipeline("ofg", "g", "in", "out")],
        "handler_config_list": [{"name": "h", "path": "h"}],
    }  # fmt: skip


def _set(*path: Any, value: Any) -> Callable[[Path, Document], None]:
    def break_document(root: Path, document: Document) -> None:
        del root
        inside: Any = document
        for step in path[:-1]:
            inside = inside[step]
        inside[path[-1]] = value

    return break_document


def _write(name: str, text: str) -> Callable[[Path, Document], None]:
    def write_file(root: Path, document: Document) -> None:
        del document
        (root / name).write_text(text)

    return write_file


def _remove(name: str) -> Callable[[Path, Document], None]:
    return lambda root, document: (root / name).unlink()


_MODEL = ("model_config_list", 0, "config")
_NODE_OF_P = ("pipeline_config_list", 0, "nodes", 0)
BREAKS: dict[str, Callable[[Path, Document], None]] = {
    "nothing": lambda root, document: None,
    "base path": _set(*_MODEL, "base_path", value="nowhere"),
    "shape": _set(*_MODEL, "shape", value="(7,7,7)"),
    "plugin config": _set(*_MODEL, "plugin_config", value={"NUM_STREAM": "1"}),
    "policy": _set(*_MODEL, "model_version_policy", value={"specific": {"versions": [1, 9]}}),
    "model": _write("m/2/model.xml", "<net"),
    "weights": _remove("m/1/model.bin"),
    "mapping": _write("m/1/mapping_config.json", "["),
    "graph file": _remove("g/graph.pbtxt"),
    "graph": _write("g/graph.pbtxt", "node {"),
    "calculator": _write("g/graph.pbtxt", 'node { calculator: "None" }'),
    "node": _write("g/node.py", "raise SystemError"),
    "session": _write("caller/graph.pbtxt", graph_text(python_node("node.py")) + session_text("nobody")),
    "circle": _write("g/graph.pbtxt", graph_text(python_node("node.py")) + session_text("ofg")),
    "called": _set(*_NODE_OF_P, "model_name", value="nobody"),
    "item": _set(*_NODE_OF_P, "inputs", 0, value={"c": {"node_name": "request", "data_item": "in"}}),
    "itself": _set(*_NODE_OF_P, "model_name", value="p"),
    "each other": _set(*_NODE_OF_P, "model_name", value="outer"),
    "taken name": _set("handler_config_list", 0, "name", value="m"),
    "own path": _set("handler_config_list", 0, "name", value="v2"),
    "project": _set("handler_config_list", 0, "path", value="nowhere"),
    "project file": _write("h/nucleus.yaml", "type: python\n"),
    "processes": _write("h/nucleus.yaml", f"{PYTHON}processes: 2\n"),
    "import": _write("h/handler.py", "import nothing_of_that_name"),
    "method": _write("h/handler.py", "class Handler:\n    def handle_post(self, payloat): ...\n"),
    "constructor": _write("h/handler.py", f"{_HANDLER}    def __init__(self): raise RuntimeError\n"),
}  # fmt: skip


async def _served(config: Path) -> tuple[set[LoadedVersion], set[str]]:
    """Load as a server does; gives the versions that can be called, and where errors point to."""
    spec = parse_config(KINDS.values(), await trio.Path(config).read_bytes(), config)
    async with running(Registry(KINDS, poll_seconds=0)) as registry:
        await registry.apply(spec.services)
        loaded = {
            LoadedVersion(name, version)
            for name in registry.statuses()
            for version in registry.available_versions(name)
        }
        problems = [*spec.problems, *registry.findings()]
        return loaded, {str(problem) for problem in problems if problem.severity == "error"}


@settings(max_examples=examples(15), deadline=None)
@given(broken=st.sampled_from(sorted(BREAKS)), left_out=st.sets(st.sampled_from(["mediapipe", "pipeline", "handler"])))
def test_check_and_serve_come_to_the_same_verdict(broken: str, left_out: set[str]) -> None:
    """What loads, and every error with its place."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        document = _site(root)
        BREAKS[broken](root, document)
        config = root / "config.json"
        kept = {key: value for key, value in document.items() if key.split("_")[0] not in left_out}
        config.write_text(json.dumps(kept, indent=1))
        loaded, errors = trio.run(_served, config)
        report = trio.run(check_config, config)
    assert set(report.loaded) == loaded
    assert errors <= {str(problem) for problem in report.errors}
    assert bool(errors) == bool(report.errors)
    if broken == "nothing" and not left_out:
        assert len(loaded) == 8
