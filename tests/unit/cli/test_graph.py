from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from tests.support.commands import run_command
from tests.support.graphs import LOOPBACK, graph_text, python_node

run = partial(run_command, "graph")


@pytest.fixture(autouse=True)
def _handler(command_folder: Path) -> None:
    (command_folder / "model.py").touch()


def write(text: str = "") -> None:
    """Write the graph, a good one unless another is given."""
    Path("graph.pbtxt").write_text(text or graph_text(python_node("model.py", more=LOOPBACK)))


def test_a_good_graph_is_ok() -> None:
    """The file or its folder may be named."""
    write()
    for path in (".", "graph.pbtxt"):
        result = run("check", path)
        assert (result.exit_code, result.stdout) == (0, "ok: 1 node, no problem found\n")


def test_every_problem_has_line_and_hint() -> None:
    """All are told, and the exit code is 1."""
    write(graph_text(python_node("modle.py", ["IN:in", "MORE:outs"]), outputs=["OVMS_PY_TENSOR:ot"]))
    result = run("check", ".")
    assert result.exit_code == 1
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert [line for line in lines if line.startswith("error ")] == [
        "error graph.pbtxt:2 output_stream[0]",
        "error graph.pbtxt:8 node[0].input_stream[1]",
        "error graph.pbtxt:13 node[0].node_options[0]",
    ]
    assert [line for line in lines if line.startswith("hint")] == [
        "hint did you mean 'out'?",
        "hint did you mean 'out'?",
        "hint did you mean 'model.py'?",
    ]
    assert lines[-1] == "not ok: 3 errors and 0 warnings in 1 file"


@pytest.mark.parametrize("command", ["check", "show"])
def test_a_path_without_graph_is_a_wrong_command_line(command: str) -> None:
    """The exit code is that of usage errors."""
    assert run(command, "nowhere").exit_code == 64


def test_the_terminal_shows_nodes_and_what_connects_them() -> None:
    """Tags, the policy and the back edge are there."""
    write()
    result = run("show", ".")
    assert result.exit_code == 0
    for text in (
        "PythonExecutorCalculator",
        "SyncSet {LOOPBACK:0}",
        "← IN:in from in",
        "← LOOPBACK:loopback from node  ↺ back edge",
        "→ OUT:out to out",
    ):
        assert text in result.stdout
    titles = [line[3:].split()[0] for line in result.stdout.splitlines() if line.startswith("╭─ ")]
    assert titles == ["in", "node", "out"]


@pytest.mark.parametrize(("picture", "start"), [("text", "╭─ in"), ("mermaid", "flowchart TB"), ("svg", "<svg ")])
def test_pictures_can_be_written_to_files(picture: str, start: str) -> None:
    """Nothing goes to standard output then."""
    write()
    result = run("show", "graph.pbtxt", "--format", picture, "--output", "picture")
    assert (result.exit_code, result.stdout) == (0, "")
    assert Path("picture").read_text().startswith(start)


def test_a_picture_that_cannot_be_written() -> None:
    """The reason is told."""
    write()
    result = run("show", ".", "--output", "none/picture")
    assert result.exit_code == 1
    assert "No such file or directory" in result.stderr


def test_a_graph_with_errors_is_still_shown() -> None:
    """How to see them is told beside the picture."""
    write(graph_text(python_node("none.py")))
    result = run("show", ".", "--format", "mermaid")
    assert result.exit_code == 0
    assert 'n0["node<br/>PythonExecutorCalculator"]' in result.stdout
    assert "ovms graph check" in result.stderr


def test_a_file_that_cannot_be_read_is_not_shown() -> None:
    """Its problem is told instead."""
    write("node {")
    result = run("show", ".")
    assert result.exit_code == 1
    assert "is never closed" in result.stdout
