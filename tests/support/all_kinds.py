"""A ``config.json`` with a service of every kind, as its user writes it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from tests.support import ir
from tests.support.graphs import graph_text, python_node
from tests.support.projects import write_project

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["HANDLER", "NAMES", "NODE", "OPS", "pipeline_entry", "write_all_kinds"]

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
from ovmstrio.ops import Op, WebService


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


def pipeline_entry(name: str, called: str, item: str = "b", output: str = "a", **options: Any) -> dict[str, Any]:
    """Return the entry of a pipeline of one node ``node``, which calls a service.

    The input and the output of the pipeline have the names of those of the service. ``options`` are of the node.
    """
    node = {
        "name": "node",
        "type": "DL model",
        "model_name": called,
        "inputs": [{item: {"node_name": "request", "data_item": item}}],
        "outputs": [{"data_item": output, "alias": output}],
        **options,
    }
    outputs = [{output: {"node_name": "node", "data_item": output}}]
    return {"name": name, "inputs": [item], "nodes": [node], "outputs": outputs}


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
        "pipeline_config_list": [pipeline_entry("dag", "model")],
        "mediapipe_config_list": [{"name": "graph", "base_path": str(folder / "graph")}],
        "handler_config_list": [{"name": "handler", "path": str(folder / "handler")}],
        "op_pipeline_config_list": [{"name": "ops", "path": str(folder / "ops")}],
    }
    config.write_text(json.dumps(document, indent=1))
    return config
