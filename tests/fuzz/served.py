"""What is fuzzed: a service of every kind whose code answers whatever it is given, and models of other shapes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from tests.support import ir
from tests.support.all_kinds import write_all_kinds
from tests.support.tiny_llm import write_tiny_folder

_HANDLER: Final = """
class Handler:
    def handle_get(self, query_params):
        return {"got": len(query_params)}

    def handle_post(self, payload):
        return {"got": type(payload).__name__}

    def handle_put(self, payload):
        return bytes(3)
"""
_OPS: Final = """
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


def write_fuzzed(folder: Path) -> Path:
    """Write everything into a folder; gives the configuration's path."""
    config = write_all_kinds(folder, handler=_HANDLER, ops=_OPS)
    models: dict[str, tuple[Any, dict[str, Any]]] = {
        "dynamic": (ir.dynamic(), {}),
        "strings": (ir.string_passthrough(), {}),
        "stateful": (ir.accumulator(), {"stateful": True, "max_sequence_number": 50}),
    }
    document = json.loads(config.read_text())
    document["model_config_list"] += [
        {"config": {"name": name, "base_path": str(ir.save(model, folder / "repository", name)), **options}}
        for name, (model, options) in models.items()
    ]
    text_model = {"name": "chat", "base_path": str(write_tiny_folder(folder / "chat")), "max_tokens_limit": 50}
    document["text_model_config_list"] = [{"config": text_model}]
    config.write_text(json.dumps(document, indent=1))
    return config
