from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ovmstrio.server.target import SERVABLE
from tests.support import ir
from tests.support.commands import CommandResult, run_command
from tests.support.graphs import graph_text, python_node
from tests.support.paddle_files import layers, write_described
from tests.support.pipelines import write_library
from tests.support.projects import PYTHON, write
from tests.support.tiny_encoders import write_embedder

pytestmark = pytest.mark.usefixtures("command_folder")

check = partial(run_command, "check")
pipeline = partial(run_command, "pipeline")


def _problems(result: CommandResult) -> list[dict[str, Any]]:
    problems: list[dict[str, Any]] = json.loads(result.stdout)["problems"]
    return problems


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


def test_problems_of_a_configuration_have_places_and_hints(tmp_path: Path) -> None:
    ir.save(ir.dummy(), tmp_path / "models", "a")
    Path("config.json").write_text(MISTAKES)
    result = check("config.json")
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
    hints = ("hint did you mean 'nireq'?", "hint write (1,10)", "hint did you mean NUM_STREAMS?")
    assert {*hints, "expected true or false", 'found "yes"'} <= set(lines)
    assert lines[-1] == "not ok: 6 errors and 0 warnings in 1 file; 1 version loaded"
    answer = json.loads(check("config.json", "--json").stdout)
    assert (answer["ok"], answer["errors"], answer["warnings"]) == (False, 6, 0)
    assert answer["problems"][1] == {
        "severity": "error",
        "file": "config.json",
        "line": 6,
        "path": "model_config_list[1].config.shape",
        "message": "the value cannot be used",
        "expected": "dimensions in parentheses such as (1,3,224,224), each a size, -1 for any or a range 2:8; or auto",
        "found": '"[1,10]"',
        "suggestion": "write (1,10)",
    }


def test_check_lists_loaded_versions_and_warnings(tmp_path: Path) -> None:
    base = ir.save(ir.dummy(), tmp_path, "a", 3)
    result = check(base.name)
    assert result.exit_code == 0, result.output
    assert result.stdout.split("\n") == ["loads  a version 3", "ok: 1 version loaded, no problem found", ""]
    (base / "drafts").mkdir()
    result = check("a")
    assert (result.exit_code, 'warning  directory "drafts" is not a version' in result.stdout) == (0, True), (
        result.output
    )
    assert "ok: 0 errors and 1 warning in 1 file; 1 version loaded" in result.stdout


def test_detected_settings_have_values_and_files(tmp_path: Path) -> None:
    folder = write_embedder(tmp_path / "words")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    result = check("words")
    assert result.exit_code == 0, result.output
    assert [line.split() for line in result.stdout.splitlines()[:-1]] == [
        ["loads", "words", "version", "1"],
        ["task", "embeddings", "1_Pooling/config.json"],
        ["max_model_len", "20", "config.json"],
        ["pooling", "MEAN", "1_Pooling/config.json"],
        ["normalize", "True", "default"],
    ]
    (loaded,) = json.loads(check("words", "--json").stdout)["loaded"]
    assert loaded["detected"][2] == {"setting": "pooling", "value": "MEAN", "source": "1_Pooling/config.json"}
    assert "detected,1_Pooling/config.json,,pooling,MEAN,,," in check("words", "--format", "csv").stdout


def test_a_missing_path_is_reported_in_one_line() -> None:
    result = check("nowhere.json")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == (f"error: nowhere.json: no such file or directory (expected {SERVABLE})\n")


def test_strict_makes_warnings_errors(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    Path("config.json").write_text('{"model_config_list": [{"config": {"name": "e", "base_path": "empty"}}]}')
    result = check("config.json")
    assert (result.exit_code, "warning  no version directory found" in result.stdout) == (0, True), result.output
    result = check("config.json", "--strict")
    assert (result.exit_code, "error  no version directory found" in result.stdout) == (1, True), result.output
    assert check("config.json", "--strict", "--json").exit_code == 1


def test_a_reported_failure_is_logged_only_with_its_traceback(tmp_path: Path) -> None:
    folder = tmp_path / "raising"
    folder.mkdir()
    (folder / "graph.pbtxt").write_text(graph_text(python_node("node.py")))
    (folder / "node.py").write_text(
        "class OvmsPythonModel:\n    def initialize(self, kwargs):\n        raise RuntimeError('no luck')\n"
        "    def execute(self, inputs):\n        return []\n"
    )
    result = check("raising")
    assert result.exit_code == 1
    assert result.stdout.count("RuntimeError: no luck") == 1
    assert "in initialize" in result.stderr
    assert "load failed" not in result.stderr


GOOD = "class Handler:\n    def handle_post(self, payload): return payload\n"


def _write_project(folder: str, text: str = PYTHON, code: str = GOOD) -> None:
    (write(Path(folder), text) / "handler.py").write_text(code)


@pytest.mark.parametrize("path", ["iris", "iris/nucleus.yaml"])
def test_a_handler_project_is_checked_by_folder_or_file(path: str) -> None:
    _write_project("iris")
    result = check(path)
    assert (result.exit_code, result.stdout) == (0, "loads  iris version 1\nok: 1 version loaded, no problem found\n")


def test_errors_of_a_handler_are_reported_if_it_is_imported() -> None:
    _write_project("iris", code="import nothing_of_that_name\n")
    result = check("iris")
    assert (result.exit_code, "error  handler.py:1" in result.stdout) == (1, True)
    result = check("iris", "--no-import")
    assert (result.exit_code, result.stdout) == (0, "ok: 0 versions loaded, no problem found\n")


def test_handlers_of_a_configuration_are_checked() -> None:
    _write_project("good")
    _write_project("bad", f"{PYTHON}processes: 2\n")
    handlers = [{"name": name, "path": name} for name in ("good", "bad", "missing")]
    Path("config.json").write_text(json.dumps({"model_config_list": [], "handler_config_list": handlers}))
    result = check("config.json", "--json")
    answer = json.loads(result.stdout)
    assert result.exit_code == 1
    assert answer["loaded"] == [{"model": "good", "version": 1, "detected": []}]
    problems = [(Path(each["file"]).name, each["path"], each["message"]) for each in answer["problems"]]
    assert problems == [
        ("nucleus.yaml", "processes", "handlers of config.json share one process"),
        ("config.json", "handler_config_list[2].path", "the project does not exist"),
    ]


def _source(name: str, node: str, item: str) -> dict[str, Any]:
    return {name: {"node_name": node, "data_item": item}}


def _pipeline(name: str = "p", **changes: Any) -> dict[str, Any]:
    model = {
        "name": "adds",
        "type": "DL model",
        "model_name": "m",
        "inputs": [_source("b", "sums", "sum")],
        "outputs": [{"data_item": "a", "alias": "a"}],
    }
    custom = {
        "name": "sums",
        "type": "custom",
        "library_name": "arithmetic",
        "params": {"op": "add", "inputs": "i"},
        "inputs": [_source("i", "request", "x")],
        "outputs": [{"data_item": "y", "alias": "sum"}],
    }
    model.update(changes.pop("model", {}))
    custom.update(changes.pop("custom", {}))
    return {"name": name, "inputs": ["x"], "nodes": [custom, model], "outputs": [_source("o", "adds", "a")], **changes}


def _write_pipelines(*pipelines: dict[str, Any], **sections: Any) -> None:
    ir.save(ir.dummy((1, 2)), Path.cwd(), "m")
    write_library(Path.cwd())
    content = {
        "model_config_list": [{"config": {"name": "m", "base_path": "m"}}],
        "custom_node_library_config_list": [{"name": "arithmetic", "base_path": "arithmetic.py"}],
        "pipeline_config_list": list(pipelines or [_pipeline()]),
        **sections,
    }
    Path("config.json").write_text(json.dumps(content, indent=1))


def _line(text: str) -> int:
    lines = Path("config.json").read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


def test_pipeline_check_of_a_usable_pipeline() -> None:
    _write_pipelines()
    for arguments in ((".",), ("config.json", "p"), ("config.json", "--no-models")):
        result = pipeline("check", *arguments)
        assert (result.exit_code, result.stdout) == (0, "ok: 1 pipeline, no problem found\n")


def test_pipeline_check_reports_all_problems_with_line_and_hint() -> None:
    _write_pipelines(_pipeline(model={"inputs": [_source("c", "sums", "sum")]}, outputs=[_source("o", "ads", "a")]))
    result = pipeline("check", ".")
    assert result.exit_code == 1
    place = f"config.json:{_line('adds') - 1}"
    found = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert found.count(f"error {place}") == 3
    for text in (
        "PIPELINE_NODE_REFERING_TO_MISSING_NODE: node 'response': the output 'o' comes from the unknown node 'ads'",
        "hint did you mean 'adds'?",
        "PIPELINE_CONTAINS_UNCONNECTED_NODES: node 'sums': none of its outputs is used",
        "PIPELINE_CONNECTION_TO_MISSING_MODEL_INPUT: node 'adds': it has no input 'c'",
    ):
        assert text in found
    assert found[-1] == "not ok: 5 errors and 0 warnings in 1 file"


def test_pipeline_check_without_models_loads_nothing() -> None:
    _write_pipelines(_pipeline(), _pipeline("q", model={"model_name": "n"}))
    Path("m/1/model.xml").write_text("broken")
    Path("arithmetic.py").write_text("raise RuntimeError")
    assert pipeline("check", ".", "p", "--no-models").exit_code == 0
    result = pipeline("check", ".", "q", "--no-models", "--json")
    facts = json.loads(result.stdout)
    assert (result.exit_code, facts["ok"], facts["pipelines"]) == (1, False, ["q"])
    (problem,) = facts["problems"]
    assert problem["message"].endswith("no model 'n' is configured")
    assert (problem["line"], problem["suggestion"]) == (_line('"n"') - 3, "known: m, p")
    assert "RuntimeError" in pipeline("check", ".", "p").stdout


def test_only_models_of_the_named_pipeline_are_checked() -> None:
    models = [{"config": {"name": name, "base_path": name}} for name in ("m", "nowhere")]
    _write_pipelines(_pipeline(), _pipeline("q", outputs=[_source("o", "nobody", "a")]), model_config_list=models)
    assert pipeline("check", ".", "p").exit_code == 0
    assert pipeline("check", ".").exit_code == 1


@pytest.mark.parametrize("command", ["check", "show"])
def test_a_missing_file_or_pipeline_is_a_usage_error(command: str) -> None:
    assert pipeline(command, "nowhere").exit_code == 64
    _write_pipelines()
    result = pipeline(command, ".", "q")
    assert result.exit_code == 64
    assert "there is no pipeline 'q'; known are p" in result.stderr


@pytest.mark.parametrize("command", ["check", "show"])
def test_a_file_without_pipelines_or_that_cannot_be_read(command: str) -> None:
    _write_pipelines(pipeline_config_list=[])
    result = pipeline(command, ".")
    assert (result.exit_code, "no pipeline" in result.stderr) == (1, True)
    Path("config.json").write_text("{")
    result = pipeline(command, ".")
    assert (result.exit_code, "config.json" in result.stdout) == (1, True)


def test_pipeline_show_draws_several_pipelines() -> None:
    _write_pipelines(_pipeline(), _pipeline("q"))
    result = pipeline("show", ".")
    assert [line for line in result.stdout.splitlines() if line in ("p", "q")] == ["p", "q"]
    result = pipeline("show", ".", "--format", "svg")
    assert (result.exit_code, "name one of the pipelines: p, q" in result.stderr) == (64, True)
    assert pipeline("show", ".", "q", "--format", "svg").exit_code == 0


def test_pipeline_show_draws_a_pipeline_with_errors() -> None:
    _write_pipelines(_pipeline(model={"model_name": "n"}))
    result = pipeline("show", ".", "--format", "mermaid")
    assert result.exit_code == 0
    assert 'n1["adds<br/>model n"]' in result.stdout
    assert "ovms pipeline check ." in result.stderr


_SCRIPT = """\
from paddle_serving_server.web_service import Op, WebService


class UciOp(Op):
    def init_op(self):
        raise RuntimeError("Ops are not started to be drawn")


class UciService(WebService):
    def get_pipeline_response(self, read_op):
        return UciOp(name="uci", input_ops=[read_op])


print("a line of the script")
service = UciService(name="uci")
service.prepare_pipeline_config("config.yml")
service.run_service()
"""
_CONFIG = "http_port: 18082\nop:\n  uci:\n    concurrency: 2\n"


@pytest.fixture
def project(command_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    (command_folder / "config.yml").write_text(_CONFIG)
    (command_folder / "web_service.py").write_text(_SCRIPT)
    environment = dict(os.environ)
    yield command_folder
    os.environ.clear()
    os.environ.update(environment)


def _script(project: Path, old: str, new: str) -> None:
    assert old in _SCRIPT
    (project / "web_service.py").write_text(_SCRIPT.replace(old, new))


def test_show_draws_ops_without_starting_them(project: Path) -> None:
    (project / "config.yml").write_text(f"{_CONFIG}    local_service_conf: {{model_config: uci_housing_model}}\n")
    shown = pipeline("show", "config.yml")
    assert shown.exit_code == 0, shown.output
    for text in ("request", "uci", "model uci_housing_model", "2 threads", "response"):
        assert text in shown.stdout
    assert "a line of the script" not in shown.stdout
    assert "uci_housing_model" in pipeline("show", ".", "--format", "mermaid").stdout
    assert pipeline("show", "config.yml", "--format", "svg", "--output", "picture.svg").exit_code == 0
    assert (project / "picture.svg").read_text().startswith("<svg")


def test_show_reports_why_it_cannot_draw_ops(project: Path) -> None:
    missing = pipeline("show", "config.yml", "--service", "other.py")
    assert (missing.exit_code, "other.py: no such file" in missing.stderr) == (64, True)
    (project / "config.yml").write_text("http_port: 1\n")
    wrong = pipeline("show", "config.yml")
    assert (wrong.exit_code, "config.yml:1: http_port" in wrong.stderr) == (1, True)
    (project / "config.yml").write_text(_CONFIG)
    _script(project, "input_ops=[read_op]", "input_ops=[]")
    assert pipeline("show", "config.yml").exit_code == 1
    (project / "web_service.py").unlink()
    alone = pipeline("show", "config.yml")
    assert (alone.exit_code, "--service names the script" in alone.stderr) == (64, True)


def test_check_of_a_usable_op_service(project: Path) -> None:
    checked = pipeline("check", "config.yml")
    assert (checked.exit_code, checked.stdout) == (0, "ok: service uci with 1 Op, no problem found\n")
    (project / "config.yml").write_text(f"{_CONFIG}grpc_gateway_port: 5\n")
    facts = json.loads(pipeline("check", "config.yml", "--json").stdout)
    assert (facts["ok"], facts["pipelines"], list(facts["without_effect"])) == (True, ["uci"], ["grpc_gateway_port"])
    assert "no effect  grpc_gateway_port" in pipeline("check", "config.yml").stdout


def test_check_reports_all_problems_of_an_op_service(project: Path) -> None:
    (project / "config.yml").write_text(
        "http_port: 80\nop:\n  uci:\n    batch_size: 4\n    local_service_conf: {model_config: nowhere}\n  uki: {}\n"
    )
    _script(
        project, "    def init_op(self)", "    def preprocess(self, a, b, c, d):\n        pass\n\n    def init_op(self)"
    )
    checked = pipeline("check", "config.yml")
    assert checked.exit_code == 1
    text = " ".join(checked.stdout.split())
    for expected in (
        "error config.yml:1 http_port the value cannot be used expected an integer of 1024 to 65535 or 0 found 80",
        "warning config.yml:4 op.uci.batch_size partial batches of Op uci wait until the pipeline stalls",
        "warning config.yml:6 op.uki the pipeline has no Op 'uki' hint did you mean 'uci'?",
        "preprocess of Op uci cannot be called expected preprocess(self, input_dicts, data_id, log_id)",
        "error config.yml:5 op.uci.local_service_conf.model_config no such file or folder",
        "not ok: 3 errors and 2 warnings in 2 files",
    ):
        assert expected in text
    assert "nowhere" not in pipeline("check", "config.yml", "--no-models").stdout


def test_check_reports_failures_of_a_script(project: Path) -> None:
    _script(project, 'print("a line of the script")', "1 / 0")
    failed = pipeline("check", "config.yml", "--json")
    (problem,) = json.loads(failed.stdout)["problems"]
    assert (failed.exit_code, problem["line"]) == (1, 14)
    assert problem["message"] == "the script raised ZeroDivisionError: division by zero"
    _script(project, "[read_op]", "[]")
    assert "web_service.py" in pipeline("check", "config.yml").stdout
    _script(project, '"config.yml"', 'yml_dict={"rpc_port": 0, "op": {"uci": {"concurrency": 0}}}')
    checked = pipeline("check", "config.yml")
    assert (checked.exit_code, "op.uci.concurrency" in checked.stdout) == (1, True)


def test_check_without_a_script_covers_the_configuration(project: Path) -> None:
    (project / "web_service.py").unlink()
    assert "--service names the script" in pipeline("check", "config.yml").stdout
    (project / "config.yml").write_text("a: [")
    broken = pipeline("check", "config.yml")
    assert (broken.exit_code, "config.yml:1" in broken.stdout) == (1, True)


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize("line", ["check none.yml", "check config.yml uci", "show none.yml"])
def test_usage_errors_of_op_pipelines(line: str) -> None:
    assert pipeline(*line.split()).exit_code == 64


def test_check_reports_the_problems_of_a_pipeline_of_ops(project: Path) -> None:
    for path in ("config.yml", "."):
        checked = check(path)
        assert (checked.exit_code, checked.stdout) == (
            0,
            "loads  uci version 1\nok: 1 version loaded, no problem found\n",
        )
    (project / "config.yml").write_text("http_port: 1\nrcp_port: 18083\n")
    facts = json.loads(check("config.yml", "--json", "--no-import").stdout)
    assert (facts["errors"], facts["warnings"], facts["loaded"]) == (1, 1, [])
    assert [(each["path"], each["line"]) for each in facts["problems"]] == [("http_port", 1), ("rcp_port", 2)]
    (project / "config.yml").write_text(_CONFIG)
    (project / "keys.yaml").write_text("keys: 5\n")
    assert check("config.yml", "--keys-file", "keys.yaml").exit_code == 1
    (project / "web_service.py").unlink()
    unscripted = check("config.yml")
    assert (unscripted.exit_code, "there is no web_service.py" in unscripted.stdout) == (0, True)
    assert check("config.yml", "--strict").exit_code == 1


def test_check_reports_the_settings_of_a_model_that_others_replace(project: Path) -> None:
    model = write_described(project / "model", *layers())
    settings = "{model_config: model, precision: int8, device_type: 2, devices: '7'}"
    (project / "config.yml").write_text(f"{_CONFIG}    local_service_conf: {settings}\n")
    facts = json.loads(pipeline("check", "config.yml", "--json").stdout)
    found = {each["path"].rpartition(".")[2]: (each["line"], each["message"]) for each in facts["problems"]}
    assert model.is_dir()
    assert (facts["errors"], facts["warnings"]) == (0, 3), facts
    assert found == {
        "device_type": (5, "TensorRT is not supported, OpenVINO's GPU plugin takes its place"),
        "devices": (5, "GPU 7 not found, the CPU is used"),
        "precision": (5, "precision not supported, fp32 is used"),
    }
    assert pipeline("check", "config.yml", "--strict").exit_code == 1
