from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from ovms_cli.op_pipeline import find_op_config
from tests.support.commands import run_command

run = partial(run_command, "pipeline")

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


@pytest.fixture(autouse=True)
def project(command_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Give a directory with a script and its configuration; what running scripts changes is put back."""
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


def test_show_draws_without_starting_anything(project: Path) -> None:
    """The script's Ops are drawn with the settings of the file, and no Op is prepared."""
    (project / "config.yml").write_text(f"{_CONFIG}    local_service_conf: {{model_config: uci_housing_model}}\n")
    shown = run("show", "config.yml")
    assert shown.exit_code == 0, shown.output
    for text in ("request", "uci", "model uci_housing_model", "2 threads", "response"):
        assert text in shown.stdout
    assert "a line of the script" not in shown.stdout
    assert "uci_housing_model" in run("show", ".", "--format", "mermaid").stdout
    assert run("show", "config.yml", "--format", "svg", "--output", "picture.svg").exit_code == 0
    assert (project / "picture.svg").read_text().startswith("<svg")


def test_show_tells_why_it_cannot_draw(project: Path) -> None:
    """A missing script is a wrong command line; a configuration or graph that cannot be used is told."""
    missing = run("show", "config.yml", "--service", "other.py")
    assert (missing.exit_code, "other.py: no such file" in missing.stderr) == (64, True)
    (project / "config.yml").write_text("http_port: 1\n")
    wrong = run("show", "config.yml")
    assert (wrong.exit_code, "config.yml:1: http_port" in wrong.stderr) == (1, True)
    (project / "config.yml").write_text(_CONFIG)
    _script(project, "input_ops=[read_op]", "input_ops=[]")
    assert run("show", "config.yml").exit_code == 1
    (project / "web_service.py").unlink()
    alone = run("show", "config.yml")
    assert (alone.exit_code, "--service names the script" in alone.stderr) == (64, True)


def test_check_of_a_good_service(project: Path) -> None:
    """A service without a problem is ok, with its name, as text and as JSON, and whatever has no effect is named."""
    checked = run("check", "config.yml")
    assert (checked.exit_code, checked.stdout) == (0, "ok: service uci with 1 Op, no problem found\n")
    (project / "config.yml").write_text(f"{_CONFIG}grpc_gateway_port: 5\n")
    facts = json.loads(run("check", "config.yml", "--json").stdout)
    assert (facts["ok"], facts["pipelines"], list(facts["without_effect"])) == (True, ["uci"], ["grpc_gateway_port"])
    assert "no effect  grpc_gateway_port" in run("check", "config.yml").stdout


def test_check_tells_everything_at_once(project: Path) -> None:
    """Problems of the file, of the Ops against it and of their models are told together, with lines and ways out."""
    (project / "config.yml").write_text(
        "http_port: 80\nop:\n  uci:\n    batch_size: 4\n    local_service_conf: {model_config: nowhere}\n  uki: {}\n"
    )
    _script(
        project, "    def init_op(self)", "    def preprocess(self, a, b, c, d):\n        pass\n\n    def init_op(self)"
    )
    checked = run("check", "config.yml")
    assert checked.exit_code == 1
    text = " ".join(checked.stdout.split())
    for expected in (
        "error config.yml:1 http_port the value cannot be used expected a whole number of 1024 to 65535 or 0 found 80",
        "warning config.yml:4 op.uci.batch_size batches of Op uci wait until they are full",
        "warning config.yml:6 op.uki no Op of the pipeline is called 'uki' hint did you mean 'uci'?",
        "preprocess of Op uci cannot be called expected preprocess(self, input_dicts, data_id, log_id)",
        "error config.yml:5 op.uci.local_service_conf.model_config no such file or folder",
        "not ok: 3 errors and 2 warnings in 2 files",
    ):
        assert expected in text
    assert "nowhere" not in run("check", "config.yml", "--no-models").stdout


def test_check_of_scripts_that_fail(project: Path) -> None:
    """What a script raises is told with its line, a graph that is none with the script's name."""
    _script(project, 'print("a line of the script")', "1 / 0")
    failed = run("check", "config.yml", "--json")
    (problem,) = json.loads(failed.stdout)["problems"]
    assert (failed.exit_code, problem["line"]) == (1, 14)
    assert problem["message"] == "the script raised ZeroDivisionError: division by zero"
    _script(project, "[read_op]", "[]")
    assert "web_service.py" in run("check", "config.yml").stdout


def test_check_of_a_dictionary(project: Path) -> None:
    """A service that is configured with a dictionary is checked with it."""
    _script(project, '"config.yml"', 'yml_dict={"rpc_port": 0, "op": {"uci": {"concurrency": 0}}}')
    checked = run("check", "config.yml")
    assert (checked.exit_code, "op.uci.concurrency" in checked.stdout) == (1, True)


def test_check_without_a_script(project: Path) -> None:
    """Without a script the configuration alone is checked, which is said."""
    (project / "web_service.py").unlink()
    assert "--service names the script" in run("check", "config.yml").stdout
    (project / "config.yml").write_text("a: [")
    broken = run("check", "config.yml")
    assert (broken.exit_code, "config.yml:1" in broken.stdout) == (1, True)


def test_wrong_command_lines(project: Path) -> None:
    """A missing configuration and a pipeline's name are wrong command lines."""
    assert run("check", "none.yml").exit_code == 64
    assert run("check", "config.yml", "uci").exit_code == 64
    assert run("show", "none.yml").exit_code == 64


def test_which_pipelines_are_of_ops(tmp_path: Path) -> None:
    """YAML, or a script, says that a pipeline is one of Ops; ``config.json`` is first in a directory that has both."""
    assert find_op_config(Path("config.yml"), None) == Path("config.yml")
    assert find_op_config(Path("config.json"), Path("web_service.py")) == Path("config.json")
    assert find_op_config(Path("config.json"), None) is None
    folder = tmp_path / "other"
    folder.mkdir()
    assert find_op_config(folder, None) is None
    (folder / "config.yml").touch()
    assert find_op_config(folder, None) == folder / "config.yml"
    (folder / "config.json").touch()
    assert find_op_config(folder, None) is None
    assert find_op_config(folder, Path("web_service.py")) == folder / "config.yml"
