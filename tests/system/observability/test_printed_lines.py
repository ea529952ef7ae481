"""What code of users prints under the real command: a line of the log each, with the name of whose it is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import httpx
import pytest

from tests.support.all_kinds import OPS, write_all_kinds
from tests.support.custom_nodes import DOUBLER
from tests.support.processes import OvmsProcess, serving

pytestmark = pytest.mark.e2e

GRAPH = """
from pyovms import Tensor

class OvmsPythonModel:
    def execute(self, inputs):
        print("from", end=" ", flush=True)
        print("graph")
        return [Tensor("out", bytes(inputs[0]))]
"""
HANDLER = """
import sys, threading

class Handler:
    async def handle_post(self, payload):
        sys.stderr.write("from handler")
        thread = threading.Thread(target=print, args=("from a thread of the handler",))
        thread.start()
        thread.join()
        return payload
"""
IN_OP = 'print("from op", end="")\n        (given,)'
SENT = {"inputs": [{"name": "in", "shape": [3], "datatype": "UINT8", "data": [1, 2, 3]}]}
ROW = {"inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}]}


def _config(folder: Path) -> Path:
    """Write all kinds, and beside them a pipeline of a custom node, and graph, handler and Ops in processes."""
    config = write_all_kinds(folder, node=GRAPH, handler=HANDLER, ops=OPS.replace("(given,)", IN_OP))
    document = json.loads(config.read_text())
    node_source = dedent(DOUBLER).replace('    return {"y', "    print('from node')\n    return {\"y")
    (folder / "doubler.py").write_text(node_source)
    document["custom_node_library_config_list"] = [{"name": "doubler", "base_path": str(folder / "doubler.py")}]
    node = {
        "name": "twice",
        "library_name": "doubler",
        "type": "custom",
        "params": {},
        "inputs": [{"x": {"node_name": "request", "data_item": "x"}}],
        "outputs": [{"data_item": "y", "alias": "y"}],
    }
    outputs = [{"y": {"node_name": "twice", "data_item": "y"}}]
    document["pipeline_config_list"].append({"name": "double", "inputs": ["x"], "nodes": [node], "outputs": outputs})
    (graph,), (handler,) = document["mediapipe_config_list"], document["handler_config_list"]
    document["mediapipe_config_list"].append({**graph, "name": "apart", "python_isolation": "process"})
    document["handler_config_list"].append({**handler, "name": "handler_apart", "python_isolation": "process"})
    (folder / "ops_apart").mkdir()
    settings = "worker_num: 4\nlogging: {enabled: false}\ndag: {is_thread_op: false}\n"
    (folder / "ops_apart" / "config.yml").write_text(settings)
    (folder / "ops_apart" / "web_service.py").write_text((folder / "ops" / "web_service.py").read_text())
    document["op_pipeline_config_list"].append({"name": "ops_apart", "path": str(folder / "ops_apart")})
    config.write_text(json.dumps(document))
    return config


@pytest.fixture
def server(tmp_path: Path) -> Iterator[OvmsProcess]:
    """Serve it with a log for programs."""
    with serving("--config_path", str(_config(tmp_path)), "--log_format", "json", log=tmp_path / "log") as running:
        yield running


def _ask_all(server: OvmsProcess) -> None:
    asked: list[tuple[str, Any]] = [
        *((f"/v2/models/{name}/infer", SENT) for name in ("graph", "apart")),
        *((f"/{name}", [1]) for name in ("handler", "handler_apart")),
        *((f"/{name}/prediction", {"key": ["x"], "value": ["a"]}) for name in ("ops", "ops_apart")),
        ("/v2/models/double/infer", ROW),
    ]
    for path, body in asked:
        answer = httpx.post(server.rest + path, json=body, timeout=30, trust_env=False)
        assert answer.status_code == 200, (path, answer.text)


def test_each_kind_of_code_prints_lines_of_the_log_with_its_name(server: OvmsProcess) -> None:
    """In the server and in processes of its own; nothing but such lines is on standard output and standard error."""
    _ask_all(server)
    code, printed = server.stop()
    assert code == 0
    lines = [json.loads(line) for line in printed.splitlines()]
    told = {
        (line["event"], line.get("servable"), line.get("node") or line.get("op") or line.get("handler"), line["stream"])
        for line in lines
        if line["logger"] == "ovmstrio.printed"
    }
    assert told == {
        ("from graph", "graph", "node", "stdout"),
        ("from graph", "apart", "node", "stdout"),
        ("from handler", None, "handler", "stderr"),
        ("from handler", None, "handler_apart", "stderr"),
        ("from a thread of the handler", None, None, "stdout"),
        ("from a thread of the handler", None, "handler_apart", "stdout"),
        ("from op", "ops", "count", "stdout"),
        ("from op", "ops_apart", "count", "stdout"),
        ("from node", None, "twice", "stdout"),
    }
