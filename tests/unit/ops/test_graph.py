from __future__ import annotations

from typing import Any

import pytest

from ovmstrio.core.errors import ConfigError
from ovmstrio.ops import Op, RequestOp, ResponseOp
from ovmstrio.runtimes.ops.graph import OpGraph, build


class Joining(Op):
    def preprocess(self, input_dicts: Any, data_id: int = 0, log_id: int = 0) -> Any:
        return {key: value for one in input_dicts.values() for key, value in one.items()}


def graph(*edges: str, jumps: dict[str, str] | None = None, read: RequestOp | None = None) -> OpGraph:
    """Build ``"b<a"``, ``"d<b c"``; the last Op named is the last one, ``@`` the RequestOp."""
    ops: dict[str, Op] = {"@": read or RequestOp()}
    for edge in edges:
        name, _, producers = edge.partition("<")
        ops[name] = Joining(name=name, input_ops=[ops[one] for one in producers.split()])
    for name, target in (jumps or {}).items():
        ops[name].set_jump_to_ops(ops[target])
    return build(ResponseOp(input_ops=list(ops.values())[-1]))


def refused(*edges: str, jumps: dict[str, str] | None = None) -> str:
    """Give the text with which a graph is refused."""
    with pytest.raises(ConfigError) as caught:
        graph(*edges, jumps=jumps)
    return str(caught.value)


@pytest.mark.parametrize(
    ("edges", "inputs"),
    [
        (["a<@", "b<a", "c<b"], {"a": ("@DAGExecutor",), "b": ("a",), "c": ("b",)}),
        (["a<@", "b<a", "c<a", "d<b c"], {"d": ("b", "c")}),
        (["a<@", "b<a", "c<b", "d<a c"], {"d": ("a", "c")}),
        (["a<@", "b<a", "c<b", "d<@ a c"], {"d": ("@DAGExecutor", "a", "c")}),
        (["a<@", "b<a", "c<a", "d<a", "e<b c d"], {"e": ("b", "c", "d")}),
        (["a<@", "b<@", "c<b", "d<a c"], {"a": ("@DAGExecutor",), "d": ("a", "c")}),
    ],
    ids=["chain", "diamond", "skip", "two skips", "fan-out to three", "unequal branches"],
)
def test_any_graph_with_one_source_and_one_sink_is_built(edges: list[str], inputs: dict[str, tuple[str, ...]]) -> None:
    """Ops keep the inputs that they were given, in their order, whatever the lengths of the branches."""
    built = graph(*edges)
    assert {name: built.inputs[name] for name in inputs} == inputs
    assert built.last == edges[-1][0]
    order = ["@DAGExecutor", *built.ops]
    assert all(order.index(one) < order.index(name) for name, ones in built.inputs.items() for one in ones)


def test_ops_that_lead_nowhere_are_left_out() -> None:
    """Only what the last Op needs is in the graph."""
    assert set(graph("a<@", "b<a", "c<a").ops) == {"a", "c"}


def test_a_name_that_is_used_twice_is_refused() -> None:
    """The message has the name."""
    read = RequestOp()
    one = Op(name="same", input_ops=read)
    with pytest.raises(ConfigError, match=r"same \(2 times\)"):
        build(ResponseOp(input_ops=Op(name="same", input_ops=one)))


def test_a_cycle_is_refused() -> None:
    """The message lists the Ops of the cycle."""
    read = RequestOp()
    a, b = Joining(name="a", input_ops=read), Joining(name="b")
    b.set_input_ops(a)
    a.set_input_ops([read, b])
    with pytest.raises(ConfigError, match="cycle") as caught:
        build(ResponseOp(input_ops=b))
    assert "a" in str(caught.value)
    assert "b" in str(caught.value)
    a.set_input_ops(b)
    with pytest.raises(ConfigError, match=r"cycle .*b, a"):
        build(ResponseOp(input_ops=b))


def test_a_second_source_is_refused() -> None:
    """An Op without inputs that is not the RequestOp has no data to begin with."""
    stray = Op(name="stray")
    with pytest.raises(ConfigError, match=r"found @DAGExecutor, stray|found stray, @DAGExecutor"):
        build(ResponseOp(input_ops=Joining(name="end", input_ops=[RequestOp(), stray])))
    with pytest.raises(ConfigError, match=r"begins with a RequestOp .*found stray"):
        build(ResponseOp(input_ops=stray))


def test_ends_that_are_not_one_op_are_refused() -> None:
    """A ResponseOp has one input, which is not the RequestOp, and nothing else ends a pipeline."""
    read = RequestOp()
    a, b = Op(name="a", input_ops=read), Op(name="b", input_ops=read)
    with pytest.raises(ConfigError, match=r"exactly one input.*found a, b"):
        build(ResponseOp(input_ops=[a, b]))
    with pytest.raises(ConfigError, match="at least one Op"):
        build(ResponseOp(input_ops=read))
    with pytest.raises(ConfigError, match=r"ends with a ResponseOp .*found a"):
        build(a)


def test_inputs_that_are_no_ops_are_refused() -> None:
    """The message tells what was given instead."""
    with pytest.raises(ConfigError, match=r"input_ops of a .*found str"):
        Op(name="a", input_ops=["b"])  # type: ignore[list-item] # the mistake that is tested


def test_several_inputs_need_a_preprocess() -> None:
    """The default cannot make one feed of several outputs, which is said before the start."""
    read = RequestOp()
    a, b = Op(name="a", input_ops=read), Op(name="b", input_ops=read)
    with pytest.raises(ConfigError, match=r"Op end has several inputs \(a, b\)"):
        build(ResponseOp(input_ops=Op(name="end", input_ops=[a, b])))


@pytest.mark.parametrize(
    ("edges", "jumps"),
    [
        (["a<@", "b<a", "c<b"], {"b": "a"}),
        (["a<@", "b<a", "c<b"], {"b": "@"}),
        (["a<@", "b<a", "c<b"], {"c": "a"}),
        (["a<@", "b<a", "c<b", "d<c"], {"a": "c"}),
        (["a<@", "b<a", "c<a", "d<b c", "e<d"], {"e": "a"}),
        (["a<@", "b<a", "c<b", "d<a c"], {"c": "b"}),
    ],
)
def test_jumps_that_can_be_made_are_accepted(edges: list[str], jumps: dict[str, str]) -> None:
    """Loops and skips are built, joins within a loop and behind it included."""
    built = graph(*edges, jumps=jumps)
    assert built.jumps == {name: ("@DAGExecutor" if to == "@" else to,) for name, to in jumps.items()}


@pytest.mark.parametrize(
    ("edges", "jumps", "message"),
    [
        (["a<@", "b<a", "c<@", "d<b c", "e<d"], {"e": "b"}, "d would never get the output of c"),
        (["a<@", "b<a", "c<b", "d<a c"], {"a": "b"}, "d would never get the output of a"),
        (["a<@", "b<a", "c<a", "d<b c"], {"b": "a"}, "c would run beside the loop"),
    ],
)
def test_jumps_after_which_an_op_would_wait_forever_are_refused(
    edges: list[str], jumps: dict[str, str], message: str
) -> None:
    """The message names the Op that would wait and what it would wait for."""
    assert message in refused(*edges, jumps=jumps)


def test_a_jump_out_of_the_pipeline_is_refused() -> None:
    """The message lists the Ops that there are."""
    a = Op(name="a", input_ops=RequestOp(), jump_to_ops=Op(name="elsewhere"))
    with pytest.raises(ConfigError, match=r"not in the pipeline .*some of a, found elsewhere"):
        build(ResponseOp(input_ops=a))
