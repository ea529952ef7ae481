from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ovmstrio.server.checking import CheckReport, LoadedVersion, check_config, check_pipelines
from tests.support import ir


def _config(root: Path, *models: dict[str, Any], **sections: Any) -> Path:
    path = root / "config.json"
    entries = [{"config": model} for model in models]
    path.write_text(json.dumps({"model_config_list": entries, **sections}, indent=1))
    return path


def _told(report: CheckReport) -> list[tuple[str, str, str]]:
    return [(Path(problem.file).name, problem.path, problem.severity) for problem in report.problems]


def _line(path: Path, text: str) -> int:
    return next(number for number, line in enumerate(path.read_text().splitlines(), 1) if text in line)


async def test_versions_of_the_policy_are_loaded(tmp_path: Path) -> None:
    for version in (1, 2, 3):
        ir.save(ir.dummy(), tmp_path, "a", version)
    ir.save(ir.sum_of_two(), tmp_path, "b")
    latest = {"latest": {"num_versions": 2}}
    config = _config(
        tmp_path, {"name": "b", "base_path": "b"}, {"name": "a", "base_path": "a", "model_version_policy": latest}
    )
    report = await check_config(config)
    assert report.loaded == (LoadedVersion("a", 2), LoadedVersion("a", 3), LoadedVersion("b", 1))
    assert report.problems == ()


async def test_model_that_cannot_be_batched_is_a_problem_of_its_option(tmp_path: Path) -> None:
    batching = {"max_batch_size": 4, "batch_timeout_ms": 1}
    ir.save(ir.dummy(), tmp_path, "good")
    ir.save(ir.scalar(), tmp_path, "scalar")
    models = [{"name": name, "base_path": name, "batching": batching} for name in ("good", "scalar")]
    report = await check_config(_config(tmp_path, *models))
    assert report.loaded == (LoadedVersion("good", 1),)
    assert _told(report) == [("config.json", "model_config_list[1].config.batching", "error")]
    assert "input 'b' has no batch dimension" in report.problems[0].message


async def test_problems_of_all_files_are_reported(tmp_path: Path) -> None:
    ir.save(ir.dummy(), tmp_path, "good")
    ir.save(ir.dummy(), tmp_path, "mapped")
    (tmp_path / "mapped/1/mapping_config.json").write_text('{"inputs": {"b": 1}}')
    ir.save(ir.dummy(), tmp_path, "weightless")
    (tmp_path / "weightless/1/model.bin").unlink()
    (tmp_path / "corrupt/1").mkdir(parents=True)
    (tmp_path / "corrupt/1/model.xml").write_text("<net")
    (tmp_path / "corrupt/1/model.bin").touch()
    (tmp_path / "empty").mkdir()
    names = ("good", "mapped", "weightless", "corrupt", "empty", "missing")
    config = _config(tmp_path, *({"name": name, "base_path": name} for name in names), monitor=1)
    report = await check_config(config)
    assert report.loaded == (LoadedVersion("good", 1),)
    assert _told(report) == [
        ("config.json", "model_config_list[5].config.base_path", "error"),
        ("config.json", "monitor", "error"),
        ("model.xml", "", "error"),
        ("empty", "", "warning"),
        ("mapping_config.json", "inputs.b", "error"),
        ("1", "", "error"),
    ]
    assert len(report.errors) == 5
    assert len(report.warnings) == 1


@pytest.mark.parametrize(
    ("option", "value", "message", "suggestion"),
    [
        ("shape", {"y": "(1,10)"}, "a tensor that the model does not have", ""),
        ("shape", "(1,10,3)", "the model cannot take the shape", ""),
        ("target_device", "CPUU", "Cannot compile model into target device", "CPU"),
        ("plugin_config", {"NUM_STREAM": "1"}, "Cannot compile model into target device", "NUM_STREAMS"),
    ],
)
async def test_setting_that_does_not_fit_the_model_is_located_in_the_configuration(
    tmp_path: Path, option: str, value: Any, message: str, suggestion: str
) -> None:
    model = ir.sum_of_two() if value == "(1,10,3)" else ir.dummy()
    if value == "(1,10,3)":
        value = {"x": value}
    ir.save(model, tmp_path, "m")
    config = _config(tmp_path, {"name": "m", "base_path": "m", option: value})
    (problem,) = (await check_config(config)).problems
    assert (problem.file, problem.line) == (str(config), _line(config, f'"{option}"'))
    assert problem.path.startswith(f"model_config_list[0].config.{option}")
    assert message in problem.message
    assert suggestion in problem.suggestion


async def test_missing_version_is_a_warning(tmp_path: Path) -> None:
    ir.save(ir.dummy(), tmp_path, "m")
    policy = {"specific": {"versions": [1, 4]}}
    report = await check_config(_config(tmp_path, {"name": "m", "base_path": "m", "model_version_policy": policy}))
    assert report.loaded == (LoadedVersion("m", 1),)
    (warning,) = report.warnings
    assert warning.message == "version 4 does not exist"
    assert warning.found == "1"


async def test_invalid_entries_are_checked_further(tmp_path: Path) -> None:
    settings = ({"name": "a", "base_path": "nowhere", "nirq": 1}, {"name": "b", "base_pth": "b"}, {"name": "c"})
    report = await check_config(_config(tmp_path, *settings))
    assert [problem.path for problem in report.problems] == [
        "model_config_list[0].config.base_path",
        "model_config_list[0].config.nirq",
        "model_config_list[1].config.base_pth",
        "model_config_list[2].config",
    ]


async def test_models_that_share_a_directory_share_its_problems(tmp_path: Path) -> None:
    ir.save(ir.dummy(), tmp_path, "m")
    (tmp_path / "m/notes").mkdir()
    report = await check_config(_config(tmp_path, *({"name": name, "base_path": "m"} for name in "ab")))
    assert [problem.message for problem in report.problems] == [
        'directory "notes" is no version: expected a positive integer'
    ]
    assert len(report.loaded) == 2


async def test_directory_of_a_model_is_checked_with_all_versions(tmp_path: Path) -> None:
    base = ir.save(ir.dummy(), tmp_path, "m", 1)
    ir.save(ir.dummy(), tmp_path, "m", 7)
    (base / "config.json").write_text("{}")
    report = await check_config(base)
    assert report.loaded == (LoadedVersion("m", 1), LoadedVersion("m", 7))
    assert report.problems == ()


async def test_directory_of_a_configuration_is_checked(tmp_path: Path) -> None:
    ir.save(ir.dummy(), tmp_path, "m")
    (empty,) = (await check_config(tmp_path)).errors
    assert (empty.file, empty.message) == (str(tmp_path), "no version of a model and no graph found")
    (inside,) = (await check_config(tmp_path / "m/1")).errors
    assert inside.suggestion == f"did you mean {tmp_path / 'm'}?"
    _config(tmp_path, {"name": "m", "base_path": "m"})
    assert (await check_config(tmp_path)).loaded == (LoadedVersion("m", 1),)


async def test_unusable_configuration_is_a_problem(tmp_path: Path) -> None:
    (gone,) = (await check_config(tmp_path / "config.json")).errors
    assert gone.message == "the configuration cannot be read: No such file or directory"
    (tmp_path / "config.json").write_text("{,}")
    (broken,) = (await check_config(tmp_path / "config.json")).errors
    assert broken.line == 1
    assert broken.message.startswith("The file is not valid json")


GRAPH = """
input_stream: "OVMS_PY_TENSOR:in"
output_stream: "OVMS_PY_TENSOR:out"
node {
  name: "py"
  calculator: "PythonExecutorCalculator"
  input_side_packet: "PYTHON_NODE_RESOURCES:py"
  input_stream: "INPUT:in"
  output_stream: "OUTPUT:out"
  node_options: {
    [type.googleapis.com/mediapipe.PythonExecutorCalculatorOptions]: { handler_path: "handler.py" }
  }
}
"""

HANDLER = """
from pathlib import Path

class OvmsPythonModel:
    def initialize(self, kwargs):
        self.folder = Path(kwargs["base_path"])

    def execute(self, inputs):
        return inputs

    def finalize(self):
        (self.folder / "finalized").touch()
"""


def _graph(folder: Path, text: str = GRAPH, handler: str = HANDLER) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "graph.pbtxt").write_text(text)
    (folder / "handler.py").write_text(handler)
    return folder


async def test_graphs_are_loaded_with_the_models_of_their_subconfigs(tmp_path: Path) -> None:
    _graph(tmp_path / "g")
    _graph(tmp_path / "h")
    ir.save(ir.dummy(), tmp_path / "g", "inner")
    inner = {"model_config_list": [{"config": {"name": "inner", "base_path": "inner"}}]}
    (tmp_path / "g/subconfig.json").write_text(json.dumps(inner))
    config = _config(tmp_path, {"name": "h", "base_path": "h"}, mediapipe_config_list=[{"name": "g"}])
    report = await check_config(config)
    assert report.problems == ()
    assert report.loaded == (LoadedVersion("g", 1), LoadedVersion("h", 1), LoadedVersion("inner", 1))
    assert (tmp_path / "g/finalized").exists()


async def test_problems_of_graphs_are_reported(tmp_path: Path) -> None:
    _graph(tmp_path / "unreadable", text='input_stream: "in\n')
    _graph(tmp_path / "subconfigured")
    (tmp_path / "subconfigured/subconfig.json").write_text("[")
    _graph(tmp_path / "raising", handler=HANDLER.replace("self.folder = ", "raise RuntimeError"))
    _graph(tmp_path / "fine")
    names = ("missing", "unreadable", "subconfigured", "raising", "fine")
    config = _config(tmp_path, mediapipe_config_list=[{"name": name} for name in names])
    report = await check_config(config)
    assert report.loaded == (LoadedVersion("fine", 1),)
    told = {(str(Path(problem.file).relative_to(tmp_path)), problem.severity) for problem in report.problems}
    files = {file for file, severity in told if severity == "error"}
    assert {"config.json", "unreadable/graph.pbtxt", "subconfigured/subconfig.json"} <= files
    assert any(file.startswith("raising/") for file in files)
    missing = next(problem for problem in report.problems if problem.file == str(config))
    assert (missing.message, missing.line) == ("the graph's file does not exist", _line(config, '"missing"') - 1)


@pytest.mark.parametrize("place", ["", "1"])
async def test_directory_of_a_graph_is_checked(tmp_path: Path, place: str) -> None:
    folder = _graph(tmp_path / "g" / place)
    ir.save(ir.dummy(), folder, "inner")
    inner = {"model_config_list": [{"config": {"name": "inner", "base_path": "inner"}}]}
    (folder / "subconfig.json").write_text(json.dumps(inner))
    report = await check_config(tmp_path / "g")
    assert report.problems == ()
    assert report.loaded == (LoadedVersion("g", 1), LoadedVersion("inner", 1))


async def test_configuration_in_the_directory_of_a_graph_is_checked(tmp_path: Path) -> None:
    _graph(tmp_path)
    _config(tmp_path, mediapipe_config_list=[{"name": "called", "base_path": "."}])
    report = await check_config(tmp_path)
    assert (report.loaded, report.problems) == ((LoadedVersion("called", 1),), ())


async def test_problems_of_pipelines_are_reported(tmp_path: Path) -> None:
    ir.save(ir.dummy(), tmp_path, "m")
    source = {"node_name": "request", "data_item": "in"}
    given = [{"data_item": "a", "alias": "a"}]
    node = {"name": "n", "type": "custom", "library_name": "crop", "inputs": [{"in": source}], "outputs": given}
    called = {"name": "m", "type": "DL model", "model_name": "m", "inputs": [{"b": source}], "outputs": given}
    items = (("n", "a"), ("m", "a"), ("m", "b"))
    outputs = [{f"{name}.{item}": {"node_name": name, "data_item": item}} for name, item in items]
    pipeline = {"name": "p", "inputs": ["in"], "nodes": [node, called], "outputs": outputs}
    config = _config(
        tmp_path,
        {"name": "m", "base_path": "m"},
        pipeline_config_list=[pipeline],
        custom_node_library_config_list=[{"name": "crops", "base_path": "crop.py"}],
    )
    report = await check_config(config)
    assert report.loaded == (LoadedVersion("m", 1),)
    wrong_output, problem = report.problems
    assert wrong_output.message.startswith("PIPELINE_NODE_REFERING_TO_MISSING_DATA_SOURCE")
    assert (problem.line, problem.suggestion) == (_line(config, '"library_name"'), "did you mean 'crops'?")


@pytest.mark.parametrize("names", [(), ("outer",)])
async def test_pipelines_may_call_graphs_and_each_other(tmp_path: Path, names: tuple[str, ...]) -> None:
    _graph(tmp_path / "g")

    def pipeline(name: str, called: str, item: str, given: str) -> dict[str, object]:
        node = {
            "name": "n",
            "type": "DL model",
            "model_name": called,
            "version": 3,
            "inputs": [{item: {"node_name": "request", "data_item": "in"}}],
            "outputs": [{"data_item": given, "alias": "y"}],
        }
        outputs = [{"y": {"node_name": "n", "data_item": "y"}}]
        return {"name": name, "inputs": ["in"], "nodes": [node], "outputs": outputs}

    pipelines = [pipeline("outer", "inner", "in", "y"), pipeline("inner", "g", "in", "out")]
    config = _config(tmp_path, mediapipe_config_list=[{"name": "g"}], pipeline_config_list=pipelines)
    report = await check_pipelines(config, names)
    assert report.problems == ()
    assert [each.model for each in report.loaded] == ["g", "inner", "outer"]
    assert (tmp_path / "g/finalized").exists()
    assert await check_config(config) == report
    assert (await check_pipelines(config, names, load=False)).problems == ()


async def test_pipelines_that_call_each_other_in_a_cycle_are_refused(tmp_path: Path) -> None:
    node = {"name": "n", "type": "DL model", "inputs": [{"x": {"node_name": "request", "data_item": "x"}}]}
    node["outputs"] = [{"data_item": "y", "alias": "y"}]
    given = {"inputs": ["x"], "outputs": [{"y": {"node_name": "n", "data_item": "y"}}]}
    pairs = [("p", "q"), ("q", "p")]
    pipelines = [{"name": name, "nodes": [{**node, "model_name": called}], **given} for name, called in pairs]
    report = await check_pipelines(_config(tmp_path, pipeline_config_list=pipelines))
    assert [problem.message for problem in report.problems] == [
        "PIPELINE_CALLS_ITSELF: it calls itself through others: p -> q -> p",
        "PIPELINE_CALLS_ITSELF: it calls itself through others: q -> p -> q",
    ]


async def test_unconnected_input_of_a_pipeline_is_a_warning(tmp_path: Path) -> None:
    ir.save(ir.dummy(), tmp_path, "m")
    node = {"name": "n", "type": "DL model", "model_name": "m", "outputs": [{"data_item": "a", "alias": "a"}]}
    node["inputs"] = [{"b": {"node_name": "request", "data_item": "x"}}]
    pipeline = {"name": "p", "inputs": ["x", "z"], "nodes": [node]}
    pipeline["outputs"] = [{"a": {"node_name": "n", "data_item": "a"}}]
    config = _config(tmp_path, {"name": "m", "base_path": "m"}, pipeline_config_list=[pipeline])
    report = await check_config(config)
    (problem,) = report.problems
    assert (problem.severity, problem.message) == (
        "warning",
        "PIPELINE_CONTAINS_UNCONNECTED_NODES: node 'request': the input 'z' goes nowhere",
    )
    assert [each.model for each in report.loaded] == ["m", "p"]
    assert (await check_pipelines(config, load=False)).problems == report.problems


async def test_model_that_crashes_openvino_is_a_problem(tmp_path: Path) -> None:
    for name, model in (("bad", ir.steps(bad=1)), ("good", ir.dummy()), ("odd", ir.steps())):
        ir.save(model, tmp_path, name)
    report = await check_config(
        _config(tmp_path, *({"name": name, "base_path": name} for name in ("bad", "good", "odd")))
    )
    assert report.loaded == (LoadedVersion("good", 1), LoadedVersion("odd", 1))
    assert _told(report) == [("model.xml", "", "error"), ("model.xml", "", "warning")]
    assert [str(tmp_path / name / "1/model.xml") for name in ("bad", "odd")] == [each.file for each in report.problems]
    assert ["SIGFPE when it runs" in each.message for each in report.problems] == [True, False]
    assert "when all inputs of the model are zeros" in report.problems[1].message
