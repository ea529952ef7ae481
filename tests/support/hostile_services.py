"""Services that hostile bodies are sent to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from tests.support.all_kinds import write_all_kinds
from tests.support.graphs import graph_text, python_node

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
ANY_OPS: Final = """
from ovmstrio.ops import Op, WebService


class Count(Op):
    def preprocess(self, input_dicts, data_id=0, log_id=0):
        (given,) = input_dicts.values()
        return {"y": str(sorted(given))}, False, None, ""


class Service(WebService):
    def get_pipeline_response(self, read_op):
        return Count(name="count", input_ops=[read_op])


service = Service(name="ops")
service.prepare_pipeline_config("config.yml")
service.run_service()
"""
"""Ops that answer any input."""


def write_hostile_services(folder: Path) -> Path:
    """Write a service of every kind but text models whose code answers any payload; returns the configuration."""
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
