"""Which streams of a graph carry a chat, by the comment in its file or without one."""

from __future__ import annotations

import pytest

from ovmstrio.core.errors import Problem
from ovmstrio.runtimes.graphs.config.graph_config import ChatRoles, GraphConfig
from ovmstrio.runtimes.graphs.config.graph_file import examine_text
from tests.support.graphs import LOOPBACK, graph_text, python_node

FILE = "graph.pbtxt"
PROMPT = ["OVMS_PY_TENSOR:prompt"]
ANSWER = ["OVMS_PY_TENSOR:completion", "OVMS_PY_TENSOR_END:end_signal"]


def _text(comment: str = "", inputs: list[str] = PROMPT, outputs: list[str] = ANSWER, more: str = LOOPBACK) -> str:
    ports = [[f"P{number}:{each.rpartition(':')[2]}" for number, each in enumerate(all_)] for all_ in (inputs, outputs)]
    node = python_node("handler.py", *ports, more=more)
    return graph_text(f"{comment}\n", node, inputs=inputs, outputs=outputs)


def _chat(text: str) -> ChatRoles | None:
    reading = examine_text(text, FILE)
    assert [each for each in reading.problems if each.severity == "error"] == []
    assert isinstance(reading.config, GraphConfig)
    return reading.config.chat


def _problem(text: str) -> Problem:
    (problem,) = examine_text(text, FILE).problems
    return problem


def test_a_generative_graph_of_one_text_in_and_one_out_answers_chats_without_a_word() -> None:
    """The second output is the end."""
    assert _chat(_text()) == ChatRoles(prompt="prompt", text="completion", end="end_signal")
    assert _chat(_text(outputs=ANSWER[:1])) == ChatRoles(prompt="prompt", text="completion")


@pytest.mark.parametrize(
    "text",
    [
        _text(more=""),
        _text(inputs=[*PROMPT, "OVMS_PY_TENSOR_B:b"]),
        _text(outputs=[*ANSWER, "OVMS_PY_TENSOR_C:c"]),
        _text(inputs=["prompt"]),
        _text(outputs=["completion"]),
    ],
    ids=["no generator", "two inputs", "three outputs", "an input of OpenVINO's", "an output of OpenVINO's"],
)
def test_what_may_be_something_else_answers_no_chats(text: str) -> None:
    """Nobody wonders why a graph for pictures is among the models of a chat."""
    assert _chat(text) is None


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
def test_the_comment_names_the_streams_and_what_it_leaves_out_is_clear(
    comment: str, roles: ChatRoles, more: str
) -> None:
    """Of one input it need not say anything, nor of the first output that is nothing else."""
    assert _chat(_text(f"# OVMSTRIO_CHAT: {comment}", more=more)) == roles


def test_a_graph_may_take_both_the_last_message_and_all_of_them() -> None:
    """Each input has a role."""
    text = _text("#OVMSTRIO_CHAT:prompt=a messages=b", inputs=["OVMS_PY_TENSOR:a", "OVMS_PY_TENSOR_B:b"])
    assert _chat(text) == ChatRoles("completion", "a", "b")


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
def test_a_comment_that_cannot_be_used_is_told_with_its_line_and_the_way_out(comment: str, words: list[str]) -> None:
    """The graph is not loaded."""
    problem = _problem(_text(f"\n# OVMSTRIO_CHAT: {comment}"))
    assert (problem.severity, problem.file, problem.line) == ("error", FILE, 5)
    for word in words:
        assert word in str(problem)


def test_an_input_that_a_chat_gives_nothing_to_is_told() -> None:
    """It would wait for ever."""
    problem = _problem(_text("# OVMSTRIO_CHAT: prompt=a", inputs=["OVMS_PY_TENSOR:a", "OVMS_PY_TENSOR_B:b"]))
    assert "a chat gives nothing to the input 'b'" in str(problem)


def test_a_stream_that_carries_something_else_than_python_tensors_has_no_role() -> None:
    """Its tag says so."""
    problem = _problem(_text("# OVMSTRIO_CHAT: text=completion", outputs=["OVTENSOR:completion"]))
    assert "carries no text" in str(problem)
    assert problem.expected == "OVMS_PY_TENSOR:completion"


def test_a_second_comment_and_one_that_is_misspelt_are_told() -> None:
    """The first is an error, the other a warning."""
    text = _text("# OVMSTRIO_CHAT: end=end_signal\n# OVMSTRIO_CHT: text=x\n# OVMSTRIO_CHAT: text=completion")
    misspelt, second = examine_text(text, FILE).problems
    assert (misspelt.severity, misspelt.line, misspelt.suggestion) == ("warning", 5, "did you mean 'OVMSTRIO_CHAT'?")
    assert (second.severity, second.line, second.suggestion) == ("error", 6, "remove it; line 4 has one")
