"""``ovms serve PATH`` and ``ovms infer NAME INPUT`` as processes."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import numpy as np
import pytest

from tests.support import ir
from tests.support.all_kinds import HANDLER, OPS
from tests.support.commands import run_command
from tests.support.onnx_files import onnx_file
from tests.support.processes import run_ovms, serving, serving_project
from tests.support.projects import write_project


def test_a_model_file_is_served_and_called_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "my net.onnx").write_bytes(onnx_file("Relu"))
    np.save(tmp_path / "input.npy", np.array([[-1, 2, -3, 4]], np.float32))
    with serving(str(tmp_path / "my net.onnx")) as server:
        for given in ("[[-1, 2, -3, 4]]", str(tmp_path / "input.npy"), "x=[[-1, 2, -3, 4]]"):
            called = run_ovms("infer", "my net", given, "--url", server.grpc, "--json")
            assert (called.returncode, json.loads(called.stdout)) == (0, {"y": [[0, 2, 0, 4]]}), called
        code, output = server.stop()
    assert code == 0, output


def test_another_name_and_options_are_taken_with_a_path(tmp_path: Path) -> None:
    base = ir.save(ir.dummy(), tmp_path, "mine", 4)
    with serving(str(base), "--model_name", "other", "--batch_size", "5") as server:
        known = server.get("/v2/models/other").json()
    assert known["versions"] == ["4"]
    assert known["inputs"][0]["shape"] == [5, 10]


def test_a_configuration_of_ops_is_served_with_the_script_next_to_it(tmp_path: Path) -> None:
    (tmp_path / "config.yml").write_text("rpc_port: 18091\nhttp_port: 18092\nlogging: {enabled: false}\n")
    (tmp_path / "my_service.py").write_text(OPS)
    with serving(str(tmp_path / "config.yml"), ready=True) as server:
        answer = httpx.post(server.rest + "/ops/prediction", json={"key": ["x"], "value": ["abc"]}, timeout=60)
    assert answer.json()["value"] == ["first abc"]


def test_a_handler_project_is_served_by_its_folder(tmp_path: Path) -> None:
    project = write_project(tmp_path / "adder", HANDLER).parent
    with serving_project(project) as server:
        assert server.ask("POST", json=[1, 2, 3]).json() == 6


def test_nothing_to_serve_is_a_wrong_command_line_with_examples() -> None:
    for options in ((), ("--port", "9999")):
        result = run_command("serve", *options)
        assert (result.exit_code, result.stdout) == (64, "")
        for part in ("nothing to serve", "ovms serve model.onnx", "ovms serve config.json", "ovms demo"):
            assert part in result.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("nothing.onnx",), 1, "error: nothing.onnx: no such file or directory (expected a model file"),
        (("ops",), 64, "several scripts create Ops"),
        (("none",), 64, "script of the pipeline of Ops is missing (expected web_service.py, or one script"),
        (("net.onnx", "--model_path", "net.onnx"), 64, "remove one of them"),
    ],
)
def test_a_path_that_cannot_be_served_ends_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], code: int, message: str
) -> None:
    (tmp_path / "net.onnx").write_bytes(onnx_file("Relu"))
    for name in ("ops", "none"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yml").write_text("http_port: 18092\n")
    for name in ("a.py", "b.py"):
        (tmp_path / "ops" / name).write_text(OPS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "1000")
    result = run_command("serve", *arguments)
    assert (result.exit_code, message in result.stderr) == (code, True), result
