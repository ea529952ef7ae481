"""Services of all kinds for the tests of the console's page."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import numpy as np
import openvino as ov
from openvino import opset13 as opset

from tests.support import ir
from tests.support.all_kinds import write_all_kinds
from tests.support.graphs import LOOPBACK, graph_text, python_node

MARKUP: Final = '<img src=x onerror="window.hit=1"><script>window.hit=1</script>'
MARKUP_NAME: Final = "<img src=x onerror=window.hit=1>is true"
"""The name of a model, which has to have no slash."""
_WORDS: Final = """
import time
from pyovms import Tensor

class OvmsPythonModel:
    def execute(self, inputs):
        text = bytes(inputs[0])
        text = text[4:] if text[1:4] == bytes(3) else text
        if b"fail" in text:
            raise ValueError("the text asks for it: " + text.decode(errors="replace"))
        for word in text.split():
            yield [Tensor("words", word + b" ")]
"""
_UPPER: Final = """
from pyovms import Tensor

class OvmsPythonModel:
    def execute(self, inputs):
        return [Tensor("upper", bytes(inputs[0]).upper())]
"""
_COUNT: Final = """
from pyovms import Tensor

class OvmsPythonModel:
    def execute(self, inputs):
        return [Tensor("sizes", str(len(bytes(inputs[0]))).encode())]
"""
_OPS: Final = """
from ovmstrio.ext.ops import Op, WebService

class Read(Op):
    def preprocess(self, input_dicts, data_id=0, log_id=0):
        (given,) = input_dicts.values()
        return {"y": given["x"]}, False, None, ""

class Left(Read):
    def preprocess(self, input_dicts, data_id=0, log_id=0):
        return {"y": "left"}, False, None, ""

class Right(Left):
    pass

class Join(Op):
    def preprocess(self, input_dicts, data_id=0, log_id=0):
        return {"y": " ".join(str(each["y"]) for each in input_dicts.values())}, False, None, ""

class Service(WebService):
    def get_pipeline_response(self, read_op):
        read = Read(name="read", input_ops=[read_op])
        left = Left(name="left", input_ops=[read])
        right = Right(name="right", input_ops=[read])
        return Join(name="join", input_ops=[left, right])


service = Service(name="ops")
service.prepare_pipeline_config("config.yml")
service.run_service()
"""


def _classifier() -> ov.Model:
    picture = opset.parameter([1, 3, 32, 32], np.float32, name="image")
    picture.output(0).set_names({"image"})
    mean = opset.reduce_mean(picture, opset.constant(np.array([2, 3])), keep_dims=False)
    weights = np.linspace(-0.02, 0.02, 30, dtype=np.float32).reshape(3, 10)
    scores = opset.softmax(opset.matmul(mean, opset.constant(weights), False, False), 1)
    scores.output(0).set_names({"scores"})
    return ov.Model([opset.result(scores)], [picture], "classifier")


def _branching() -> dict[str, Any]:
    nodes = [
        {
            "name": name,
            "type": "DL model",
            "model_name": "model",
            "inputs": [{"b": {"node_name": source, "data_item": item}}],
            "outputs": [{"data_item": "a", "alias": "a"}],
        }
        for name, source, item in [
            ("prepare", "request", "b"),
            ("detect", "prepare", "a"),
            ("classify", "prepare", "a"),
            ("refine", "detect", "a"),
        ]
    ]
    outputs = [
        {"boxes": {"node_name": "refine", "data_item": "a"}},
        {"classes": {"node_name": "classify", "data_item": "a"}},
    ]
    return {"name": "detector", "inputs": ["b"], "nodes": nodes, "outputs": outputs}


def write_services(folder: Path) -> Path:
    config = write_all_kinds(folder, ops=_OPS)
    document = json.loads(config.read_text())
    classifier = ir.save(_classifier(), folder / "repository", "classifier")
    totals = ir.save(ir.accumulator(), folder / "repository", "totals")
    document["model_config_list"] += [
        {"config": {"name": "classifier", "base_path": str(classifier)}},
        {"config": {"name": MARKUP_NAME, "base_path": str(folder / "repository" / "model")}},
        {"config": {"name": "totals", "base_path": str(totals), "stateful": True}},
        {"config": {"name": "broken", "base_path": "/models/nothing <b>here</b>"}},
    ]
    document["pipeline_config_list"].append(_branching())
    words = folder / "words"
    words.mkdir()
    for name, text in (("words.py", _WORDS), ("upper.py", _UPPER), ("count.py", _COUNT)):
        (words / name).write_text(text)
    nodes = "\n".join(
        [
            python_node("words.py", ["IN:text"], ["OUT:words"], name="words", more=LOOPBACK),
            python_node("upper.py", ["IN:words"], ["OUT:upper"], name="upper"),
            python_node("count.py", ["IN:words"], ["OUT:sizes"], name="count"),
        ]
    )
    outputs = ["OVMS_PY_TENSOR:upper", "OVMS_PY_TENSOR1:sizes"]
    (words / "graph.pbtxt").write_text(graph_text(nodes, inputs=["OVMS_PY_TENSOR:text"], outputs=outputs))
    document["mediapipe_config_list"].append({"name": "words", "base_path": str(words)})
    incrementer = files("ovmstrio.samples.incrementer")
    (folder / "incrementer").mkdir()
    for name in ("graph.pbtxt", "incrementer.py"):
        (folder / "incrementer" / name).write_bytes(incrementer.joinpath(name).read_bytes())
    document["mediapipe_config_list"].append({"name": "incrementer", "base_path": str(folder / "incrementer")})
    config.write_text(json.dumps(document))
    return config
