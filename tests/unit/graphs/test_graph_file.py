from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.graphs.graph_config import ChatRoles, GraphConfig, NodeConfig, Port
from ovmstrio.graphs.graph_file import parse_graph_text
from tests.support.graphs import LOOPBACK, graph_text, load_graph_config, python_node

FILE = "graph.pbtxt"
OUTPUTS = "Mediapipe unexpected output stream packets name"
STRUCT = "[type.googleapis.com/google.protobuf.Struct]"
INITIALIZE = "Failed to initialize mediapipe graph"
OPTIONS = "mediapipe.PythonExecutorCalculatorOptions"

ONE_NODE = """
node {
  name: "python_node"
  calculator: "PythonExecutorCalculator"
  input_side_packet: "PYTHON_NODE_RESOURCES:py"
  input_stream: "B:b"
  input_stream: "A:a"
  input_stream: "C:c"
  output_stream: "OUTPUT:output"
  node_options: {
    [type.googleapis.com / mediapipe.PythonExecutorCalculatorOptions]: {
      handler_path: "/ovms/workspace/model.py"
    }
  }
}
"""

LOOP = """
node {
  name: "python_node" calculator: "PythonExecutorCalculator" input_side_packet: "PYTHON_NODE_RESOURCES:py"
  input_stream: "INPUT:input" input_stream: "LOOPBACK:loopback"
  input_stream_info: { tag_index: 'LOOPBACK:0', back_edge: true }
  input_stream_handler {
    input_stream_handler: "SyncSetInputStreamHandler",
    options { [mediapipe.SyncSetInputStreamHandlerOptions.ext] { sync_set {
      tag_index: "LOOPBACK:0"
    } } }
  }
  output_stream: "OUTPUT:output" output_stream: "LOOPBACK:loopback"
  node_options: {
    [type.googleapis.com / mediapipe.PythonExecutorCalculatorOptions]: { handler_path: "/ovms/workspace/model.py" }
  }
}
"""

CONVERTERS = """
node {
  calculator: "PyTensorOvTensorConverterCalculator"
  input_stream: "OVMS_PY_TENSOR:preprocessed_py" output_stream: "OVTENSOR:preprocessed_ov"
}
node {
  calculator: "OpenVINOInferenceCalculator"
  input_side_packet: "SESSION:session" # inference session
  input_stream: "OVTENSOR:preprocessed_ov" output_stream: "OVTENSOR:result_ov"
}
node {
  calculator: "PyTensorOvTensorConverterCalculator"
  input_stream: "OVTENSOR:result_ov" output_stream: "OVMS_PY_TENSOR:result_py"
  node_options: {
    [type.googleapis.com/mediapipe.PyTensorOvTensorConverterCalculatorOptions]: {
      tag_to_output_tensor_names { key: "OVMS_PY_TENSOR" value: "result_py" }
    }
  }
}
"""


def read_node(text: str) -> NodeConfig:
    (node,) = load_graph_config(text, FILE).nodes
    return node


def problem_of(text: str) -> Problem:
    with pytest.raises(ConfigError) as error:
        load_graph_config(text, FILE)
    (problem,) = error.value.problems
    assert problem.file == FILE
    return problem


def in_node(text: str) -> str:
    return f"node {{\n{text}\n}}"


def test_streams_have_file_order_lines_and_sorted_tags() -> None:
    node = read_node(ONE_NODE)
    assert [(str(ref.port), ref.name, ref.line) for ref in node.inputs] == [("B", "b", 6), ("A", "a", 7), ("C", "c", 8)]
    assert [ref.name for ref in node.sorted_inputs] == ["a", "b", "c"]
    assert (node.name, node.canonical_name, node.line, node.options_line) == ("python_node", "python_node", 2, 12)
    assert [(str(ref.port), ref.name) for ref in node.side_inputs] == [("PYTHON_NODE_RESOURCES", "py")]


def test_a_byte_order_mark_is_ignored() -> None:
    text = graph_text(python_node("handler.py"))
    assert load_graph_config(f"\ufeff{text}", FILE) == load_graph_config(text, FILE)


@pytest.mark.parametrize(
    "head",
    [f"[type.googleapis.com / {OPTIONS}]:", f"[type.googleapis.com/{OPTIONS}]:", f"[ type.googleapis.com/{OPTIONS} ]"],
)
def test_blanks_and_colon_of_an_option_type_are_optional(head: str) -> None:
    (options,) = read_node(in_node(f"node_options: {{ {head} {{ handler_path: \"a\" 'b' }} }}")).node_options
    assert (options.DESCRIPTOR.full_name, options.handler_path) == (OPTIONS, "ab")


def test_extensions_are_separate_options() -> None:
    node = read_node(in_node(f'options {{ [{OPTIONS}.ext] {{ handler_path: "x" }} }}'))
    assert node.node_options == ()
    assert [options.handler_path for options in node.options] == ["x"]


def test_struct_options_are_read() -> None:
    inner = 'fields { key: "size" value { number_value: 2 } }'
    (options,) = read_node(
        in_node(f"node_options {{ [type.googleapis.com/google.protobuf.Struct] {{ {inner} }} }}")
    ).node_options
    assert options["size"] == 2


def test_loop_has_back_edge_and_sync_sets() -> None:
    node = read_node(LOOP)
    assert node.back_edges == {Port("LOOPBACK", 0)}
    assert node.policy.handler == "SyncSetInputStreamHandler"
    assert [list(each.tag_index) for each in node.policy.options.sync_set] == [["LOOPBACK:0"]]
    assert (node.policy.line, node.policy.tag_lines) == (7, (9,))
    policy = read_node(in_node('input_stream_handler { input_stream_handler: "ImmediateInputStreamHandler", }')).policy
    assert (policy.handler, policy.options, policy.line) == ("ImmediateInputStreamHandler", None, 2)


def test_nodes_without_names_are_numbered() -> None:
    nodes = load_graph_config(CONVERTERS, FILE).nodes
    assert [node.canonical_name for node in nodes] == [
        "PyTensorOvTensorConverterCalculator_1",
        "OpenVINOInferenceCalculator",
        "PyTensorOvTensorConverterCalculator_2",
    ]
    assert dict(nodes[2].node_options[0].tag_to_output_tensor_names) == {"OVMS_PY_TENSOR": "result_py"}


def test_numbered_names_are_unique() -> None:
    text = 'node: [\n { name: "a" },\n { name: "a_1" }\n]\nnode { name: "a" }'
    assert [node.line for node in load_graph_config(text, FILE).nodes] == [2, 3, 5]
    assert [node.canonical_name for node in load_graph_config(text, FILE).nodes] == ["a_2", "a_1", "a_3"]


def test_settings_of_the_graph_have_defaults() -> None:
    text = """
    max_queue_size: -1 num_threads: 0x10 report_deadlock: t
    input_stream: ["a", 'TAG:b', "TAG:1:c"]; output_stream: "d"
    input_stream_handler < input_stream_handler: "BarrierInputStreamHandler" >
    node { max_in_flight: 4 input_stream: "a" input_stream: "d" }
    """
    graph = load_graph_config(text, FILE)
    assert (graph.max_queue_size, graph.num_threads, graph.report_deadlock) == (-1, 16, True)
    assert [ref.port for ref in graph.inputs] == [("", 0), ("TAG", 0), ("TAG", 1)]
    assert graph.nodes[0].policy.handler == "BarrierInputStreamHandler"
    assert graph.nodes[0].max_in_flight == 4
    assert [ref.port for ref in graph.nodes[0].inputs] == [("", 0), ("", 1)]
    assert load_graph_config('type: "x"', FILE).max_queue_size == 100


def test_fields_without_effect_are_accepted() -> None:
    text = """
    package: "p" type: "T" profiler_config { trace_enabled: true } options { } graph_options { }
    executor { type: "ThreadPoolExecutor" options { [mediapipe.ThreadPoolExecutorOptions.ext] { num_threads: 4
      require_processor_performance: LOW } } }
    executor { name: "own" type: "ApplicationThreadExecutor" }
    node { source_layer: 1 buffer_size_hint: 2 option_value: "a:b" executor: "own" external_input: "TAG:old"
           output_stream_handler { output_stream_handler: "InOrderOutputStreamHandler" } }
    """
    (node,) = load_graph_config(text, FILE).nodes
    assert [(ref.port.tag, ref.name) for ref in node.side_inputs] == [("TAG", "old")]
    assert node.executor == "own"


SCHEMA = {
    "an unknown field": ("input_streem: 'a'", "did you mean 'input_stream'?"),
    "an unknown type": (
        "node_options { [type.googleapis.com/mediapipe.PythonExecutorCalculatorOption] { } }",
        "did you mean 'mediapipe.PythonExecutorCalculatorOptions'?",
    ),
    "an unknown extension": (
        "options { [mediapipe.PythonExecutorCalculatorOptions] { } }",
        "did you mean 'mediapipe.PythonExecutorCalculatorOptions.ext'?",
    ),
    "another prefix": (f"node_options {{ [example.com/{OPTIONS}] {{ }} }}", f"write [type.googleapis.com/{OPTIONS}]"),
    "a missing field": (f"node_options {{ [type.googleapis.com/{OPTIONS}] {{ }} }}", 'add handler_path: "..."'),
    "a missing field of an extension": (f"options {{ [{OPTIONS}.ext] {{ }} }}", 'add handler_path: "..."'),
    "text without quotes": ("name: node", 'write "node"'),
    "a number in quotes": ("max_in_flight: '2'", "write 2 without quotes"),
    "no number": ("max_in_flight: 2.5", ""),
    "too large a number": ("max_in_flight: 2147483648", ""),
    "no truth value": ("input_stream_info { tag_index: 'A' back_edge: maybe }", ""),
    "a field given twice": ("name: 'a' name: 'b'", "remove one; also in line 2"),
    "a list for one value": ("name: ['a']", "write one value without [ and ]"),
    "a value for a message": ("options: 3", ""),
    "a message for a value": ("name { }", ""),
    "two messages in one Any": (
        f"node_options {{ {STRUCT} {{ }} {STRUCT} {{ }} }}",
        "use separate braces",
    ),
}


@pytest.mark.parametrize(("line", "fix"), SCHEMA.values(), ids=SCHEMA)
def test_invalid_field_is_reported_with_its_line(line: str, fix: str) -> None:
    problem = problem_of(in_node(line))
    assert problem.message.startswith("Failed to read protobuf graph configuration file - ")
    assert (problem.line, problem.suggestion) == (2, fix)
    assert problem.path.startswith("node[0].")


SYNTAX = {
    "an open brace": ('\nnode {\n  name: "a"\n', 2, "add a }"),
    "a brace too many": ("node { }\n}\n", 2, ""),
    "an open string": ('node {\n  name: "a\n}', 2, 'close it with "'),
    "a strange sign": ("node {\n  name = 'a' }", 2, "remove it, or put the value in quotes"),
    "a value missing": ("node {\n  name:\n}", 3, ""),
    "a colon missing": ("node {\n  name 'a' }", 2, ""),
    "an open bracket": ("node { options {\n [mediapipe. { } } }", 2, ""),
    "an open list": ("input_stream: ['a'\n'b' c]", 2, ""),
    "nothing": ("# only this\n", 1, ""),
    "very deep": ("node {" * 100, 1, ""),
}


@pytest.mark.parametrize(("text", "line", "fix"), SYNTAX.values(), ids=SYNTAX)
def test_syntax_error_is_reported_with_its_line(text: str, line: int, fix: str) -> None:
    problem = problem_of(text)
    assert problem.message.startswith("Failed to read protobuf graph configuration file - ")
    assert (problem.line, problem.suggestion) == (line, fix)


NAMES = {
    "no name": ('input_stream: ""', "Mediapipe unexpected input stream packets name", 1),
    "no name after the tag": ('output_stream: "TAG:"', OUTPUTS, 1),
    "no side packet": ('input_side_packet: ""', "Mediapipe unexpected input side packet stream name", 1),
    "a name twice": ('input_stream: "A:x"\ninput_stream: "B:x"', "Mediapipe unexpected input stream packets name", 2),
    "an output twice": ('output_stream: "A:x"\noutput_stream: "B:x"', OUTPUTS, 2),
    "a tag twice": ('input_stream: "A:x"\ninput_stream: "A:y"', INITIALIZE, 2),
    "a tag twice in a node": (
        'node {\n input_stream: "A:x"\n input_stream: "A:0:y" }', INITIALIZE, 3
    ),
    "a gap": ('node {\n input_stream: "A:0:x"\n input_stream: "A:2:y" }', INITIALIZE, 3),
    "a lower-case tag": ('input_stream: "wrong:REQUEST:in"', INITIALIZE, 1),
    "an index that is none": ('output_stream: "NUMBER:test3:out"', INITIALIZE, 1),
    "a back edge of no input": (
        'node { input_stream: "LOOPBACK:x"\ninput_stream_info { back_edge: true\ntag_index: "LOOPBACK:1" } }',
        INITIALIZE, 3,
    ),
    "a back edge that is no port": (
        'node { input_stream_info { tag_index: "loop" back_edge: true } }', INITIALIZE, 1
    ),
    "options of a type twice": (
        f"node {{ node_options {{ {STRUCT} {{ }} }}\nnode_options {{ {STRUCT} {{ }} }} }}",
        INITIALIZE, 2,
    ),
    "options of bytes that are none": (
        f'node {{ node_options {{ type_url: "type.googleapis.com/{OPTIONS}" value: "\\377" }} }}',
        "Failed to read protobuf graph configuration file", 1,
    ),
    "another output handler": (
        'node {\n output_stream_handler {\n output_stream_handler: "Other" } }', INITIALIZE, 3
    ),
}  # fmt: skip


@pytest.mark.parametrize(("text", "base", "line"), NAMES.values(), ids=NAMES)
def test_invalid_name_or_setting_is_reported_with_its_line(text: str, base: str, line: int) -> None:
    problem = problem_of(text)
    assert problem.message.startswith(f"{base} - ")
    assert problem.line == line


EXECUTORS = {
    "reserved": 'executor { name: "gpu" type: "ThreadPoolExecutor" }',
    "reserved by underscores": 'executor { name: "__x" type: "ApplicationThreadExecutor" }',
    "beside num_threads": "num_threads: 2 executor { }",
    "without type": 'executor { name: "own" }',
    "of an unknown type": 'executor { name: "own" type: "ThreadPool" }',
    "without threads": 'executor { name: "own" type: "ThreadPoolExecutor" }',
    "given twice": "executor { } executor { }",
    "undeclared": 'node { executor: "own" }',
}  # fmt: skip


@pytest.mark.parametrize("text", EXECUTORS.values(), ids=EXECUTORS)
def test_invalid_executors_are_refused(text: str) -> None:
    problem = problem_of(text)
    assert problem.message.startswith("Failed to initialize mediapipe graph - INVALID_ARGUMENT: ")
    assert problem.suggestion


@pytest.mark.parametrize(("value", "size"), [("0", 0), ("1", 1), (" 1 ", 1)])
def test_pool_size_is_read_from_a_comment(value: str, size: int) -> None:
    assert load_graph_config(f'type: "x"\n# OVMS_GRAPH_QUEUE_MAX_SIZE:{value}\n', FILE).pool_size == size


def test_pool_size_is_bounded_by_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    assert load_graph_config('# OVMS_GRAPH_QUEUE_MAX_SIZE: AUTO\ntype: "x"', FILE).pool_size == 3
    reading = parse_graph_text('# OVMS_GRAPH_QUEUE_MAX_SIZE: 9\ntype: "x"', FILE)
    assert reading.config is not None
    assert reading.config.pool_size == 3
    assert [(problem.severity, problem.line) for problem in reading.problems] == [("warning", 1)]
    monkeypatch.setenv("OVMS_GRAPH_QUEUE_OFF", "1")
    assert load_graph_config('# OVMS_GRAPH_QUEUE_MAX_SIZE: AUTO\ntype: "x"', FILE).pool_size == 0


@pytest.mark.parametrize("value", ["-1", "many", ""])
def test_invalid_pool_size_is_an_error(value: str) -> None:
    problem = problem_of(f'type: "x"\n# OVMS_GRAPH_QUEUE_MAX_SIZE: {value}')
    assert (problem.line, problem.expected) == (2, "AUTO or a number from 0")


def test_pool_and_loop_exclude_each_other() -> None:
    assert problem_of(f"# OVMS_GRAPH_QUEUE_MAX_SIZE: 1{LOOP}").line == 1
    assert load_graph_config(f"# OVMS_GRAPH_QUEUE_MAX_SIZE: 0{LOOP}", FILE).pool_size == 0


def test_stream_info_without_back_edge_is_a_warning() -> None:
    reading = parse_graph_text(in_node('input_stream_info { tag_index: "A" }'), FILE)
    assert [(problem.severity, problem.line) for problem in reading.problems] == [("warning", 2)]


def test_all_problems_are_reported_together() -> None:
    text = """# OVMS_GRAPH_QUEUE_MAX_SIZE: x
input_streem: "in"
output_stream: "TAG:Out"
executor { name: "gpu" }
node {
  name: 4
  node_options { [type.googleapis.com/mediapipe.Unknown] { } }
  executor: "none"
}
node { input_stream: "a:b" }
"""
    reading = parse_graph_text(text, FILE)
    assert sorted(problem.line or 0 for problem in reading.problems) == [1, 2, 3, 4, 6, 7, 8, 10]
    assert reading.config is not None
    assert len(reading.doubtful) == 2


@given(st.sampled_from([ONE_NODE, LOOP, CONVERTERS]), st.data())
def test_damaged_file_is_read_or_refused(text: str, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, min(len(text), start + 40)))
    middle = data.draw(
        st.one_of(st.just(text[start:end] * 2), st.text(max_size=4), st.sampled_from(["{", "\\\\x", "[", "1e"]))
    )
    reading = parse_graph_text(text[:start] + middle + text[end:], FILE)
    assert reading.config is not None or reading.problems
    assert all(problem.line for problem in reading.problems)


# Roles of streams in chats

PROMPT = ["OVMS_PY_TENSOR:prompt"]
ANSWER = ["OVMS_PY_TENSOR:completion", "OVMS_PY_TENSOR_END:end_signal"]


def _graph(comment: str = "", inputs: list[str] = PROMPT, outputs: list[str] = ANSWER, more: str = LOOPBACK) -> str:
    ports = [[f"P{number}:{each.rpartition(':')[2]}" for number, each in enumerate(all_)] for all_ in (inputs, outputs)]
    node = python_node("handler.py", *ports, more=more)
    return graph_text(f"{comment}\n", node, inputs=inputs, outputs=outputs)


def _roles(text: str) -> ChatRoles | None:
    reading = parse_graph_text(text, FILE)
    assert [each for each in reading.problems if each.severity == "error"] == []
    assert isinstance(reading.config, GraphConfig)
    return reading.config.chat


def _problem(text: str) -> Problem:
    (problem,) = parse_graph_text(text, FILE).problems
    return problem


def test_generative_graph_of_one_input_answers_chats() -> None:
    assert _roles(_graph()) == ChatRoles(prompt="prompt", text="completion", end="end_signal")
    assert _roles(_graph(outputs=ANSWER[:1])) == ChatRoles(prompt="prompt", text="completion")


@pytest.mark.parametrize(
    "text",
    [
        _graph(more=""),
        _graph(inputs=[*PROMPT, "OVMS_PY_TENSOR_B:b"]),
        _graph(outputs=[*ANSWER, "OVMS_PY_TENSOR_C:c"]),
        _graph(inputs=["prompt"]),
        _graph(outputs=["completion"]),
    ],
    ids=["no generator", "two inputs", "three outputs", "an input of OpenVINO's", "an output of OpenVINO's"],
)
def test_other_graphs_answer_no_chats(text: str) -> None:
    assert _roles(text) is None


@pytest.mark.parametrize(
    ("comment", "roles"),
    [
        ("prompt=prompt text=completion end=end_signal", ChatRoles("completion", "prompt", "", "end_signal")),
        ("", ChatRoles("completion", "prompt")),
        ("messages=prompt usage=end_signal", ChatRoles("completion", "", "prompt", "", "end_signal")),
        ("end=completion", ChatRoles("end_signal", "prompt", "", "completion")),
    ],
)
@pytest.mark.parametrize("more", [LOOPBACK, ""], ids=["generator", "one answer"])
def test_comment_names_roles_and_has_defaults(comment: str, roles: ChatRoles, more: str) -> None:
    assert _roles(_graph(f"# OVMSTRIO_CHAT: {comment}", more=more)) == roles


def test_prompt_and_messages_are_separate_inputs() -> None:
    text = _graph("#OVMSTRIO_CHAT:prompt=a messages=b", inputs=["OVMS_PY_TENSOR:a", "OVMS_PY_TENSOR_B:b"])
    assert _roles(text) == ChatRoles("completion", "a", "b")


@pytest.mark.parametrize(
    ("comment", "words"),
    [
        ("text=completions", ["text: the graph has no output 'completions'", "did you mean 'completion'?"]),
        ("promt=prompt", ["unknown role 'promt'", "did you mean 'prompt'?"]),
        ("prompt=completion", ["prompt: the graph has no input 'completion'", "known: prompt"]),
        ("text", ["expected role=name", "text=completion", "found text"]),
        ("text=completion text=end_signal", ["duplicate role text"]),
        ("text=completion end=completion", ["'completion' already has the role text"]),
        ("end=completion usage=end_signal", ["no output without a role is left for text"]),
    ],
)
def test_invalid_comment_is_reported_with_line_and_suggestion(comment: str, words: list[str]) -> None:
    problem = _problem(_graph(f"\n# OVMSTRIO_CHAT: {comment}"))
    assert (problem.severity, problem.file, problem.line) == ("error", FILE, 5)
    for word in words:
        assert word in str(problem)


def test_input_without_a_role_is_reported() -> None:
    problem = _problem(_graph("# OVMSTRIO_CHAT: prompt=a", inputs=["OVMS_PY_TENSOR:a", "OVMS_PY_TENSOR_B:b"]))
    assert "input 'b' has no role" in str(problem)


def test_stream_of_other_tensors_has_no_role() -> None:
    problem = _problem(_graph("# OVMSTRIO_CHAT: text=completion", outputs=["OVTENSOR:completion"]))
    assert "carries no text" in str(problem)
    assert problem.expected == "OVMS_PY_TENSOR:completion"


def test_second_and_misspelt_comments_are_reported() -> None:
    text = _graph("# OVMSTRIO_CHAT: end=end_signal\n# OVMSTRIO_CHT: text=x\n# OVMSTRIO_CHAT: text=completion")
    misspelt, second = parse_graph_text(text, FILE).problems
    assert (misspelt.severity, misspelt.line, misspelt.suggestion) == ("warning", 5, "did you mean 'OVMSTRIO_CHAT'?")
    assert (second.severity, second.line, second.suggestion) == ("error", 6, "remove it; line 4 has one")
