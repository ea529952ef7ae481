"""Attacked server: a trivial model for the measuring client, and services that attacks aim at."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import openvino as ov
import openvino.opset13 as op

from tests.support import ir
from tests.support.graphs import graph_text, python_node
from tests.support.projects import write_project


class Ports(NamedTuple):
    grpc: int
    rest: int


INFER: Final = "/inference.GRPCInferenceService/ModelInfer"
TRIVIAL: Final = "trivial"
BIG: Final = "big"
"""A model whose answer has :data:`BIG_BYTES` for any request."""
BIG_BYTES: Final = 16 * 2**20
SLEEPER: Final = "sleeper"
"""A handler that takes a tenth of a second, four calls at once."""
ROW: Final = np.arange(10, dtype=np.float32).reshape(1, 10)

_NODES: Final = {
    "long_text": "raise ValueError('x' * 20_000_000)",
    "long_chain": """
        error = None
        for number in range(1000):
            try:
                raise ValueError(f"cause {number} " + "y" * 200) from error
            except ValueError as after:
                error = after
        raise error
    """,
    "long_output": "return [Tensor('out', bytes(400_000_000))]",
    "long_search": "re.match(bytes(inputs[0]), b'a' * 27 + b'!')",
}
_NODE: Final = """
import re
from pyovms import Tensor

class OvmsPythonModel:
    def execute(self, inputs):
        {body}
        return [Tensor("out", b"done")]
"""
# Not time.sleep: under a preloaded clock that is set meanwhile it may find its deadline before the epoch, and raise.
_SLEEPER: Final = """
import select

class Handler:
    def handle_post(self, payload):
        select.select([], [], [], 0.1)
        return payload
"""


def _big() -> ov.Model:
    x = op.parameter([1], np.float32, name="x")
    x.output(0).set_names({"x"})
    y = op.broadcast(x, op.constant(np.array([BIG_BYTES // 4], np.int64)))
    y.output(0).set_names({"y"})
    return ov.Model([op.result(y)], [x], "big")


def _write_graph(folder: Path, name: str, body: str) -> dict[str, Any]:
    (folder / name).mkdir()
    (folder / name / "node.py").write_text(_NODE.replace("{body}", body.strip()))
    (folder / name / "graph.pbtxt").write_text(graph_text(python_node("node.py")))
    return {"name": name, "base_path": str(folder / name)}


def write_attacked(folder: Path, *, graph_keys: dict[str, dict[str, Any]] | None = None) -> Path:
    models = {TRIVIAL: ir.dummy(), BIG: _big()}
    paths = {name: str(ir.save(model, folder / "models", name)) for name, model in models.items()}
    write_project(folder / SLEEPER, _SLEEPER, threads_per_process=4, max_concurrency=8)
    graphs = [_write_graph(folder, name, body) | (graph_keys or {}).get(name, {}) for name, body in _NODES.items()]
    document = {
        # Few requests, so that all buffers are allocated before the memory is measured.
        "model_config_list": [
            {"config": {"name": name, "base_path": path, "nireq": 2}} for name, path in paths.items()
        ],
        "mediapipe_config_list": graphs,
        "handler_config_list": [{"name": SLEEPER, "path": str(folder / SLEEPER)}],
    }
    config = folder / "config.json"
    config.write_text(json.dumps(document, indent=1))
    return config
