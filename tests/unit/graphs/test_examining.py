from __future__ import annotations

from pathlib import Path

from ovmstrio.core.errors import Problem
from ovmstrio.runtimes.graphs.examining import Examination, examine_graph
from tests.support.graphs import LOOPBACK, graph_text, python_node


def examine(folder: Path, text: str) -> Examination:
    """Examine a graph beside a handler ``model.py``."""
    (folder / "model.py").write_text("raise RuntimeError('user code is not run')")
    path = folder / "graph.pbtxt"
    path.write_text(text)
    return examine_graph(path)


def only(folder: Path, text: str) -> Problem:
    """Examine a graph in which one thing is wrong."""
    (problem,) = examine(folder, text).problems
    return problem


def test_a_good_graph_has_no_problem(tmp_path: Path) -> None:
    """User code is not run."""
    examined = examine(tmp_path, graph_text(python_node("model.py")))
    assert examined.problems == ()
    assert examined.config is not None
    assert [node.name for node in examined.config.nodes] == ["node"]


def test_a_loop_has_no_problem(tmp_path: Path) -> None:
    """Back edge and sync set are there."""
    assert examine(tmp_path, graph_text(python_node("model.py", more=LOOPBACK))).problems == ()


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    """It has OVMS's text."""
    examined = examine_graph(tmp_path / "graph.pbtxt")
    assert examined.config is None
    assert examined.errors[0].message.startswith("File not found or cannot open")


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    """Bytes that are no UTF-8 are a problem of the file."""
    path = tmp_path / "graph.pbtxt"
    path.write_bytes(b"\xff\xfe")
    assert "UTF-8" in examine_graph(path).problems[0].message


def test_an_unknown_calculator_is_named(tmp_path: Path) -> None:
    """One that is close is suggested."""
    text = graph_text(python_node("model.py")).replace('PythonExecutorCalculator"', 'PythonExecutorCalculater"')
    problem = only(tmp_path, text)
    assert problem.message.startswith(
        'Failed to initialize mediapipe graph - NOT_FOUND: Unable to find Calculator "PythonExecutorCalculater"'
    )
    assert problem.suggestion == "did you mean 'PythonExecutorCalculator'?"


def test_a_handler_that_is_not_there(tmp_path: Path) -> None:
    """The line is that of handler_path, and a file that is close is suggested."""
    text = graph_text(python_node("models.py"))
    problem = only(tmp_path, text)
    assert problem.message.startswith("The Python Node file path does not exist - ")
    assert problem.line == text[: text.index("handler_path")].count("\n") + 1
    assert (problem.found, problem.suggestion) == (str(tmp_path / "models.py"), "did you mean 'model.py'?")


def test_back_slashes_part_folders(tmp_path: Path) -> None:
    """As in OVMS."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "own.py").touch()
    assert examine(tmp_path, graph_text(python_node("code\\\\own.py"))).problems == ()


def test_python_nodes_have_options_and_names_of_their_own(tmp_path: Path) -> None:
    """Everything is told at once, each with its text."""
    nameless = python_node("model.py", ["IN:in"], ["OUT:b"]).replace('name: "node"', "")
    optionless = python_node("model.py", ["IN:in"], ["OUT:c"], name="c").replace("node_options", "graph_options")
    optionless = optionless[: optionless.index("graph_options")] + "}"
    nodes = [python_node("model.py"), python_node("model.py", ["IN:in"], ["OUT:a"]), nameless, optionless]
    examined = examine(tmp_path, graph_text(*nodes))
    assert [problem.message.partition(" - ")[0] for problem in examined.problems] == [
        "The Python Node name is already present in nodes list",
        "The Python Node is missing name definition",
        "The Python Node is missing options definition",
    ]


def test_contracts_and_wiring_are_told_with_the_rest(tmp_path: Path) -> None:
    """A syntax that is right lets everything else be checked, by line."""
    node = python_node("none.py", ["IN:in", "MORE:1:x"], more="max_in_flight: many")
    examined = examine(tmp_path, graph_text(node, outputs=["OVMS_PY_TENSOR:ot"]))
    lines = [problem.line or 0 for problem in examined.problems]
    assert lines == sorted(lines)
    bases = {problem.message.partition(" - ")[0] for problem in examined.errors}
    assert bases == {
        "Failed to add mediapipe graph output stream",
        "Failed to initialize mediapipe graph",
        "Failed to read protobuf graph configuration file",
    }


def test_a_tag_of_the_wrong_type_is_found(tmp_path: Path) -> None:
    """A Python node's stream needs its tag at the graph's border."""
    problem = only(tmp_path, graph_text(python_node("model.py"), outputs=["out"]))
    assert problem.suggestion == 'write output_stream: "OVMS_PY_TENSOR:out"'


def test_an_index_that_python_nodes_refuse(tmp_path: Path) -> None:
    """Only index 0 loads."""
    problem = only(tmp_path, graph_text(python_node("model.py", ["IN:0:in", "IN:1:in"])))
    assert "was not expected" in problem.message


def test_a_loop_on_one_side_only(tmp_path: Path) -> None:
    """LOOPBACK is an input and an output."""
    assert "If LOOPBACK is used" in only(
        tmp_path, graph_text(python_node("model.py", outputs=["OUT:out", "LOOPBACK:x"]))
    ).message  # fmt: skip
