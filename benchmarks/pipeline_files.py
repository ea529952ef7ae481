"""Pipelines for benchmarks, added to a repository of models, with custom nodes in C."""

from __future__ import annotations

import json
import subprocess
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from benchmarks.processes import need

__all__ = ["add_pipelines", "build", "chain", "side_by_side"]

_SOURCES: Final = Path(__file__).with_name("nodes")
_INCLUDE: Final = Path(str(files("ovmstrio.pipelines") / "include"))


def build(name: str, folder: Path) -> Path:
    """Compile a shared library of one of the sources."""
    output = folder / f"lib{name}.so"
    command = [need("gcc", "gcc"), "-O2", "-shared", "-fPIC", f"-I{_INCLUDE}", str(_SOURCES / f"{name}.c")]
    subprocess.run([*command, "-o", str(output)], check=True)
    return output


def _source(name: str, node: str, item: str) -> dict[str, Any]:
    return {name: {"node_name": node, "data_item": item}}


def chain(name: str, model: str, length: int) -> dict[str, Any]:
    """Configure a pipeline that calls the trivial model a number of times, each time with the previous output."""
    nodes, before = [], ("request", "b")
    for number in range(length):
        node = {
            "name": f"n{number}",
            "type": "DL model",
            "model_name": model,
            "inputs": [_source("b", *before)],
            "outputs": [{"data_item": "a", "alias": "a"}],
        }
        nodes.append(node)
        before = (f"n{number}", "a")
    return {"name": name, "inputs": ["b"], "nodes": nodes, "outputs": [_source("a", *before)]}


def side_by_side(name: str, library: str, width: int) -> dict[str, Any]:
    """Configure a pipeline of a number of custom nodes with the same input."""
    nodes = [
        {
            "name": f"n{number}",
            "type": "custom",
            "library_name": library,
            "inputs": [_source("x", "request", "x")],
            "outputs": [{"data_item": "y", "alias": "y"}],
        }
        for number in range(width)
    ]
    outputs = [_source(f"y{number}", f"n{number}", "y") for number in range(width)]
    return {"name": name, "inputs": ["x"], "nodes": nodes, "outputs": outputs}


def add_pipelines(config: Path, pipelines: list[dict[str, Any]], libraries: dict[str, Path]) -> Path:
    """Add pipelines and the libraries of their custom nodes to a config.json."""
    content = json.loads(config.read_text())
    content["pipeline_config_list"] = pipelines
    content["custom_node_library_config_list"] = [
        {"name": name, "base_path": str(path)} for name, path in libraries.items()
    ]
    config.write_text(json.dumps(content))
    return config
