"""``ovms check`` of handler projects, alone and in a configuration."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from tests.support.commands import run_command
from tests.support.project_files import PYTHON, write

run = partial(run_command, "check")

pytestmark = pytest.mark.usefixtures("command_folder")

GOOD = "class Handler:\n    def handle_post(self, payload): return payload\n"


def _write(folder: str, text: str = PYTHON, code: str = GOOD) -> None:
    (write(Path(folder), text) / "handler.py").write_text(code)


@pytest.mark.parametrize("path", ["iris", "iris/nucleus.yaml"])
def test_a_good_project_is_ok(path: str) -> None:
    """As its file or its folder; its handler is imported elsewhere."""
    _write("iris")
    result = run(path)
    assert result.exit_code == 0, result.output
    assert result.stdout == "loads  iris version 1\nok: 1 version loaded, no problem found\n"


def test_mistakes_of_the_handler_are_told_unless_it_is_not_imported() -> None:
    """Its place is a line of its own file."""
    _write("iris", code="import nothing_of_that_name\n")
    result = run("iris")
    assert result.exit_code == 1
    assert "error  handler.py:1" in result.stdout
    result = run("iris", "--no_import")
    assert result.exit_code == 0
    assert result.stdout == "ok: 0 versions loaded, no problem found\n"


def test_handlers_of_a_configuration_are_checked() -> None:
    """Each by its project; one that is not there is told where it is named."""
    _write("good")
    _write("bad", f"{PYTHON}processes: 2\n")
    handlers = [{"name": name, "path": name} for name in ("good", "bad", "gone")]
    Path("config.json").write_text(
        json.dumps({"model_config_list": [], "handler_config_list": handlers}, indent=1), "utf-8"
    )
    result = run("config.json", "--json")
    assert result.exit_code == 1
    answer = json.loads(result.stdout)
    assert answer["loaded"] == [{"model": "good", "version": 1}]
    problems = [(Path(each["file"]).name, each["path"], each["message"]) for each in answer["problems"]]
    assert problems == [
        ("nucleus.yaml", "processes", "a handler that is served beside others has no processes of its own"),
        ("config.json", "handler_config_list[2].path", "the project does not exist"),
    ]


def test_grpc_services_of_one_name_are_told() -> None:
    """One of the two would serve; the other is told with its file, and with that of the one that has the name."""
    code = "class Handler:\n    def Say(self, payload): return payload\n"
    proto = 'syntax = "proto3";\npackage clash;\nmessage Text {}\nservice Talk { rpc Say (Text) returns (Text); }\n'
    for name in ("one", "two"):
        _write(name, f"{PYTHON}protobuf_path: talk.proto\n", code)
        Path(name, "talk.proto").write_text(proto, "utf-8")
    handlers = [{"name": name, "path": name} for name in ("one", "two")]
    Path("config.json").write_text(json.dumps({"model_config_list": [], "handler_config_list": handlers}), "utf-8")
    result = run("config.json", "--json")
    assert result.exit_code == 1
    answer = json.loads(result.stdout)
    (loaded,) = answer["loaded"]
    (problem,) = answer["problems"]
    files = {name: str(Path(name, "talk.proto").resolve()) for name in ("one", "two")}
    has = files.pop(loaded["model"])
    (has_not,) = files.values()
    assert problem["file"] == has_not
    assert problem["message"] == f"the service clash.Talk is already served by {has}"
