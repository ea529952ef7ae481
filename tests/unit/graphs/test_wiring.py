from __future__ import annotations

from collections.abc import Mapping

import pytest

from ovmstrio.core.errors import Problem
from ovmstrio.graphs.calculator import ContractError, NodeContract
from ovmstrio.graphs.graph_config import Port
from ovmstrio.graphs.packets import OvTensor
from ovmstrio.graphs.policies import policy_names
from ovmstrio.graphs.validate import check_wiring
from pyovms import Tensor
from tests.support.graphs import LOOPBACK, graph_text, load_graph_config, python_node

INITIALIZE = "Failed to initialize mediapipe graph - "
HEAD = 'input_stream: "OVMS_PY_TENSOR:in"\noutput_stream: "OVMS_PY_TENSOR:out"\n'
NODE = 'node {\n name: "a" input_stream: "IN:in"\n output_stream: "OUT:out"\n}\n'


def problems_of(text: str, contracts: Mapping[str, NodeContract | ContractError] | None = None) -> list[Problem]:
    return check_wiring(load_graph_config(text, "g"), contracts or {}, policy_names())


def problem_of(text: str, contracts: Mapping[str, NodeContract | ContractError] | None = None) -> Problem:
    (problem,) = problems_of(text, contracts)
    assert problem.file == "g"
    return problem


def test_order_of_nodes_is_free() -> None:
    text = """
    input_stream: "in" output_stream: "out" output_stream: "PASS:in"
    node { name: "last" input_stream: "middle" output_stream: "out" }
    node { name: "first" input_stream: "in" output_stream: "middle" }
    """
    assert problems_of(text) == []


@pytest.mark.parametrize(
    ("text", "path"), [('output_stream: "a"', "input_stream"), ('input_stream: "a"', "output_stream")]
)
def test_graph_needs_inputs_and_outputs(text: str, path: str) -> None:
    problem = next(each for each in problems_of(text) if each.path == path)
    assert problem.message == "Internal server error - having less than one input or output is disallowed"


BORDERS = {
    'input_stream: "REQUEST:a"\noutput_stream: "x"': "Mediapipe passthrough graph misses RESPONSE in output",
    'input_stream: "x"\noutput_stream: "RESPONSE:a"': "Mediapipe passthrough graph misses REQUEST in input",
    'input_stream: "REQUEST:a"\ninput_stream: "b"\noutput_stream: "RESPONSE:x"': (
        "Mediapipe unexpected input stream packets count"
    ),
    'input_stream: "REQUEST:a"\noutput_stream: "RESPONSE:x"\noutput_stream: "OTHER:y"': (
        "Mediapipe unexpected output stream packets count"
    ),
    'input_stream: "TFLITE_TENSOR_A:a"\noutput_stream: "x"': "Functionality not implemented",
    'input_stream: "a"\noutput_stream: "TFLITE_TENSOR:x"': "Functionality not implemented",
}


@pytest.mark.parametrize("text", BORDERS, ids=BORDERS.values())
def test_invalid_streams_of_the_graph_have_messages_of_ovms(text: str) -> None:
    graph = f'{text}\nnode {{ input_stream: "a" output_stream: "x" output_stream: "y" }}'
    if '"x"\noutput' in text:
        graph = f'{text}\nnode {{ input_stream: "x" output_stream: "a" }}'
    assert problem_of(graph).message.startswith(f"{BORDERS[text]} - ")


def test_second_producer_of_a_stream_is_an_error() -> None:
    twice = problem_of(f'{HEAD}{NODE}node {{ name: "b" input_stream: "in"\n output_stream: "out" }}')
    assert (twice.message, twice.line) == (f'{INITIALIZE}UNKNOWN: Output Stream "out" defined twice.', 8)
    assert "line 5" in twice.suggestion
    own = problem_of(f'{HEAD}{NODE}node {{ name: "b" output_stream: "in" }}')
    assert own.message == f'{INITIALIZE}UNKNOWN: Output Stream "in" defined twice.'
    sides = 'node { input_stream: "in" output_side_packet: "s" } node { input_stream: "in" output_side_packet: "s" }'
    assert problem_of(HEAD + NODE + sides).message == f'{INITIALIZE}UNKNOWN: Output Side Packet "s" defined twice.'


def test_input_without_producer_is_an_error() -> None:
    problem = problem_of(f'{HEAD}{NODE}node {{ name: "b"\n input_stream: "uot" }}')
    assert problem.message.startswith(f'{INITIALIZE}Input Stream "uot" for node "b" does not have a corresponding')
    assert (problem.line, problem.suggestion) == (8, "did you mean 'out'?")


def test_output_without_producer_is_an_error() -> None:
    problem = problem_of(
        'input_stream: "in"\noutput_stream: "result"\nnode { input_stream: "in" output_stream: "results" }'
    )
    assert problem.message.startswith("Failed to add mediapipe graph output stream - NOT_FOUND: ")
    assert (problem.line, problem.suggestion) == (2, "did you mean 'results'?")


def test_types_of_connected_nodes_must_agree() -> None:
    text = """input_stream: "OVMS_PY_TENSOR:in"
    output_stream: "OVTENSOR:out"
    node { name: "a" input_stream: "in" output_stream: "middle" }
    node { name: "b"
    input_stream: "middle" output_stream: "out" }
    """
    contracts = {
        "a": NodeContract(outputs={Port("", 0): Tensor}),
        "b": NodeContract(inputs={Port("", 0): OvTensor}),
    }
    problem = problem_of(text, contracts)
    assert problem.message.startswith(f'{INITIALIZE}INVALID_ARGUMENT: Input stream "middle" of calculator "b" expects')
    assert (problem.line, problem.expected, problem.found) == (5, "ov::Tensor", "pyovms.Tensor of a")
    assert problem.suggestion == "add a PyTensorOvTensorConverterCalculator between the two nodes"


def test_tag_of_an_output_must_match_its_type() -> None:
    contracts = {"a": NodeContract(outputs={Port("OUT", 0): Tensor})}
    assert problems_of(HEAD + NODE, contracts) == []
    problem = problem_of(HEAD.replace("OVMS_PY_TENSOR:out", "out") + NODE, contracts)
    assert problem.message.startswith(INITIALIZE)
    assert (problem.line, problem.suggestion) == (2, 'write output_stream: "OVMS_PY_TENSOR:out"')


def test_tag_of_an_input_that_does_not_match_is_a_warning() -> None:
    contracts = {"a": NodeContract(inputs={Port("IN", 0): Tensor}, outputs={Port("OUT", 0): Tensor})}
    problem = problem_of(HEAD.replace("OVMS_PY_TENSOR:in", "in") + NODE, contracts)
    assert (problem.severity, problem.line) == ("warning", 1)
    assert problem.suggestion == 'write input_stream: "OVMS_PY_TENSOR:in"'


def test_contract_errors_are_reported_with_their_fix() -> None:
    problem = problem_of(HEAD + NODE, {"a": ContractError("no", fix="do", code="INTERNAL")})
    assert (problem.message, problem.line) == (f'{INITIALIZE}INTERNAL: no (node "a")', 3)
    assert problem.suggestion == "do"


def test_cycle_without_back_edge_is_an_error() -> None:
    text = """input_stream: "in" output_stream: "x"
    node { name: "a" input_stream: "in"
      input_stream: "BACK:y" output_stream: "x" %s }
    node { name: "b" input_stream: "x" output_stream: "y" }
    """
    problem = problem_of(text % "")
    assert "a -> b -> a" in problem.message
    assert problem.line == 3
    assert problem.suggestion == 'add input_stream_info { tag_index: "BACK:0" back_edge: true } to that node'
    assert problems_of(text % 'input_stream_info { tag_index: "BACK" back_edge: true }') == []
    assert "cycle" in problem_of(text % 'input_stream_info { tag_index: "BACK" back_edge: false }').message


def test_cycle_of_side_packets_is_an_error() -> None:
    sides = 'node { name: "c" input_side_packet: "s" output_side_packet: "s" }'
    assert "c -> c" in problem_of(HEAD + NODE + sides).message


def loop(handler: str, streams: str = 'input_stream: "INPUT:in"') -> str:
    return f"""input_stream: "in" output_stream: "out"
    node {{ name: "a" {streams} input_stream: "LOOPBACK:back" output_stream: "out" output_stream: "LOOPBACK:back"
    input_stream_info {{ tag_index: "LOOPBACK" back_edge: true }}
    {handler} }}
    """


def sync_sets(*sets: str) -> str:
    written = "".join(f"\nsync_set {{ {''.join(f'tag_index: {tag!r} ' for tag in tags.split())}}}" for tags in sets)
    options = f"options {{ [mediapipe.SyncSetInputStreamHandlerOptions.ext] {{ {written} }} }}"
    return f'input_stream_handler {{ input_stream_handler: "SyncSetInputStreamHandler" {options} }}'


@pytest.mark.parametrize(
    "handler",
    [
        sync_sets("LOOPBACK:0"),
        sync_sets("INPUT"),
        sync_sets("INPUT", "LOOPBACK"),
        'input_stream_handler { input_stream_handler: "ImmediateInputStreamHandler" }',
    ],
)
def test_loop_in_a_separate_set_is_valid(handler: str) -> None:
    assert problems_of(loop(handler)) == []


@pytest.mark.parametrize(
    "handler",
    ["", sync_sets("LOOPBACK INPUT"), 'input_stream_handler { input_stream_handler: "BarrierInputStreamHandler" }'],
)
def test_loop_that_waits_for_itself_is_an_error(handler: str) -> None:
    problem = problem_of(loop(handler))
    assert "every request would hang" in problem.message
    assert 'sync_set { tag_index: "LOOPBACK:0" }' in problem.suggestion


HANDLERS = {
    "unknown": ('input_stream_handler { input_stream_handler: "SyncSetsInputStreamHandler" }', 4),
    "unknown tag": (sync_sets("LOOPBACK", "INPUTS"), 6),
    "unknown index": (sync_sets("LOOPBACK", "INPUT:1"), 6),
    "no tag": (sync_sets("LOOPBACK", "input"), 6),
    "tag in two sets": (sync_sets("LOOPBACK", "INPUT", "INPUT:0"), 7),
    "tag twice in a set": (sync_sets("LOOPBACK", "INPUT INPUT"), 6),
}


@pytest.mark.parametrize(("handler", "line"), HANDLERS.values(), ids=HANDLERS)
def test_invalid_sync_sets_are_errors(handler: str, line: int) -> None:
    problem = problem_of(loop(handler))
    assert problem.message.startswith(INITIALIZE)
    assert problem.line == line


def handled(name: str, options: str = "") -> str:
    extension = f"options {{ [mediapipe.{name}Options.ext] {{ {options} }} }}" if options else ""
    return (
        'input_stream: "in" output_stream: "out"\nnode { input_stream: "A:in" output_stream: "out"\n'
        f'input_stream: "B:in"\ninput_stream_handler {{ input_stream_handler: "{name}" {extension} }} }}'
    )


@pytest.mark.parametrize(
    "text",
    [
        handled("TimestampAlignInputStreamHandler"),
        handled("TimestampAlignInputStreamHandler", 'timestamp_base_tag_index: "C"'),
        handled("FixedSizeInputStreamHandler", "target_queue_size: 3"),
        handled("FixedSizeInputStreamHandler", "target_queue_size: 0"),
        handled("DefaultInputStreamHandler", "batch_size: 2"),
    ],
)
def test_invalid_handler_options_are_errors(text: str) -> None:
    assert problem_of(text).line == 4


@pytest.mark.parametrize(
    "text",
    [
        handled("TimestampAlignInputStreamHandler", 'timestamp_base_tag_index: "B:0"'),
        handled("FixedSizeInputStreamHandler"),
        handled("FixedSizeInputStreamHandler", "target_queue_size: 2"),
        handled("DefaultInputStreamHandler", "batch_size: 1"),
        handled("EarlyCloseInputStreamHandler"),
    ],
)
def test_valid_handler_options_have_no_problem(text: str) -> None:
    assert problems_of(text) == []


def test_side_packet_without_producer_is_a_warning() -> None:
    node = NODE.replace("IN:in", 'IN:in" input_side_packet: "SESSION:session')
    problem = problem_of(HEAD + node)
    assert (problem.severity, problem.line) == ("warning", 4)
    assert problems_of(f'{HEAD}input_side_packet: "session"\n{node}') == []
    assert problem_of(HEAD + node.replace("SESSION:session", "PYTHON_NODE_RESOURCES:foo")).suggestion == (
        'write "PYTHON_NODE_RESOURCES:py"'
    )


def test_types_of_side_packets_must_agree() -> None:
    node = NODE.replace("IN:in", 'IN:in" input_side_packet: "S:s')
    text = f'{HEAD}{node}node {{ name: "b" output_side_packet: "S:s" }}'
    port = Port("S", 0)
    contracts = {"a": NodeContract(side_inputs={port: int}), "b": NodeContract(side_outputs={port: str})}
    assert problem_of(text, contracts).expected == "int"
    assert problems_of(text, {"b": contracts["b"]}) == []


# Generators

IMMEDIATE = 'input_stream_handler { input_stream_handler: "ImmediateInputStreamHandler" }'


def check_nodes(*nodes: str) -> list[Problem]:
    return problems_of(graph_text(*nodes))


def generator(name: str, source: str, output: str) -> str:
    return python_node(
        "m.py", [f"IN:{source}"], [f"OUT:{output}"], name=name, more=LOOPBACK.replace(":loopback", f":loop_{name}")
    )


def test_generator_fed_by_a_generator_is_a_warning() -> None:
    nodes = (
        generator("a", "in", "x"),
        python_node("m.py", ["IN:x"], ["OUT:y"], name="plain"),
        generator("b", "y", "out"),
    )
    (problem,) = check_nodes(*nodes)
    assert problem.severity == "warning"
    assert problem.message.startswith('node "b" has a LOOPBACK and is fed by "a"')
    assert "RESOURCE_EXHAUSTED" in problem.message
    assert graph_text(*nodes).splitlines()[(problem.line or 0) - 1].strip() == 'input_stream: "IN:y"'


@pytest.mark.parametrize("other", ["in", "z"])
def test_waiting_for_generators_of_different_lengths_is_a_warning(other: str) -> None:
    nodes = [generator("a", "in", "x"), *([generator("b", "in", "z")] if other == "z" else [])]
    (problem,) = check_nodes(*nodes, python_node("m.py", ["A:x", f"B:{other}"], name="join"))
    assert problem.severity == "warning"
    assert problem.message.startswith('node "join" synchronizes inputs, and "a"')
    assert not check_nodes(*nodes, python_node("m.py", ["A:x", f"B:{other}"], name="join", more=IMMEDIATE))


def test_one_generator_and_plain_nodes_have_no_problem() -> None:
    first = generator("a", "in", "x").replace(
        'output_stream: "OUT:x"', 'output_stream: "OUT:x"\n  output_stream: "MORE:y"'
    )
    plain = python_node("m.py", ["IN:y"], ["OUT:z"], name="plain")
    assert not check_nodes(first, plain, python_node("m.py", ["A:x", "B:z"], name="join"))


def test_loopback_of_another_node_is_refused() -> None:
    crossed = generator("a", "in", "x").replace('output_stream: "LOOPBACK:loop_a"', 'output_stream: "LOOPBACK:loop_b"')
    other = generator("b", "in", "out").replace('output_stream: "LOOPBACK:loop_b"', 'output_stream: "LOOPBACK:loop_a"')
    found = [each for each in check_nodes(crossed, other) if "would stop after its first value" in each.message]
    assert [(each.expected, each.found) for each in found] == [
        ("LOOPBACK:loop_b", "LOOPBACK:loop_a"),
        ("LOOPBACK:loop_a", "LOOPBACK:loop_b"),
    ]
