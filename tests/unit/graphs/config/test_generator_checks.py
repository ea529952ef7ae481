from __future__ import annotations

import pytest

from ovmstrio.core.errors import Problem
from ovmstrio.runtimes.graphs.config.graph_file import read_graph
from ovmstrio.runtimes.graphs.config.wiring import check_wiring
from ovmstrio.runtimes.graphs.policies import policy_names
from tests.support.graphs import LOOPBACK, graph_text, python_node

IMMEDIATE = 'input_stream_handler { input_stream_handler: "ImmediateInputStreamHandler" }'


def generator(name: str, source: str, output: str) -> str:
    return python_node(
        "m.py", [f"IN:{source}"], [f"OUT:{output}"], name=name, more=LOOPBACK.replace(":loopback", f":loop_{name}")
    )


def problems(*nodes: str) -> list[Problem]:
    return check_wiring(read_graph(graph_text(*nodes), "graph.pbtxt"), {}, policy_names())


def test_generator_fed_by_a_generator_is_a_warning() -> None:
    nodes = (
        generator("a", "in", "x"),
        python_node("m.py", ["IN:x"], ["OUT:y"], name="plain"),
        generator("b", "y", "out"),
    )
    (problem,) = problems(*nodes)
    assert problem.severity == "warning"
    assert problem.message.startswith('node "b" has a LOOPBACK and is fed by "a"')
    assert "RESOURCE_EXHAUSTED" in problem.message
    assert graph_text(*nodes).splitlines()[(problem.line or 0) - 1].strip() == 'input_stream: "IN:y"'


@pytest.mark.parametrize("other", ["in", "z"])
def test_waiting_for_generators_of_different_lengths_is_a_warning(other: str) -> None:
    nodes = [generator("a", "in", "x"), *([generator("b", "in", "z")] if other == "z" else [])]
    (problem,) = problems(*nodes, python_node("m.py", ["A:x", f"B:{other}"], name="join"))
    assert problem.severity == "warning"
    assert problem.message.startswith('node "join" waits for inputs that "a"')
    assert not problems(*nodes, python_node("m.py", ["A:x", f"B:{other}"], name="join", more=IMMEDIATE))


def test_one_generator_and_plain_nodes_have_no_problem() -> None:
    first = generator("a", "in", "x").replace(
        'output_stream: "OUT:x"', 'output_stream: "OUT:x"\n  output_stream: "MORE:y"'
    )
    plain = python_node("m.py", ["IN:y"], ["OUT:z"], name="plain")
    assert not problems(first, plain, python_node("m.py", ["A:x", "B:z"], name="join"))


def test_loopback_of_another_node_is_refused() -> None:
    crossed = generator("a", "in", "x").replace('output_stream: "LOOPBACK:loop_a"', 'output_stream: "LOOPBACK:loop_b"')
    other = generator("b", "in", "out").replace('output_stream: "LOOPBACK:loop_b"', 'output_stream: "LOOPBACK:loop_a"')
    found = [each for each in problems(crossed, other) if "would stop after its first value" in each.message]
    assert [(each.expected, each.found) for each in found] == [
        ("LOOPBACK:loop_b", "LOOPBACK:loop_a"),
        ("LOOPBACK:loop_a", "LOOPBACK:loop_b"),
    ]
