from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ovmstrio.core.drawing import DrawnEdge, to_mermaid
from ovmstrio.runtimes.ops.config.pipeline_file import read_pipeline_config
from ovmstrio.runtimes.ops.graph import build, draw
from ovmstrio.runtimes.ops.op import Op, RequestOp, ResponseOp


class _Join(Op):
    def preprocess(self, input_dicts: Mapping[str, Any], data_id: int = 0, log_id: int = 0) -> Any:
        return input_dicts, False, None, ""


def test_diamond_with_settings() -> None:
    """Ops are in layers below their inputs, with their models and what is special about them."""
    read = RequestOp()
    first = Op("first", input_ops=[read], concurrency=3)
    left, right = Op("left", input_ops=[first]), Op("right", input_ops=[first])
    graph = build(ResponseOp(input_ops=[_Join("join", input_ops=[left, right])]))
    ops = {
        "left": {
            "batch_size": 4,
            "auto_batching_timeout": 20,
            "timeout": 500,
            "retry": 2,
            "local_service_conf": {"model_config": "det"},
        },
        "right": {"server_endpoints": ["h:1", "h:2"], "client_type": "kserve", "batch_size": 2},
    }
    drawing = draw(graph, read_pipeline_config(yml_dict={"rpc_port": 0, "op": ops, "dag": {"is_thread_op": False}}))
    layers = [[box.title for box in layer] for layer in drawing.layers]
    assert layers == [["request"], ["first"], ["left", "right"], ["join"], ["response"]]
    boxes = {box.title: box for layer in drawing.layers for box in layer}
    assert (boxes["first"].subtitle, boxes["first"].notes) == ("no model", ("3 processes",))
    assert boxes["left"].subtitle == "model det"
    assert boxes["left"].notes == ("1 process", "batches of 4, at most 20 ms", "times out after 500 ms, 2 attempts")
    assert boxes["right"].subtitle == "kserve at h:1, h:2"
    assert boxes["right"].notes == ("1 process", "batches of 2")
    ends = {(edge.source, edge.target) for edge in drawing.edges}
    key = {title: box.key for title, box in boxes.items()}
    pairs = [("request", "first"), ("first", "left"), ("first", "right"), ("left", "join"), ("right", "join")]
    assert ends == {(key[a], key[b]) for a, b in [*pairs, ("join", "response")]}
    assert "flowchart" in to_mermaid(drawing)


def test_jumps_lead_up() -> None:
    """A jump is an edge back to the Op whose place the output takes."""
    read = RequestOp()
    first = Op("first", input_ops=[read])
    again = Op("again", input_ops=[first], jump_to_ops=[first])
    drawing = draw(build(ResponseOp(input_ops=[Op("last", input_ops=[again])])))
    assert [edge for edge in drawing.edges if edge.is_back] == [DrawnEdge("n1", "n0", "jump", is_back=True)]
