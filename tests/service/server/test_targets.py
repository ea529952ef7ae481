"""Paths as ``ovms serve`` takes them: what is served, under which name, with values of real calls."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

from ovmstrio.core.errors import ConfigError
from ovmstrio.server.check import check_config
from ovmstrio.server.running import Running
from ovmstrio.server.server import serve
from ovmstrio.server.target import find_target, settings_of
from tests.support import ir
from tests.support.all_kinds import HANDLER, NODE, OPS
from tests.support.graphs import graph_text, python_node
from tests.support.onnx_files import onnx_file
from tests.support.paddle_files import layers, write_model
from tests.support.projects import write_project
from tests.support.saved_models import write_classifier
from tests.support.served_in_thread import ServedInThread, serving_in_thread
from tests.support.tiny_llm import write_tiny_folder, write_tiny_gguf
from tests.support.waits import until

Array = np.ndarray[Any, Any]
RELU = np.array([[-1, 2, -3, 4]], np.float32), np.array([[0, 2, 0, 4]], np.float32)
ADDED = np.arange(10, dtype=np.float32)[None], np.arange(1, 11, dtype=np.float32)[None]


def _onnx(file: Path) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(onnx_file("Relu"))
    return file


def _xml(file: Path, weights: str) -> Path:
    ir.save(ir.dummy(), file.parent / ".made", "m")
    shutil.copy(file.parent / ".made/m/1/model.xml", file)
    shutil.copy(file.parent / ".made/m/1/model.bin", file.with_suffix(weights))
    return file


def _saved_model(folder: Path) -> Path:
    return write_classifier(folder)


def _infer(server: ServedInThread, name: str, values: Array, version: str = "") -> Array:
    (known,) = server.ask("GET", f"/v2/models/{name}").raise_for_status().json()["inputs"]
    tensor = {"name": known["name"], "shape": values.shape, "datatype": "FP32", "data": values.tolist()}
    path = f"/v2/models/{name}{f'/versions/{version}' if version else ''}/infer"
    answer = server.ask("POST", path, json={"inputs": [tensor]}).raise_for_status().json()["outputs"][0]
    return np.array(answer["data"], np.float32).reshape(answer["shape"])


def _check_answer(location: str | Path, name: str, case: tuple[Array, Array], version: str = "") -> None:
    settings = settings_of(location)
    with serving_in_thread(**settings.model_dump(exclude_unset=True)) as server:
        assert np.array_equal(_infer(server, name, case[0], version), case[1])


@pytest.mark.parametrize(
    ("path", "make", "name", "case"),
    [
        ("model.onnx", _onnx, "model", RELU),
        ("model.v2.onnx", _onnx, "model.v2", RELU),
        ("my model.ONNX", _onnx, "my model", RELU),
        ("net.xml", lambda file: _xml(file, ".bin"), "net", ADDED),
        ("NET.XML", lambda file: _xml(file, ".BIN"), "NET", ADDED),
    ],
)
def test_a_model_file_is_served_under_its_name(
    tmp_path: Path, path: str, make: Callable[[Path], Path], name: str, case: tuple[Array, Array]
) -> None:
    make(tmp_path / path)
    _check_answer(tmp_path / path, name, case)


def test_a_saved_model_is_served_under_the_name_of_its_folder(tmp_path: Path) -> None:
    folder = _saved_model(tmp_path / "flowers")
    target = find_target(folder / "saved_model.pb")
    assert (target.name, target.path) == ("flowers", folder)
    case = np.array([[1, 0, 0]], np.float32), np.array([[0, 1]], np.float32)
    with serving_in_thread(**settings_of(folder).model_dump(exclude_unset=True)) as server:
        outputs = server.ask(
            "POST",
            "/v2/models/flowers/infer",
            json={"inputs": [{"name": "features", "shape": [1, 3], "datatype": "FP32", "data": case[0].tolist()}]},
        ).json()["outputs"]
        assert [each["data"] for each in outputs if each["name"] == "scores"] == [case[1].ravel().tolist()]


@pytest.mark.parametrize("names", [("inference.pdmodel", "inference.pdiparams"), ("INF.PDMODEL", "INF.PDIPARAMS")])
def test_a_paddle_model_is_served_by_either_of_its_files(tmp_path: Path, names: tuple[str, str]) -> None:
    (layer,) = layers()
    write_model(tmp_path, layer)
    for old, new in zip(("inference.pdmodel", "inference.pdiparams"), names, strict=True):
        (tmp_path / old).rename(tmp_path / new)
    values = np.ones((1, layer.weights.shape[0]), np.float32)
    with serving_in_thread(**settings_of(tmp_path / names[1]).model_dump(exclude_unset=True)) as server:
        assert np.allclose(_infer(server, Path(names[0]).stem, values), layer.of(values))


@pytest.mark.parametrize("form", ["mine", "mine/", "./mine", "../models/mine", "mine/../mine", ".\\mine"])
def test_a_model_folder_is_served_by_any_spelling_of_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    ir.save(ir.dummy(), tmp_path / "models", "mine", 1)
    ir.save(ir.dummy(addend=2), tmp_path / "models", "mine", 2)
    monkeypatch.chdir(tmp_path / "models")
    _check_answer(form, "mine", (ADDED[0], ADDED[0] + 2), "2")


def test_a_dot_is_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _onnx(tmp_path / "current" / "whatever.onnx")
    monkeypatch.chdir(tmp_path / "current")
    _check_answer(".", "current", RELU)


def test_a_version_folder_is_served_as_that_version_of_its_model(tmp_path: Path) -> None:
    for version, addend in ((1, 1), (2, 2)):
        ir.save(ir.dummy(addend=addend), tmp_path, "mine", version)
    with serving_in_thread(**settings_of(tmp_path / "mine" / "1").model_dump(exclude_unset=True)) as server:
        assert np.array_equal(_infer(server, "mine", ADDED[0]), ADDED[1])
        assert server.ask("GET", "/v2/models/mine").json()["versions"] == ["1"]


def test_a_model_path_that_is_a_version_folder_is_served_as_that_version(tmp_path: Path) -> None:
    ir.save(ir.dummy(), tmp_path, "mine", 3)
    with serving_in_thread(model_name="other", model_path=tmp_path / "mine/3") as server:
        assert np.array_equal(_infer(server, "other", ADDED[0], "3"), ADDED[1])


def test_versions_added_to_a_folder_without_versions_take_over(tmp_path: Path) -> None:
    _onnx(tmp_path / "mine" / "net.onnx")
    with serving_in_thread(
        **settings_of(tmp_path / "mine", file_system_poll_wait_seconds=0.05).model_dump(exclude_unset=True)
    ) as server:
        assert np.array_equal(_infer(server, "mine", RELU[0], "1"), RELU[1])
        _onnx(tmp_path / "new" / "net.onnx")
        (tmp_path / "new").rename(tmp_path / "mine" / "2")
        until(lambda: server.ask("GET", "/v2/models/mine/versions/2/ready").is_success)
        assert np.array_equal(_infer(server, "mine", RELU[0], "2"), RELU[1])


def test_links_are_served_under_their_own_names(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    _onnx(tmp_path / "blobs" / "net.onnx").rename(tmp_path / "blobs" / "ab12")
    (tmp_path / "linked.onnx").symlink_to("blobs/ab12")
    _check_answer(tmp_path / "linked.onnx", "linked", RELU)
    _onnx(tmp_path / "real.onnx")
    (tmp_path / "latest").symlink_to("real.onnx")
    _check_answer(tmp_path / "latest", "latest", RELU)
    ir.save(ir.dummy(), tmp_path, "mine")
    (tmp_path / "folder").symlink_to("mine")
    _check_answer(tmp_path / "folder", "folder", ADDED)


def _repository(folder: Path) -> Path:
    ir.save(ir.dummy(), folder, "mine")
    ir.save(ir.dummy(addend=2), folder / "company", "theirs")
    _onnx(folder / "flat" / "net.onnx")
    (folder / "flat" / "config.pbtxt").touch()
    _write_graph(folder / "upper")
    write_project(folder / "adder", HANDLER)
    _write_ops(folder / "ops", "web_service.py")
    (folder / "notes").mkdir()
    (folder / "notes" / "README.md").touch()
    (folder / ".git" / "1").mkdir(parents=True)
    return folder


def _write_graph(folder: Path) -> Path:
    folder.mkdir()
    (folder / "node.py").write_text(NODE)
    (folder / "graph.pbtxt").write_text(graph_text(python_node("node.py", ["IN:in"], ["OUT:out"])))
    return folder


def _write_ops(folder: Path, *scripts: str) -> Path:
    folder.mkdir()
    (folder / "config.yml").write_text("worker_num: 4\nlogging: {enabled: false}\n")
    for script in scripts:
        (folder / script).write_text(OPS)
    return folder


def _upper(server: ServedInThread, name: str) -> bytes:
    tensor = {"name": "in", "shape": [1], "datatype": "BYTES", "data": ["abc"]}
    answer = server.ask("POST", f"/v2/models/{name}/infer", json={"inputs": [tensor]}).raise_for_status().json()
    return bytes(answer["outputs"][0]["data"])


def test_all_folders_of_a_repository_are_served_and_follow_its_changes(tmp_path: Path) -> None:
    folder = _repository(tmp_path / "repository")
    settings = settings_of(folder, file_system_poll_wait_seconds=0.05).model_dump(exclude_unset=True)
    with serving_in_thread(**settings) as server:
        assert np.array_equal(_infer(server, "mine", ADDED[0]), ADDED[1])
        assert np.array_equal(_infer(server, "company%2Ftheirs", ADDED[0]), ADDED[1] + 1)
        assert np.array_equal(_infer(server, "flat", RELU[0]), RELU[1])
        assert _upper(server, "upper") == b"\x03\x00\x00\x00ABC"
        assert server.ask("POST", "/adder", json=[1, 2, 3]).json() == 6
        answer = server.ask("POST", "/ops/prediction", json={"key": ["x"], "value": ["abc"]}).json()
        assert answer["value"] == ["first abc"]
        listed = server.ask("POST", "/v2/repository/index", json={}).json()
        assert {each["name"] for each in listed} == {"mine", "company/theirs", "flat", "upper", "adder", "ops"}
        _onnx(tmp_path / "later" / "net.onnx")
        (tmp_path / "later").rename(folder / "later")
        until(lambda: server.ask("GET", "/v2/models/later/ready").is_success)
        assert np.array_equal(_infer(server, "later", RELU[0]), RELU[1])
        shutil.rmtree(folder / "flat")
        until(lambda: server.ask("GET", "/v2/models/flat").status_code == 404)


@pytest.mark.parametrize("path", ["upper", "upper/graph.pbtxt"])
def test_a_graph_is_served_under_the_name_of_its_folder(tmp_path: Path, path: str) -> None:
    _write_graph(tmp_path / "upper")
    with serving_in_thread(**settings_of(tmp_path / path).model_dump(exclude_unset=True)) as server:
        assert _upper(server, "upper") == b"\x03\x00\x00\x00ABC"


@pytest.mark.parametrize("path", ["config.json", "."])
def test_a_configuration_is_served_by_its_file_or_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    base = ir.save(ir.dummy(), tmp_path, "mine")
    content = {"model_config_list": [{"config": {"name": "called", "base_path": str(base)}}]}
    (tmp_path / "config.json").write_text(json.dumps(content))
    monkeypatch.chdir(tmp_path)
    _check_answer(path, "called", ADDED)


def test_entries_with_paths_that_no_file_can_have_leave_the_others_served(tmp_path: Path) -> None:
    _onnx(tmp_path / "good/1/model.onnx")
    for path in ("\0", "x" * 300, "http://[/x"):
        graph = {"name": "g", "base_path": "good", "graph_path": path}
        document = {
            "model_config_list": [
                {"config": {"name": name, "base_path": p}} for name, p in (("good",) * 2, ("m", path))
            ],
            "mediapipe_config_list": [graph, {"name": "b", "base_path": path}, {**graph, "name": "p", "python": path}],
            "custom_node_library_config_list": [{"name": "l", "base_path": path}],
            "handler_config_list": [{"name": "h", "path": path}],
            "op_pipeline_config_list": [{"name": "o", "path": path}],
            "text_model_config_list": [{"config": {"name": "t", "base_path": path}}],
        }
        (tmp_path / "config.json").write_text(json.dumps(document))
        with serving_in_thread(config_path=tmp_path / "config.json", ready_requires="started") as server:
            np.testing.assert_array_equal(_infer(server, "good", RELU[0]), RELU[1])
            assert server.ask("POST", "/v1/config/reload").status_code in {412, 500}
            np.testing.assert_array_equal(_infer(server, "good", RELU[0]), RELU[1])


def test_a_text_model_is_served_by_its_folder_its_file_or_its_configuration(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "tiny-llm")
    assert [find_target(folder / path).name for path in (".", "config.json")] == ["tiny-llm"] * 2
    (tmp_path / "Some.Model-Q8_0").mkdir()
    file = write_tiny_gguf(tmp_path / "Some.Model-Q8_0" / "weights.gguf")
    assert [find_target(path).name for path in (file, file.parent)] == ["weights", "Some.Model-Q8_0"]
    with serving_in_thread(**settings_of(folder).model_dump(exclude_unset=True)) as server:
        asked = {"model": "tiny-llm", "prompt": "a", "max_tokens": 3, "temperature": 0}
        answer = server.ask("POST", "/v3/completions", json=asked).raise_for_status().json()
        assert answer["usage"]["completion_tokens"] == 3


async def test_a_program_serves_a_path(tmp_path: Path) -> None:
    file = _onnx(tmp_path / "model.onnx")
    async with trio.open_nursery() as nursery:
        settings = settings_of(file, port=0, rest_port=0, rest_bind_address=f"unix:{tmp_path}/rest")
        running: Running = await nursery.start(serve, settings)
        with trio.fail_after(60):
            await running.wait_loaded()
        assert running.plane.registry.available_versions("model") == [1]
        nursery.cancel_scope.cancel()
    with pytest.raises(ConfigError, match="no such file or directory"):
        await serve(tmp_path / "nothing.onnx")


def _found(report: Any) -> list[tuple[str, int]]:
    return [(each.model, each.version) for each in report.loaded]


async def test_what_is_served_is_what_is_checked(tmp_path: Path) -> None:
    folder = _repository(tmp_path / "repository")
    for path, loaded in {
        "mine": [("mine", 1)],
        "mine/1": [("mine", 1)],
        "flat": [("flat", 1)],
        "flat/net.onnx": [("net", 1)],
        "upper": [("upper", 1)],
        "upper/graph.pbtxt": [("upper", 1)],
        "adder": [("adder", 1)],
        "company": [("theirs", 1)],
        ".": [(name, 1) for name in ("adder", "company/theirs", "flat", "mine", "ops", "upper")],
    }.items():
        report = await check_config(folder / path)
        assert (_found(report), report.errors) == (loaded, ()), path


async def test_paths_that_cannot_be_looked_up_are_problems_of_a_check(tmp_path: Path) -> None:
    (tmp_path / "circle").symlink_to("circle")
    entries = [{"name": f"h{number}", "path": path} for number, path in enumerate(("x" * 300, "circle", "nowhere"))]
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_config_list": [], "handler_config_list": entries}))
    report = await check_config(config, imports=False)
    assert len({problem.path for problem in report.errors}) >= len(entries) - 1
    assert any("File name too long" in str(problem) for problem in report.errors)


@pytest.mark.parametrize(
    ("path", "message", "hint"),
    [
        ("nothing", "no such file or directory", ""),
        ("mine.onx", "no such file or directory", "did you mean 'mine.onnx'?"),
        ("lost", "the link leads nowhere", ""),
        ("empty", "the folder has nothing to serve", "copy a model there"),
        ("several", "several models in one folder", "choose one: ovms serve {}/several/a.onnx"),
        ("mixed", "several models in one folder", "choose one: ovms serve {}/mixed/a.onnx"),
        ("alone", "no model found", "model.xml needs model.bin in the same directory"),
        ("versions", "no model found", "model.xml needs model.bin in the same directory"),
        ("waiting", "the folder has nothing to serve", "copy a model into {}/waiting/1"),
        ("pipe", "the path cannot be served", ""),
        ("paddle3", "the folder has nothing to serve", "FLAGS_enable_pir_api=0"),
        ("paddle3/inference.json", "the model is in the format of Paddle 3", "FLAGS_enable_pir_api=0"),
        ("paddle3/inference.pdiparams", "the model is in the format of Paddle 3", "FLAGS_enable_pir_api=0"),
        ("torch/net.pt", "the file cannot be served", "ovms prepare {}/torch/net.pt"),
        ("torch", "the folder has nothing to serve", "ovms prepare {}/torch/net.pt"),
        ("notes.txt", "the file cannot be served", ""),
        ("alone/model.bin", "the file cannot be served", "model.bin needs model.xml in the same folder"),
        ("config.pbtxt", "the file is a configuration of Triton", "serve its folder"),
    ],
)
def test_a_path_that_cannot_be_served_is_refused_with_what_was_found_and_a_fix(
    tmp_path: Path, path: str, message: str, hint: str
) -> None:
    for file in ("mine.onnx", "several/a.onnx", "several/b.onnx", "mixed/a.onnx", "mixed/b/b.onnx"):
        _onnx(tmp_path / file)
    for name in ("empty", "alone", "versions/1", "waiting/1", "paddle3", "torch"):
        (tmp_path / name).mkdir(parents=True)
    for file in ("notes.txt", "torch/net.pt", "paddle3/inference.json", "paddle3/inference.pdiparams", "config.pbtxt"):
        (tmp_path / file).touch()
    (tmp_path / "versions/1/model.xml").touch()
    (tmp_path / "alone" / ("model.bin" if path.startswith("alone/") else "model.xml")).touch()
    (tmp_path / "lost").symlink_to("nowhere")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError) as caught:
        find_target(tmp_path / path)
    (problem,) = caught.value.problems
    assert problem.message.startswith(message)
    assert hint.format(tmp_path) in problem.suggestion
    assert problem.expected


def test_an_empty_path_is_not_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _onnx(tmp_path / "mine.onnx")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="the path is empty"):
        find_target("")


def test_a_folder_of_very_many_folders_is_no_repository(tmp_path: Path) -> None:
    for number in range(50):
        for other in range(50):
            (tmp_path / f"{number}" / f"{other}").mkdir(parents=True)
    with pytest.raises(ConfigError, match="too many folders for a repository of models"):
        find_target(tmp_path)


def test_a_script_of_a_pipeline_of_ops_is_found_or_asked_for(tmp_path: Path) -> None:
    one = _write_ops(tmp_path / "one", "serve_it.py")
    (one / "client.py").write_text("import requests\n")
    assert find_target(one).script == one / "serve_it.py"
    assert find_target(one / "config.yml").script == one / "serve_it.py"
    default = _write_ops(tmp_path / "default", "web_service.py", "other.py")
    assert find_target(default).script == default / "web_service.py"
    with pytest.raises(ConfigError, match=r"several scripts .* found a\.py, b\.py\); choose one: --service .*a\.py"):
        find_target(_write_ops(tmp_path / "several", "a.py", "b.py")).script  # noqa: B018 - raises
    none = _write_ops(tmp_path / "none")
    (none / "config.yml").write_text("http_port: 9999\n")
    with pytest.raises(ConfigError, match="script of the pipeline of Ops is missing"):
        find_target(none).script  # noqa: B018 - raises


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("s3://bucket/models/mine", "mine"),
        ("hf://org/Qwen3-8B@main", "Qwen3-8B"),
        ("https://a.b/net.v2.onnx", "net.v2"),
    ],
)
def test_an_address_is_passed_on_with_a_name(address: str, name: str) -> None:
    target = find_target(address)
    assert (target.name, target.options["model_path"]) == (name, address)


def test_names_that_cannot_be_served_are_replaced(tmp_path: Path) -> None:
    assert find_target(_onnx(tmp_path / "a:b\nc.onnx")).name == "a_b_c"
    assert find_target(_onnx(tmp_path / "...onnx")).name == "model"


def test_a_repository_names_the_folders_that_are_left_out(tmp_path: Path) -> None:
    _onnx(tmp_path / "good" / "net.onnx")
    for name in "ab":
        _onnx(tmp_path / "bad" / f"{name}.onnx")
    (skipped,) = find_target(tmp_path).skipped
    assert (skipped.file, skipped.message) == (str(tmp_path / "bad"), "several models in one folder")
    _check_answer(tmp_path, "good", RELU)


def test_a_model_named_as_the_path_of_statistics_has_its_metadata_there(tmp_path: Path) -> None:
    _check_answer(_onnx(tmp_path / "stats.onnx"), "stats", RELU)
