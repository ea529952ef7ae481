"""Configurations with a service of every kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from tests.support import ir
from tests.support.graphs import graph_text, python_node
from tests.support.pipelines import dag_entry
from tests.support.projects import write_project

NAMES: Final = ("model", "dag", "graph", "handler", "ops")

NODE: Final = """
from pyovms import Tensor

class OvmsPythonModel:
    def execute(self, inputs):
        return [Tensor("out", bytes(inputs[0]).upper())]
"""
HANDLER: Final = """
class Handler:
    def handle_post(self, payload):
        return sum(payload)
"""
OPS: Final = """
from ovmstrio.ext.ops import Op, WebService


class Count(Op):
    def preprocess(self, input_dicts, data_id=0, log_id=0):
        (given,) = input_dicts.values()
        return {"y": "first " + given["x"]}, False, None, ""


class Service(WebService):
    def get_pipeline_response(self, read_op):
        return Count(name="count", input_ops=[read_op])


service = Service(name="ops")
service.prepare_pipeline_config("config.yml")
service.run_service()
"""


def write_all_kinds(folder: Path, *, node: str = NODE, handler: str = HANDLER, ops: str = OPS) -> Path:
    """Write a service of each of :data:`NAMES` into a folder, and give the configuration's path.

    ``model`` and ``dag`` add one to FP32 ``b`` [1,10] and call it ``a``; ``graph`` is a Python node, ``handler`` a
    project and ``ops`` a pipeline of Ops with the code that is given.
    """
    repository = ir.save(ir.dummy(), folder / "repository", "model")
    (folder / "graph").mkdir()
    (folder / "graph" / "node.py").write_text(node)
    text = graph_text(python_node("node.py", ["IN:in"], ["OUT:out"]))
    (folder / "graph" / "graph.pbtxt").write_text(text)
    write_project(folder / "handler", handler)
    (folder / "ops").mkdir()
    (folder / "ops" / "config.yml").write_text("worker_num: 4\nlogging: {enabled: false}\n")
    (folder / "ops" / "web_service.py").write_text(ops)
    config = folder / "config.json"
    document = {
        "model_config_list": [{"config": {"name": "model", "base_path": str(repository)}}],
        "pipeline_config_list": [dag_entry("dag", "model", ("b", "b"), ("a", "a"))],
        "mediapipe_config_list": [{"name": "graph", "base_path": str(folder / "graph")}],
        "handler_config_list": [{"name": "handler", "path": str(folder / "handler")}],
        "op_pipeline_config_list": [{"name": "ops", "path": str(folder / "ops")}],
    }
    config.write_text(json.dumps(document, indent=1))
    return config


_PAYLOAD_NODE: Final = """
class OvmsPythonModel:
    def execute(self, inputs):
        asked, = inputs
        return {"got": type(asked.json).__name__}
"""
ANY_HANDLER: Final = """
class Handler:
    def handle_get(self, query_params):
        return {"got": len(query_params)}

    def handle_post(self, payload):
        return {"got": type(payload).__name__}

    def handle_put(self, payload):
        return bytes(3)
"""
"""A handler that answers any payload."""
ANY_OPS: Final = OPS.replace('"first " + given["x"]', "str(sorted(given))")
"""Ops that answer any input."""


def write_hostile_services(folder: Path) -> Path:
    config = write_all_kinds(folder, handler=ANY_HANDLER, ops=ANY_OPS)
    (folder / "payload").mkdir()
    (folder / "payload" / "node.py").write_text(_PAYLOAD_NODE)
    inputs, outputs = ["HTTP_REQUEST_PAYLOAD:asked"], ["HTTP_RESPONSE_PAYLOAD:answer"]
    text = graph_text(python_node("node.py", inputs, outputs), inputs=inputs, outputs=outputs)
    (folder / "payload" / "graph.pbtxt").write_text(text)
    document = json.loads(config.read_text())
    document["mediapipe_config_list"].append({"name": "payload", "base_path": str(folder / "payload")})
    config.write_text(json.dumps(document))
    return config
