from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from ovms_cli.run import _command, _take_config
from ovms_cli.script import compat_folder, execute_script
from ovms_cli.serve_project import run_project
from ovms_cli.serve_service import run_pipeline_service
from ovmstrio.ops import WebService
from ovmstrio.runtimes.ops.prepared_service import PreparedService

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


def test_a_script_gets_its_arguments_and_configuration(script: Path) -> None:
    main = sys.modules["__main__"]
    taken: list[WebService] = []
    execute_script(script, ["one", "two"], "config.yml", taken.append)
    (service,) = taken
    assert (service.name, service.yml_dict) == ("one two", {"rpc_port": 0, "worker_num": 3})
    assert sys.path[:2] == [str(script.parent), str(compat_folder())]
    assert sys.modules["__main__"] is main


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
    told = capsys.readouterr().err.replace("\n", " ")
    for part in ("nope.yml", "-c needs a file", "unix:/socket", "nope.py", "nope2.yml", "--nireq: cannot", "--port:"):
        assert part in told


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
    told = capsys.readouterr().err
    assert text in told.replace("\n", " ")
    assert "ovms_cli" not in told


def test_a_pipeline_without_its_script_is_refused(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for given in (Path("config.yml"), script.parent):
        assert ended(run_project, given, {}) == 64
        told = " ".join(capsys.readouterr().err.split())
        assert "config.yml configures a pipeline of Ops; add --service SCRIPT" in told


def test_the_exit_code_of_a_script_is_kept(script: Path) -> None:
    script.write_text("raise SystemExit(3)")
    with pytest.raises(SystemExit) as ended_with:
        execute_script(script, [], None, lambda service: None)
    assert ended_with.value.code == 3


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["a", "-c", "f.yml", "b"], ("f.yml", ["a", "b"])),
        (["--config=f.yml", "b"], ("f.yml", ["b"])),
        (["a", "--conf", "b"], (None, ["a", "--conf", "b"])),
    ],
    ids=["short", "long", "none"],
)
def test_the_configuration_option_is_removed_from_the_arguments(arguments: list[str], expected: Any) -> None:
    assert _take_config(arguments) == expected


def test_a_script_that_changes_its_folder_keeps_its_path(script: Path, tmp_path: Path) -> None:
    script.write_text(
        "import os\nos.mkdir('deep')\nos.chdir('deep')\n" + script.read_text().replace("ArgsParser()", "A")
    )
    script.write_text(script.read_text().replace("A.parse_args([]).conf_dict", '{"rpc_port": 0}'))
    sources: list[Any] = []
    execute_script(Path("web_service.py"), [], None, lambda service: sources.append(PreparedService(service).source()))
    assert json.loads(sources[0].argument)["script"] == str(tmp_path / "web_service.py")
