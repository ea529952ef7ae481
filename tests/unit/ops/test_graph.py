from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ovmstrio.core.errors import ConfigError
from ovmstrio.ext.ops import Op, RequestOp, ResponseOp
from ovmstrio.ops.config_file import read_pipeline_config
from ovmstrio.ops.graph import OpGraph, build, draw
from ovmstrio.util.drawing import DrawnEdge, to_mermaid
from tests.support.ops import op_class, text_graph

_JOINING = op_class(preprocess=lambda _, inputs: {key: value for one in inputs.values() for key, value in one.items()})


def graph(*edges: str, jumps: dict[str, str] | None = None) -> OpGraph:
    return text_graph(*edges, make=_JOINING, jumps=jumps)


@pytest.mark.parametrize(
    ("edges", "inputs"),
    [
        (["a<@", "b<a", "c<b"], {"a": ("@DAGExecutor",), "b": ("a",), "c": ("b",)}),
        (["a<@", "b<a", "c<a", "d<b c"], {"d": ("b", "c")}),
        (["a<@", "b<a", "c<b", "d<@ a c"], {"d": ("@DAGExecutor", "a", "c")}),
        (["a<@", "b<a", "c<a", "d<a", "e<b c d"], {"e": ("b", "c", "d")}),
        (["a<@", "b<@", "c<b", "d<a c"], {"a": ("@DAGExecutor",), "d": ("a", "c")}),
    ],
    ids=["chain", "diamond", "two skips", "fan-out to three", "unequal branches"],
)
def test_ops_keep_the_order_of_their_inputs(edges: list[str], inputs: dict[str, tuple[str, ...]]) -> None:
    built = graph(*edges)
    assert {name: built.inputs[name] for name in inputs} == inputs
    assert built.last == edges[-1][0]
    order = ["@DAGExecutor", *built.ops]
    assert all(order.index(one) < order.index(name) for name, ones in built.inputs.items() for one in ones)


def test_ops_that_lead_nowhere_are_left_out() -> None:
    assert set(graph("a<@", "b<a", "c<a").ops) == {"a", "c"}


def _op(name: str, *inputs: Op, **arguments: Any) -> Op:
    return Op(name=name, input_ops=list(inputs) or RequestOp(), **arguments)


def _two() -> list[Op]:
    read = RequestOp()
    return [Op(name=name, input_ops=read) for name in "ab"]


@pytest.mark.parametrize(
    ("make_end", "message"),
    [
        (lambda: ResponseOp(input_ops=_op("same", _op("same"))), r"same \(2 times\)"),
        (lambda: ResponseOp(input_ops=_JOINING(name="end", input_ops=[RequestOp(), Op(name="b")])), "found .*, .*"),
        (lambda: ResponseOp(input_ops=Op(name="stray")), r"begins with a RequestOp .*found stray"),
        (lambda: ResponseOp(input_ops=_two()), r"exactly one input.*found a, b"),
        (lambda: ResponseOp(input_ops=RequestOp()), "at least one Op"),
        (lambda: _op("a"), r"ends with a ResponseOp .*found a"),
        (lambda: ResponseOp(input_ops=_op("end", *_two())), r"Op end has several inputs \(a, b\)"),
        (
            lambda: ResponseOp(input_ops=_op("a", jump_to_ops=Op(name="elsewhere"))),
            r"not in the pipeline .*some of a, found elsewhere",
        ),
    ],
    ids=[
        "name used twice", "two sources", "no RequestOp", "two ends", "no Op", "no ResponseOp",
        "several inputs without preprocess", "jump out of the pipeline",
    ],
)  # fmt: skip
def test_a_wrong_graph_is_refused(make_end: Callable[[], Op], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(make_end())


def test_a_cycle_is_refused() -> None:
    read = RequestOp()
    a, b = _JOINING(name="a", input_ops=read), _JOINING(name="b")
    b.set_input_ops(a)
    a.set_input_ops([read, b])
    with pytest.raises(ConfigError, match=r"cycle .*b.*a|cycle .*a.*b"):
        build(ResponseOp(input_ops=b))
    a.set_input_ops(b)
    with pytest.raises(ConfigError, match=r"cycle .*b, a"):
        build(ResponseOp(input_ops=b))


def test_inputs_and_jumps_may_be_set_later() -> None:
    read, a, b = RequestOp(), Op(name="a"), Op(name="b")
    b.set_input_ops(a)
    a.set_input_ops([read])
    b.set_jump_to_ops(a)
    assert (a.get_input_ops(), b.get_input_ops(), b.get_jump_to_ops()) == ([read], [a], [a])
    assert list(build(ResponseOp(input_ops=[b])).ops) == ["a", "b"]


def test_inputs_and_jumps_that_are_no_ops_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"input_ops of a .*found str"):
        Op(name="a", input_ops=["b"])  # type: ignore[list-item] # the mistake
    with pytest.raises(ConfigError, match=r"jump_to_ops of b .*found str"):
        Op(name="b").set_jump_to_ops(["a"])  # type: ignore[list-item] # the mistake


def test_the_constructor_calls_the_hook_for_dynamic_shapes() -> None:
    shapes = {"min_input_shape": {"x": [1, 3]}}
    shaped = op_class(set_dynamic_shape_info=lambda op: setattr(op, "dynamic_shape_info", shapes))
    assert shaped(name="op").dynamic_shape_info == shapes


@pytest.mark.parametrize(
    ("edges", "jumps"),
    [
        (["a<@", "b<a", "c<b"], {"b": "a"}),
        (["a<@", "b<a", "c<b"], {"b": "@"}),
        (["a<@", "b<a", "c<b", "d<c"], {"a": "c"}),
        (["a<@", "b<a", "c<a", "d<b c", "e<d"], {"e": "a"}),
        (["a<@", "b<a", "c<b", "d<a c"], {"c": "b"}),
    ],
    ids=["loop", "loop from the start", "skip", "loop around a join", "join behind a loop"],
)
def test_loops_and_skips_are_built(edges: list[str], jumps: dict[str, str]) -> None:
    built = graph(*edges, jumps=jumps)
    assert built.jumps == {name: ("@DAGExecutor" if to == "@" else to,) for name, to in jumps.items()}


@pytest.mark.parametrize(
    ("edges", "jumps", "message"),
    [
        (["a<@", "b<a", "c<@", "d<b c", "e<d"], {"e": "b"}, "d would never get the output of c"),
        (["a<@", "b<a", "c<b", "d<a c"], {"a": "b"}, "d would never get the output of a"),
        (["a<@", "b<a", "c<a", "d<b c"], {"b": "a"}, "c would run in parallel to the loop"),
    ],
)
def test_jumps_after_which_an_op_would_wait_forever_are_refused(
    edges: list[str], jumps: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        graph(*edges, jumps=jumps)


# Drawings


def test_a_drawing_shows_layers_with_the_settings_of_their_ops() -> None:
    made = op_class(preprocess=_JOINING.preprocess)
    first = made("first", input_ops=[RequestOp()], concurrency=3)
    left, right = made("left", input_ops=[first]), made("right", input_ops=[first])
    diamond = build(ResponseOp(input_ops=[made("join", input_ops=[left, right])]))
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
    drawing = draw(diamond, read_pipeline_config(yml_dict={"rpc_port": 0, "op": ops, "dag": {"is_thread_op": False}}))
    layers = [[box.title for box in layer] for layer in drawing.layers]
    assert layers == [["request"], ["first"], ["left", "right"], ["join"], ["response"]]
    boxes = {box.title: box for layer in drawing.layers for box in layer}
    assert {title: (boxes[title].subtitle, boxes[title].notes) for title in ("first", "left", "right")} == {
        "first": ("no model", ("3 processes",)),
        "left": ("model det", ("1 process", "batches of 4, at most 20 ms", "times out after 500 ms, 2 attempts")),
        "right": ("kserve at h:1, h:2", ("1 process", "batches of 2")),
    }
    title_of = {box.key: title for title, box in boxes.items()}
    assert {(title_of[edge.source], title_of[edge.target]) for edge in drawing.edges} == {
        ("request", "first"), ("first", "left"), ("first", "right"), ("left", "join"), ("right", "join"),
        ("join", "response"),
    }  # fmt: skip
    assert "flowchart" in to_mermaid(drawing)


def test_a_jump_is_drawn_as_an_edge_back() -> None:
    drawing = draw(
        graph("first<@", "again<first", "last<again", jumps={"again": "first"}),
        read_pipeline_config(yml_dict={"rpc_port": 0}),
    )
    assert [edge for edge in drawing.edges if edge.is_back] == [DrawnEdge("n1", "n0", "jump", is_back=True)]
