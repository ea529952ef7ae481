from __future__ import annotations

import fcntl
import json
import os
import sys
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.testing import CliRunner, Result

from ovmstrio.auth.key_file import CallerEntry, key_hash, read_key_file, write_key_file
from ovmstrio.cli import serve_service
from ovmstrio.cli.main import command_line
from ovmstrio.cli.run import _command
from ovmstrio.cli.script import execute_script
from ovmstrio.cli.serve_service import run_pipeline_service
from ovmstrio.core.callers import Scopes
from ovmstrio.ext.ops import WebService
from ovmstrio.extras import COMPAT_FOLDER
from ovmstrio.ops.prepared_service import PreparedService
from tests.support.commands import run_command
from tests.support.graphs import LOOPBACK, graph_text, python_node
from tests.support.projects import PYTHON, write

pytestmark = pytest.mark.usefixtures("command_folder")

graph = partial(run_command, "graph")
generate = partial(run_command, "handler", "dockerfile")


def write_graph(text: str = "") -> None:
    Path("model.py").touch()
    Path("graph.pbtxt").write_text(text or graph_text(python_node("model.py", more=LOOPBACK)))


def test_graph_check_of_a_usable_graph() -> None:
    write_graph()
    for path in (".", "graph.pbtxt"):
        result = graph("check", path)
        assert (result.exit_code, result.stdout) == (0, "ok: 1 node, no problem found\n")


def test_graph_check_reports_all_problems_with_line_and_hint() -> None:
    write_graph(graph_text(python_node("modle.py", ["IN:in", "MORE:outs"]), outputs=["OVMS_PY_TENSOR:ot"]))
    result = graph("check", ".")
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


def test_a_misspelt_calculator_does_not_hide_its_wrong_options() -> None:
    text = graph_text(python_node("model.py")).replace('Calculator"', 'Calculatr"')
    write_graph(text.replace("handler_path:", "handler_pathh:"))
    hints = {each["suggestion"] for each in json.loads(graph("check", ".", "--json").stdout)["problems"]}
    assert {"did you mean 'PythonExecutorCalculator'?", "did you mean 'handler_path'?"} <= hints


@pytest.mark.parametrize("command", ["check", "show"])
def test_a_missing_graph_is_a_usage_error(command: str) -> None:
    assert graph(command, "nowhere").exit_code == 64


def test_graph_show_draws_nodes_and_connections() -> None:
    write_graph()
    result = graph("show", ".")
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
def test_graph_show_writes_pictures_to_files(picture: str, start: str) -> None:
    write_graph()
    result = graph("show", "graph.pbtxt", "--format", picture, "--output", "picture")
    assert (result.exit_code, result.stdout) == (0, "")
    assert Path("picture").read_text().startswith(start)


def test_graph_show_prints_boxes_and_edges_as_json() -> None:
    write_graph()
    document = json.loads(graph("show", ".", "--json").stdout)
    assert document == json.loads(graph("show", ".", "--format", "json").stdout)
    assert {edge["stream"] for edge in document["edges"]} >= {"in", "out"}


def test_graph_show_draws_a_graph_with_errors() -> None:
    write_graph(graph_text(python_node("none.py")))
    result = graph("show", ".", "--format", "mermaid")
    assert result.exit_code == 0
    assert 'n0["node<br/>PythonExecutorCalculator"]' in result.stdout
    assert "ovms graph check" in result.stderr


def test_graph_show_reports_an_unwritable_file_and_an_unreadable_graph() -> None:
    write_graph()
    unwritable = graph("show", ".", "--output", "none/picture")
    assert (unwritable.exit_code, "No such file or directory" in unwritable.stderr) == (1, True)
    write_graph("node {")
    unreadable = graph("show", ".")
    assert (unreadable.exit_code, "unclosed" in unreadable.stdout) == (1, True)


def test_generate_writes_the_dockerfile_into_the_current_folder() -> None:
    write(Path("iris"), requirements__txt="numpy\n")
    result = generate("iris/nucleus.yaml")
    assert result.exit_code == 0, result.output
    first, expanded, last = result.stdout.split("-" * 80 + "\n")
    assert (first, last) == ("", "✓ generated nucleus.Dockerfile\n")
    assert yaml.safe_load(expanded)["serve_port"] == 8080
    assert result.stderr == f"build the image with: docker build -f nucleus.Dockerfile -t iris {Path.cwd()}\n"
    text = Path("nucleus.Dockerfile").read_text()
    assert 'COPY ["iris/requirements.txt", "/src/project/requirements.txt"]' in text
    assert f"ovmstrio[handlers]=={version('ovmstrio')}" in text


def test_generate_takes_projects_elsewhere_and_of_the_current_folder(tmp_path: Path) -> None:
    project = write(tmp_path / "elsewhere", requirements__txt="numpy\n")
    result = generate(str(project), "--output", "made/here")
    assert result.exit_code == 0, result.output
    text = Path("made/here/nucleus.Dockerfile").read_text()
    assert 'COPY ["requirements.txt", "/src/project/requirements.txt"]' in text
    assert result.stderr.endswith(f"-f made/here/nucleus.Dockerfile -t elsewhere {project}\n")
    write(Path(), f"{PYTHON}processs: 2\nuse_local_cortex_libs: true\n")
    result = generate()
    assert result.exit_code == 0
    assert "did you mean 'processes'?" in result.stdout
    assert "--build-context ovmstrio=SOURCES" in result.stderr
    assert 'COPY ["./", "/src/project/"]' in Path("nucleus.Dockerfile").read_text()


def test_generate_refuses_a_project_with_errors() -> None:
    write(Path(), "type: pithon\npath: nothing.py\n")
    result = generate()
    assert result.exit_code == 1
    assert "error  nucleus.yaml:1  type" in result.stdout
    assert "error  nucleus.yaml:2  path" in result.stdout
    assert result.stdout.endswith("not ok: 2 errors and 0 warnings in 1 file\n")
    assert not Path("nucleus.Dockerfile").exists()


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (("--output", "file"), "error: file/nucleus.Dockerfile cannot be written: File exists\n"),
        (("--from-source", "iris"), "there is no pyproject.toml"),
    ],
)
def test_generate_reports_failures_in_one_line(options: tuple[str, ...], error: str) -> None:
    write(Path("iris"))
    Path("file").touch()
    result = generate("iris", *options)
    assert (result.exit_code, error in result.stderr) == (1, True)
    assert not Path("nucleus.Dockerfile").exists()


def _keys(*arguments: str) -> Result:
    return CliRunner().invoke(command_line(), ["keys", *arguments])


def test_the_key_file_is_read_after_its_folder_is_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys.json"
    others = [CallerEntry(name, Scopes(), certificate=name) for name in ("first", "second")]

    def wait(descriptor: int, operation: int) -> None:
        assert Path(f"/proc/self/fd/{descriptor}").resolve() == tmp_path
        assert operation == fcntl.LOCK_EX
        write_key_file(file, others)

    monkeypatch.setattr(fcntl, "flock", wait)
    assert _keys("new", "third", "--file", str(file)).exit_code == 0
    assert [each.name for each in read_key_file(file)] == ["first", "second", "third"]
    assert _keys("revoke", "first", "--file", str(file)).exit_code == 0
    assert [each.name for each in read_key_file(file)] == ["second"]
    assert _keys("new", "fourth", "--file", str(tmp_path / "missing" / "keys.json")).exit_code == 1


def test_keys_are_stored_as_hashes_and_revoked(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    limits = ("--concurrency", "2", "--tokens-per-minute", "1000")
    made = _keys("new", "shop", "--file", str(file), "--scope", "infer:a*", "--scope", "read", *limits)
    assert made.exit_code == 0, made.output
    key = made.stdout.strip()
    assert key.startswith("ovms_")
    assert key not in file.read_text()
    (entry,) = read_key_file(file)
    assert (entry.sha256, entry.scopes.texts()) == (key_hash(key), ("infer:a*", "read"))
    assert (entry.concurrency, entry.tokens_per_minute) == (2, 1000)
    listed = json.loads(_keys("list", "--file", str(file), "--json").stdout)
    assert [(each["name"], each["sha256"]) for each in listed] == [("shop", entry.sha256[:8])]
    assert "infer:a*, read" in _keys("list", "--file", str(file)).stdout
    made = json.loads(_keys("new", "node", "--file", str(file), "--json").stdout)
    assert (made["name"], key_hash(made["key"])) == ("node", made["sha256"])
    assert _keys("revoke", "shop", "--file", str(file)).exit_code == 0
    assert [entry.name for entry in read_key_file(file)] == ["node"]
    again = _keys("revoke", "shop", "--file", str(file))
    assert (again.exit_code, "there is no caller 'shop'" in again.stderr) == (1, True)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("shop", "--scope", "write"), 64, "got 'write'"),
        (("shop", "--certificate", "a", "--subject", "b"), 64, "cannot be combined"),
        (("a shop",), 1, "invalid name"),
        (("shop", "--expires", "tomorrow"), 1, "invalid date"),
        (("known",), 1, "caller 'known' exists already"),
    ],
)
def test_a_refused_key_leaves_the_file_unchanged(
    tmp_path: Path, arguments: tuple[str, ...], code: int, message: str
) -> None:
    file = tmp_path / "keys.json"
    assert _keys("new", "known", "--file", str(file)).exit_code == 0
    before = file.read_bytes()
    refused = _keys("new", *arguments, "--file", str(file))
    assert (refused.exit_code, message in refused.stderr) == (code, True), refused.stderr
    assert file.read_bytes() == before


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("COLUMNS", "500")
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_config_list": [{"config": {"name": "m", "base_path": "m"}}]}))
    return str(path)


def test_deploy_names_the_missing_extra(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("ovmstrio.cluster.ray")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray", None)
    done = run_command("deploy", "ray", config)
    assert done.exit_code == 1
    assert "ray is not installed: " in done.output
    assert "[ray]" in done.output or "ray[serve]" in done.output


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--setting", "cache_dir"], "--setting cache_dir: expected NAME=VALUE"),
        (["--ingress", "two"], "--ingress two: expected a JSON object"),
    ],
)
def test_deploy_refuses_malformed_options(config: str, options: list[str], text: str) -> None:
    done = run_command("deploy", "ray", config, *options)
    assert (done.exit_code, text in done.output) == (1, True)


SCRIPT = """
import sys
from paddle_serving_server.util import ArgsParser
from paddle_serving_server.web_service import Op, WebService


class Service(WebService):
    def get_pipeline_response(self, read_op):
        return Op(name="a", input_ops=[read_op])


service = Service(name=" ".join(sys.argv[1:]))
service.prepare_pipeline_config(yml_dict=ArgsParser().parse_args([]).conf_dict)
service.run_service()
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yml").write_text("rpc_port: 0\nworker_num: 3\n")
    path = tmp_path / "web_service.py"
    path.write_text(SCRIPT)
    return path


def ended(call: Any, *arguments: Any) -> int:
    with pytest.raises(typer.Exit) as raised:
        call(*arguments)
    return raised.value.exit_code


def test_a_script_gets_its_arguments_and_configuration_and_sets_the_exit_code(script: Path) -> None:
    main = sys.modules["__main__"]
    taken: list[WebService] = []
    execute_script(script, ["one", "two"], "config.yml", taken.append)
    (service,) = taken
    assert (service.name, service.yml_dict) == ("one two", {"rpc_port": 0, "worker_num": 3})
    assert sys.path[:2] == [str(script.parent), str(COMPAT_FOLDER)]
    assert sys.modules["__main__"] is main
    script.write_text("raise SystemExit(3)")
    with pytest.raises(SystemExit) as ended_with:
        execute_script(script, [], None, lambda service: None)
    assert ended_with.value.code == 3


def test_usage_errors_of_scripts(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here = Path("config.yml")
    run = _command()
    assert ended(run, script, ["-c", "nope.yml"]) == 64
    assert ended(run, script, ["x", "-c"]) == 64
    assert ended(run, script, [], None, "unix:/socket") == 64
    assert ended(run_pipeline_service, here, Path("nope.py"), {}) == 64
    assert ended(run_pipeline_service, Path("nope2.yml"), script, {}) == 64
    assert ended(run_pipeline_service, here, script, {"nireq": 1}) == 64
    assert ended(run_pipeline_service, here, script, {"port": "99999"}) == 64
    output = capsys.readouterr().err.replace("\n", " ")
    for part in ("nope.yml", "-c needs a file", "unix:/socket", "nope.py", "nope2.yml", "--nireq: cannot", "--port:"):
        assert part in output


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("print(1)", "ran no service"),
        ("def f():\n    raise LookupError('deep')\nf()", "LookupError: deep"),
        ("this is no Python", "SyntaxError"),
        (
            "from paddle_serving_server.web_service import WebService\nWebService().run_service()",
            "prepare_pipeline_conf",
        ),
    ],
    ids=["no_service", "error", "syntax", "unprepared"],
)
def test_a_failed_script_is_reported_without_frames_of_the_command(
    script: Path, capsys: pytest.CaptureFixture[str], body: str, text: str
) -> None:
    script.write_text(body)
    assert ended(execute_script, Path(script.name), [], None, lambda service: service.graph()) == 1
    output = capsys.readouterr().err
    assert text in output.replace("\n", " ")
    assert "ovmstrio.cli" not in output


_OWN_PARSER = """
import argparse

parser = argparse.ArgumentParser()
parser.add_argument("-c", "--config", required=True)
parser.add_argument("--port")
print("arguments", vars(parser.parse_args()))
"""
_OTHER_PARSER = """
import argparse

parser = argparse.ArgumentParser()
parser.add_argument("--name")
print("arguments", vars(parser.parse_args()))
"""
_NO_PARSER = """
import sys

print("arguments", sys.argv[1:])
"""
_SERVED = """
from paddle_serving_server_gpu.web_service import Op, WebService


class Service(WebService):
    def get_pipeline_response(self, read_op):
        return Op(name="a", input_ops=[read_op])


service = Service(name="s")
service.prepare_pipeline_config("config.yml")
service.run_service()
"""


@pytest.mark.parametrize(
    ("before", "arguments", "seen", "config"),
    [
        (_OWN_PARSER, ["--config=config.yml"], {"config": "config.yml", "port": None}, None),
        (_OWN_PARSER, ["--port", "8", "-c", "app.json"], {"config": "app.json", "port": "8"}, None),
        ("from own import *", ["--config", "config.yml"], {"config": "config.yml", "port": None}, None),
        (_OTHER_PARSER, ["-c", "config.yml", "--name", "n"], {"name": "n"}, "config.yml"),
        (_OTHER_PARSER, ["--", "--name", "n"], {"name": "n"}, None),
        (_NO_PARSER, ["a", "--config", "config.yml", "b"], ["a", "--config", "config.yml", "b"], "config.yml"),
        (_NO_PARSER, ["a", "--conf", "b"], ["a", "--conf", "b"], None),
        (_NO_PARSER, ["--", "--port", "8"], ["--port", "8"], None),
    ],
    ids=["own", "own short", "own module", "other", "other separated", "none", "no option", "separated"],
)
def test_arguments_reach_a_script_as_by_python_and_configure_its_service(
    script: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    before: str,
    arguments: list[str],
    seen: Any,
    config: str | None,
) -> None:
    script.write_text(before + _SERVED)
    (script.parent / "own.py").write_text(_OWN_PARSER if "own" in before else "")
    monkeypatch.delitem(sys.modules, "own", raising=False)
    served: list[str | None] = []
    monkeypatch.setattr(serve_service, "_serve", lambda _, file, service: served.append(file))
    _command()(script, arguments)
    assert f"arguments {seen}\n" in capsys.readouterr().out
    assert served == [config]


@pytest.mark.parametrize("option", ["--bind-address", "--port=31", "--no-metrics-enable", "--compiled_gb"])
def test_an_option_of_the_server_after_a_script_is_refused(
    script: Path, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    assert ended(_command(), script, ["x", option, "1"]) == 64
    output = " ".join(capsys.readouterr().err.split())
    assert f"{option.partition('=')[0]}: options of the server come before" in output


def test_a_script_that_changes_its_folder_keeps_its_path(script: Path, tmp_path: Path) -> None:
    script.write_text(
        "import os\nos.mkdir('deep')\nos.chdir('deep')\n" + script.read_text().replace("ArgsParser()", "A")
    )
    script.write_text(script.read_text().replace("A.parse_args([]).conf_dict", '{"rpc_port": 0}'))
    sources: list[Any] = []
    execute_script(Path("web_service.py"), [], None, lambda service: sources.append(PreparedService(service).source()))
    assert json.loads(sources[0].argument)["script"] == str(tmp_path / "web_service.py")
