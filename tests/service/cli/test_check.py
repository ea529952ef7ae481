from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support import ir
from tests.support.commands import CommandResult, run_command
from tests.support.graphs import graph_text, python_node

run = partial(run_command, "check")

pytestmark = pytest.mark.usefixtures("command_folder")

MISTAKES = """{
  "model_config_list": [
    {"config": {"name": "a", "base_path": "models/a",
                "nireqs": 4}},
    {"config": {"name": "b", "base_path": "models/a",
                "shape": "[1,10]",
                "layout": "NHWX"}},
    {"config": {"name": "c", "base_path": "models/c"}},
    {"config": {"name": "d", "base_path": "models/a",
                "plugin_config": {"NUM_STREAM": "2"}}}
  ],
  "monitoring": {"metrics": {"enable": "yes"}}
}
"""


def test_six_mistakes_are_six_located_problems(tmp_path: Path) -> None:
    """Each has its line, path, expectation, finding or suggestion, and the exit code is 1."""
    ir.save(ir.dummy(), tmp_path / "models", "a")
    Path("config.json").write_text(MISTAKES)
    result = run("config.json")
    assert result.exit_code == 1, result.output
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert [line for line in lines if line.startswith("error ")] == [
        "error config.json:4 model_config_list[0].config.nireqs",
        "error config.json:6 model_config_list[1].config.shape",
        "error config.json:7 model_config_list[1].config.layout",
        "error config.json:8 model_config_list[2].config.base_path",
        "error config.json:10 model_config_list[3].config.plugin_config",
        "error config.json:12 monitoring.metrics.enable",
    ]
    assert "hint did you mean 'nireq'?" in lines
    assert "hint write (1,10)" in lines
    assert "hint did you mean NUM_STREAMS?" in lines
    assert "expected true or false" in lines
    assert 'found "yes"' in lines
    assert lines[-1] == "not ok: 6 errors and 0 warnings in 1 file; 1 version loaded"


def test_a_good_configuration_is_ok(tmp_path: Path) -> None:
    """What loads is listed, and the exit code is 0."""
    base = ir.save(ir.dummy(), tmp_path, "a", 3)
    result = run(base.name)
    assert result.exit_code == 0, result.output
    assert result.stdout.split("\n") == ["loads  a version 3", "ok: 1 version loaded, no problem found", ""]


def test_warnings_alone_are_no_failure(tmp_path: Path) -> None:
    """They are shown, and the exit code is 0."""
    (ir.save(ir.dummy(), tmp_path, "a") / "drafts").mkdir()
    result = run("a")
    assert result.exit_code == 0, result.output
    assert 'warning  directory "drafts" is no version' in result.stdout
    assert "ok: 0 errors and 1 warning in 1 file; 1 version loaded" in result.stdout


def test_json_has_all_facts() -> None:
    """Standard output holds nothing else."""
    Path("config.json").write_text(
        '{"model_config_list": [\n{"config": {"name": "b", "base_path": "models/b",\n"shape": "[1,10]"}}]}'
    )
    result = run("config.json", "--json")
    answer = json.loads(result.stdout)
    assert (result.exit_code, answer["ok"], answer["errors"], answer["warnings"]) == (1, False, 1, 0)
    assert answer["problems"] == [
        {
            "severity": "error",
            "file": "config.json",
            "line": 3,
            "path": "model_config_list[0].config.shape",
            "message": "the value cannot be used",
            "expected": "dimensions in parentheses such as (1,3,224,224), "
            "each a size, -1 for any or a range 2:8; or auto",
            "found": '"[1,10]"',
            "suggestion": "write (1,10)",
        }
    ]


def test_a_path_that_does_not_exist_is_one_clear_line() -> None:
    """There is nothing to check, which is a failure."""
    result = run("nowhere.json")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr == (
        "error: nowhere.json: no such file or directory; "
        "give a config.json or nucleus.yaml, or the directory of a model, graph or handler\n"
    )


def test_a_model_without_versions_is_a_warning_that_strict_makes_an_error(tmp_path: Path) -> None:
    """It will never be ready as it is; whoever asks for the exit code alone can have it told by that."""
    (tmp_path / "empty").mkdir()
    Path("config.json").write_text('{"model_config_list": [{"config": {"name": "e", "base_path": "empty"}}]}')
    result = run("config.json")
    assert (result.exit_code, "warning  no version directory found" in result.stdout) == (0, True), result.output
    result = run("config.json", "--strict")
    assert (result.exit_code, "error  no version directory found" in result.stdout) == (1, True), result.output
    assert run("config.json", "--strict", "--json").exit_code == 1


PIPELINE = """{
  "model_config_list": [{"config": {"name": "dummy", "base_path": "models/dummy"}}],
  "pipeline_config_list": [{"name": "p", "inputs": ["x"], "nodes": [
    {"name": "a", "type": "DL modle", "model_name": "dummy",
     "inputs": [{"b": {"node_name": "request", "data_item": "x"}}],
     "outputs": [{"data_item": "aa", "alias": "out"}]},
    {"name": "n", "type": "DL model", "model_name": "dumy",
     "inputs": [{"b": {"node_name": "a", "data_item": "out"}}],
     "outputs": [{"data_item": "a", "alias": "out"}]},
    {"name": "c", "type": "custom", "library_name": "none",
     "inputs": [{"b": {"node_name": "n", "data_item": "ouut"}}],
     "outputs": [{"data_item": "a", "alias": "out"}]}
  ], "outputs": [{"y": {"node_name": "c", "data_item": "out"}}]}]
}
"""


def test_all_that_is_wrong_with_a_pipeline_is_told_in_one_round(tmp_path: Path) -> None:
    """A node's type, a library, a misspelt model, a misspelt source and an output that a model does not have."""
    ir.save(ir.dummy(), tmp_path / "models", "dummy")
    Path("config.json").write_text(PIPELINE)
    result = run("config.json", "--json")
    told = {(each["line"], each["message"].partition(":")[0], each["suggestion"]) for each in json_of(result)}
    assert told == {
        (4, "unknown type of a node", "did you mean 'DL model'?"),
        (4, "PIPELINE_NODE_REFERING_TO_MISSING_MODEL_OUTPUT", "did you mean 'a'?"),
        (7, "PIPELINE_NODE_REFERING_TO_MISSING_MODEL", "did you mean 'dummy'?"),
        (7, "PIPELINE_CONTAINS_UNCONNECTED_NODES", told_of(told, 7, "PIPELINE_CONTAINS_UNCONNECTED_NODES")),
        (4, "PIPELINE_CONTAINS_UNCONNECTED_NODES", told_of(told, 4, "PIPELINE_CONTAINS_UNCONNECTED_NODES")),
        (10, "there is no custom node library 'none'", ""),
        (10, "PIPELINE_NODE_REFERING_TO_MISSING_DATA_SOURCE", "did you mean 'out'?"),
    }


def json_of(result: CommandResult) -> list[dict[str, Any]]:
    """Give the problems of an answer in JSON."""
    problems: list[dict[str, Any]] = json.loads(result.stdout)["problems"]
    return problems


def told_of(told: set[tuple[int, str, str]], line: int, message: str) -> str:
    """Give the way out that a problem tells, whatever it is."""
    return next((fix for at, text, fix in told if (at, text) == (line, message)), "")


GRAPH = """
input_stream: "OVMS_PY_TENSOR:x"
output_stream: "OVMS_PY_TENSOR:y"
node {
  name: "n"
  calculator: "PythonExecutorCalculatr"
  input_side_packet: "PYTHON_NODE_RESOURCES:py"
  input_stream: "IN:x"
  output_stream: "OUT:y"
  node_options: { [type.googleapis.com / mediapipe.PythonExecutorCalculatorOptions]: { handler_pathh: "h.py" } }
}
"""


def test_a_misspelt_calculator_is_told_together_with_its_wrong_options(tmp_path: Path) -> None:
    """Neither hides the other."""
    (tmp_path / "g").mkdir()
    Path("g/graph.pbtxt").write_text(GRAPH)
    result = run("g", "--json")
    suggestions = [each["suggestion"] for each in json_of(result)]
    assert "did you mean 'PythonExecutorCalculator'?" in suggestions
    assert "did you mean 'handler_path'?" in suggestions


def test_what_is_reported_is_not_logged_as_well(tmp_path: Path) -> None:
    """A failed load is told once; the log adds the traceback of a user's code, which the report has not."""
    folder = tmp_path / "raising"
    folder.mkdir()
    (folder / "graph.pbtxt").write_text(graph_text(python_node("node.py")))
    (folder / "node.py").write_text(
        "class OvmsPythonModel:\n    def initialize(self, kwargs):\n        raise RuntimeError('no luck')\n"
        "    def execute(self, inputs):\n        return []\n"
    )
    result = run("raising")
    assert result.exit_code == 1
    assert result.stdout.count("RuntimeError: no luck") == 1
    assert "in initialize" in result.stderr
    assert "load failed" not in result.stderr
