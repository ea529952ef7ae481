from __future__ import annotations

import pytest

from ovmstrio.core.errors import Problem
from ovmstrio.runtimes.graphs.config.graph_config import ChatRoles, GraphConfig
from ovmstrio.runtimes.graphs.config.graph_file import examine_text
from tests.support.graphs import LOOPBACK, graph_text, python_node

FILE = "graph.pbtxt"
PROMPT = ["OVMS_PY_TENSOR:prompt"]
ANSWER = ["OVMS_PY_TENSOR:completion", "OVMS_PY_TENSOR_END:end_signal"]


def _graph(comment: str = "", inputs: list[str] = PROMPT, outputs: list[str] = ANSWER, more: str = LOOPBACK) -> str:
    ports = [[f"P{number}:{each.rpartition(':')[2]}" for number, each in enumerate(all_)] for all_ in (inputs, outputs)]
    node = python_node("handler.py", *ports, more=more)
    return graph_text(f"{comment}\n", node, inputs=inputs, outputs=outputs)


def _roles(text: str) -> ChatRoles | None:
    reading = examine_text(text, FILE)
    assert [each for each in reading.problems if each.severity == "error"] == []
    assert isinstance(reading.config, GraphConfig)
    return reading.config.chat


def _problem(text: str) -> Problem:
    (problem,) = examine_text(text, FILE).problems
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
        ("promt=prompt", ["'promt' is no role", "did you mean 'prompt'?"]),
        ("prompt=completion", ["prompt: the graph has no input 'completion'", "input_stream has: prompt"]),
        ("text", ["no role=name", "text=completion", "found text"]),
        ("text=completion text=end_signal", ["text is given twice"]),
        ("text=completion end=completion", ["'completion' is text already"]),
        ("end=completion usage=end_signal", ["no output is left for the text"]),
    ],
)
def test_invalid_comment_is_reported_with_line_and_suggestion(comment: str, words: list[str]) -> None:
    problem = _problem(_graph(f"\n# OVMSTRIO_CHAT: {comment}"))
    assert (problem.severity, problem.file, problem.line) == ("error", FILE, 5)
    for word in words:
        assert word in str(problem)


def test_input_without_a_role_is_reported() -> None:
    problem = _problem(_graph("# OVMSTRIO_CHAT: prompt=a", inputs=["OVMS_PY_TENSOR:a", "OVMS_PY_TENSOR_B:b"]))
    assert "a chat gives nothing to the input 'b'" in str(problem)


def test_stream_of_other_tensors_has_no_role() -> None:
    problem = _problem(_graph("# OVMSTRIO_CHAT: text=completion", outputs=["OVTENSOR:completion"]))
    assert "carries no text" in str(problem)
    assert problem.expected == "OVMS_PY_TENSOR:completion"


def test_second_and_misspelt_comments_are_reported() -> None:
    text = _graph("# OVMSTRIO_CHAT: end=end_signal\n# OVMSTRIO_CHT: text=x\n# OVMSTRIO_CHAT: text=completion")
    misspelt, second = examine_text(text, FILE).problems
    assert (misspelt.severity, misspelt.line, misspelt.suggestion) == ("warning", 5, "did you mean 'OVMSTRIO_CHAT'?")
    assert (second.severity, second.line, second.suggestion) == ("error", 6, "remove it; line 4 has one")
