from __future__ import annotations

from pathlib import Path

import pytest

from ovmstrio.graphs.validate import GraphValidation, examine_graph, validate_graph
from tests.support.graphs import LOOPBACK, graph_text, python_node


def examine(folder: Path, text: str) -> GraphValidation:
    (folder / "model.py").write_text("raise RuntimeError('user code is not run')")
    path = folder / "graph.pbtxt"
    path.write_text(text)
    return validate_graph(path)


def test_valid_graph_has_no_problem(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "own.py").touch()
    nodes = python_node("model.py", more=LOOPBACK), python_node("code\\\\own.py", outputs=["OUT:other"], name="own")
    examined = examine(tmp_path, graph_text(*nodes))
    assert examined.problems == ()
    assert examined.config is not None
    assert [node.name for node in examined.config.nodes] == ["node", "own"]


def test_unknown_calculator_is_an_error_with_a_suggestion(tmp_path: Path) -> None:
    text = graph_text(python_node("model.py")).replace('PythonExecutorCalculator"', 'PythonExecutorCalculater"')
    (problem,) = examine(tmp_path, text).problems
    assert problem.message.startswith(
        'Failed to initialize mediapipe graph - NOT_FOUND: Unable to find Calculator "PythonExecutorCalculater"'
    )
    assert problem.suggestion == "did you mean 'PythonExecutorCalculator'?"


def test_missing_handler_is_an_error_with_line_and_suggestion(tmp_path: Path) -> None:
    text = graph_text(python_node("models.py"))
    (problem,) = examine(tmp_path, text).problems
    assert problem.message.startswith("The Python Node file path does not exist - ")
    assert problem.line == text[: text.index("handler_path")].count("\n") + 1
    assert (problem.found, problem.suggestion) == (str(tmp_path / "models.py"), "did you mean 'model.py'?")


def test_problems_of_syntax_contracts_and_wiring_are_reported_together(tmp_path: Path) -> None:
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


@pytest.mark.parametrize(("content", "text"), [(None, "File not found or cannot open - "), (b"\xff\xfe", "not UTF-8")])
def test_unreadable_file_is_an_error(tmp_path: Path, content: bytes | None, text: str) -> None:
    path = tmp_path / "graph.pbtxt"
    if content is not None:
        path.write_bytes(content)
    examined = validate_graph(path)
    assert examined.config is None
    assert text in examined.errors[0].message


def test_python_nodes_need_unique_names_and_options(tmp_path: Path) -> None:
    nameless = python_node("model.py", ["IN:in"], ["OUT:b"]).replace('name: "node"', "")
    optionless = python_node("model.py", ["IN:in"], ["OUT:c"], name="c").partition("node_options")[0] + "}"
    nodes = [python_node("model.py"), python_node("model.py", ["IN:in"], ["OUT:a"]), nameless, optionless]
    assert [problem.message.partition(" - ")[0] for problem in examine(tmp_path, graph_text(*nodes)).problems] == [
        "The Python Node name is already present in nodes list",
        "The Python Node is missing name definition",
        "The Python Node is missing options definition",
    ]


CLASS = "class OvmsPythonModel:\n    def execute(self, inputs):\n"


@pytest.mark.parametrize(
    ("source", "is_wrong"),
    [
        (f"{CLASS}        yield []\n", True),
        (f"{CLASS}        for value in inputs:\n            yield from [value]\n", True),
        (f"{CLASS}        return []\n        yield\n", True),
        ("class OvmsPythonModel:\n    async def execute(self, inputs):\n        yield []\n", True),
        (
            "class Base:\n    def execute(self, inputs):\n        yield []\nclass OvmsPythonModel(Base):\n    pass\n",
            True,
        ),
        (f"{CLASS}        return []\n    def other(self):\n        yield 1\n", False),
        (f"{CLASS}        def inner():\n            yield 1\n        return list(inner())\n", False),
        (f"{CLASS}        return list(each for each in inputs)\n", False),
        (f"def other():\n    yield 1\n{CLASS}        return list(other())\n", False),
        ("no python", False),
    ],
)
def test_a_node_that_yields_needs_a_loopback(tmp_path: Path, source: str, is_wrong: bool) -> None:
    (tmp_path / "model.py").write_text(source)
    path = tmp_path / "graph.pbtxt"
    for more, wrong in (("", is_wrong), (LOOPBACK, False)):
        path.write_text(graph_text(python_node("model.py", more=more)))
        problems = examine_graph(path).errors
        texts = ['execute of node "node" yields, but LOOPBACK is not defined in the node'] if wrong else []
        assert [problem.message for problem in problems] == texts
        assert all("LOOPBACK:loopback" in problem.suggestion for problem in problems)
