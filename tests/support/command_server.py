"""Server for tests of commands: models, graphs, a handler and a pipeline of Ops, in this process."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ovmstrio.samples
from tests.support import ir
from tests.support.graphs import LOOPBACK, graph_text, python_node
from tests.support.projects import write
from tests.support.served_in_thread import ServedInThread, serving_in_thread

_SAMPLES = Path(ovmstrio.samples.__file__).parent
_GRAPHS = ("incrementer", "counter_stream", "labels_image")
_SETTINGS: dict[str, dict[str, Any]] = {
    "dummy": {"plugin_config": {"INFERENCE_PRECISION_HINT": "f32"}},
    "two": {"model_version_policy": {"all": {}}},
    **{name: {"stateful": True} for name in ("sum", "left", "reshape")},
}
CLOSED = "words/handler.py.closed"
"""The file that the graph ``words`` writes when the generator of a request is closed."""

_ADDER = """
from ovmstrio.ext.handlers import HTTPError

class Handler:
    def handle_post(self, payload):
        if not isinstance(payload, list):
            raise HTTPError(400, "expected a list of numbers")
        return {"sum": sum(payload)}
"""
_HANDLER = """
import time
from pyovms import Tensor, current_context

class OvmsPythonModel:
    def execute(self, inputs):
        given = {tensor.name: bytes(tensor) for tensor in inputs}
        text = given["text"].decode()
        if text == "fail":
            raise ValueError("as asked")
        try:
            if text == "endless":
                for number in range(10_000):
                    yield [Tensor("word", b"more ")]
                    time.sleep(0.01)
            if text == "letters":
                for byte in "h\u00e9\u2028\U0001f468\u200d\U0001f469".encode():
                    yield [Tensor("word", bytes([byte]))]
                return
            if text == "late":
                yield [Tensor("word", b"so far")]
                raise ValueError("as asked")
            for word in text.split():
                yield [Tensor("word", word.encode() + b" ")]
            limit = current_context().parameters.get("limit", 0)
            yield [Tensor("more", inputs[-1] if len(inputs) > 1 else memoryview(bytes(limit)))]
        finally:
            with open(__file__ + ".closed", "a") as closed:
                closed.write(text)
"""

_WORDS = graph_text(
    python_node("handler.py", ["A:text"], ["WORD:word", "MORE:more"], more=LOOPBACK),
    inputs=["OVMS_PY_TENSOR:text"],
    outputs=["OVMS_PY_TENSOR_A:word", "OVMS_PY_TENSOR_B:more"],
)


@contextmanager
def serving_for_commands(folder: Path) -> Iterator[ServedInThread]:
    """Serve until the end of the block; one model has two versions, one is damaged, and three are stateful."""
    grey = ir.passthrough("FP32", (1, 4, 4, 1), layout="NHWC", input_name="image", output_name="pixels")
    models = {"dummy": ir.dummy(), "pixels": grey, "damaged": ir.dummy(), "reshape": ir.reshape_by_data()}
    models |= {name: ir.accumulator() for name in ("sum", "left")}
    for name, model in models.items():
        ir.save(model, folder, name)
    for version, shape in ((1, (2, 3)), (2, (4, 5))):
        ir.save(ir.passthrough("FP32", shape), folder, "two", version)
    (folder / "damaged" / "1" / "model.xml").write_text("<net")
    ignored = shutil.ignore_patterns("__pycache__", "PipelineServingLogs")
    for name in (*_GRAPHS, "ops_diamond"):
        shutil.copytree(_SAMPLES / name, folder / name, ignore=ignored)
    (write(folder / "adder") / "handler.py").write_text(_ADDER)
    (folder / "words").mkdir()
    (folder / "words" / "graph.pbtxt").write_text(_WORDS)
    (folder / "words" / "handler.py").write_text(_HANDLER)
    entries = [{"name": name, "base_path": name, **_SETTINGS.get(name, {})} for name in (*models, "two")]
    config = {
        "model_config_list": [{"config": entry} for entry in entries],
        "mediapipe_config_list": [{"name": name, "base_path": name} for name in (*_GRAPHS, "words")],
        "handler_config_list": [{"name": "adder", "path": "adder"}],
        "op_pipeline_config_list": [{"name": "diamond", "path": "ops_diamond/config.yml"}],
    }
    (folder / "config.json").write_text(json.dumps(config))
    # A repeated load of the damaged model has no reason while it runs.
    with serving_in_thread(config_path=folder / "config.json", file_system_poll_wait_seconds=0) as running:
        yield running
