from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import pytest
from tritonclient.utils import InferenceServerException

from tests.support import ir
from tests.support.api_clients import INTERFACES, triton_module
from tests.support.onnx_files import onnx_external_file, onnx_loss_file
from tests.support.pipelines import pipeline_entry
from tests.support.served_in_thread import ServedInThread, serving_in_thread
from tests.support.system_servers import write_config

X = np.arange(10, dtype=np.float32).reshape(1, 10)


def _write_config(folder: Path) -> Path:
    names = ("simple", "first", "callee")
    models = [{"name": name, "base_path": str(ir.save(ir.dummy(), folder / "repository", name))} for name in names]
    ir.save(ir.dummy(), folder / "repository", "simple", 2)
    return write_config(folder, *models, pipeline_config_list=[pipeline_entry("dag", "callee")])


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServedInThread]:
    (tmp_path / "scratch").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "scratch"))
    monkeypatch.setattr("tempfile.tempdir", None)
    config = _write_config(tmp_path)
    with serving_in_thread(config_path=config, model_control="explicit", load_model="first") as running:
        yield running


@pytest.fixture(params=INTERFACES)
def client(server: ServedInThread, request: pytest.FixtureRequest) -> Iterator[Any]:
    module = triton_module(request.param)
    address = server.grpc if request.param == "grpc" else server.http
    with module.InferenceServerClient(address) as made:
        made.module = module
        yield made


def _infer(client: Any, model: str, version: str = "") -> Any:
    given = client.module.InferInput("b", list(X.shape), "FP32")
    given.set_data_from_numpy(X)
    return client.infer(model, [given], model_version=version).as_numpy("a")


def _states(client: Any) -> dict[tuple[str, str], str]:
    index = client.get_model_repository_index()
    entries = [(each.name, each.version, each.state) for each in index.models] if hasattr(index, "models") else None
    entries = entries or [(each["name"], each["version"], each["state"]) for each in index]
    return {(name, version): state for name, version, state in entries}


def _refusal(work: Callable[[], Any]) -> str:
    with pytest.raises(InferenceServerException) as refused:
        work()
    return str(refused.value.message())


def _model_files(addend: int, tmp_path: Path) -> dict[str, bytes]:
    ov.save_model(ir.dummy((-1, 10), addend=addend), tmp_path / "made.xml", compress_to_fp16=False)
    return {f"file:1/made{suffix}": (tmp_path / f"made{suffix}").read_bytes() for suffix in (".xml", ".bin")}


def test_models_are_loaded_and_unloaded_by_name(client: Any) -> None:
    assert client.is_server_ready()
    assert _states(client) == {
        ("first", "1"): "READY",
        ("callee", ""): "UNAVAILABLE",
        ("dag", ""): "UNAVAILABLE",
        ("simple", ""): "UNAVAILABLE",
    }
    assert not client.is_model_ready("simple")
    client.load_model("simple")
    assert client.is_model_ready("simple")
    np.testing.assert_array_equal(_infer(client, "simple"), X + 1)
    client.unload_model("simple")
    assert not client.is_model_ready("simple")
    assert _states(client)["simple", "2"] in {"UNAVAILABLE", "UNLOADING"}
    assert "not found" in _refusal(lambda: _infer(client, "simple"))
    client.load_model("simple")
    np.testing.assert_array_equal(_infer(client, "simple"), X + 1)


def test_settings_of_a_load_request_replace_the_configured_ones(client: Any) -> None:
    client.load_model("simple", config='{"max_batch_size": "16", "name": "simple", "backend": "onnxruntime"}')
    configured = client.get_model_config("simple")
    rows = configured["max_batch_size"] if isinstance(configured, dict) else configured.config.max_batch_size
    assert rows == 16
    client.load_model("simple", config=json.dumps({"version_policy": {"specific": {"versions": [1]}}, "nireq": 2}))
    ready = {key for key, state in _states(client).items() if state == "READY"}
    assert ready == {("first", "1"), ("simple", "1")}
    client.load_model("simple")
    np.testing.assert_array_equal(_infer(client, "simple", "2"), X + 1)


@pytest.mark.parametrize(
    ("config", "files", "expected"),
    [
        ('"parameters": {"config": {{"max_batch_size": "16"}}}', None, "failed to load"),
        ("[]", None, "a JSON object"),
        ('{"max_batch_size": -1}', None, "config.max_batch_size"),
        ('{"max_batch_size": true}', None, "config.max_batch_size"),
        ('{"nireqs": 2}', None, "unknown key 'nireqs'; did you mean 'nireq'?"),
        (json.dumps({f"nireq{number}": 2 for number in range(1000)}), None, "unknown key 'nireq7'"),
        ('{"nireq": "many"}', None, "nireq"),
        ('{"version_policy": {"newest": {}}}', None, "unknown policy 'newest'"),
        ('{"target_device": "NOWHERE"}', None, "failed to load"),
        ("{}", ["file:" + "A" * 256], "failed to load"),
        ("{}", ["file:../1/model.xml"], "failed to load"),
        ("{}", ["file:/etc/model.xml"], "failed to load"),
        ("{}", ["file:1/../../model.xml"], "failed to load"),
        ("{}", ["file:1//model.xml"], "failed to load"),
        ("{}", ["file:" + "a/" * 20 + "b"], "failed to load"),
        ("{}", ["file:1/model.xml"], "failed to load"),
        (None, ["file:1/model.xml"], "failed to load"),
    ],
)
def test_invalid_load_request_changes_nothing(
    client: Any, tmp_path: Path, config: str | None, files: list[str] | None, expected: str
) -> None:
    client.load_model("simple")
    contents = files and dict.fromkeys(files, b"no model")
    text = _refusal(lambda: client.load_model("simple", config=config, files=contents))
    assert expected in text
    assert files or text.startswith('failed to load "simple"')
    np.testing.assert_array_equal(_infer(client, "simple"), X + 1)
    assert list((tmp_path / "scratch").glob("ovmstrio-loaded-*")) == []


def test_settings_beyond_the_limit_are_refused_unread(client: Any) -> None:
    text = _refusal(lambda: client.load_model("simple", config=json.dumps({"nireq": "x" * 70_000})))
    assert text == "the parameter config: expected at most 65536 characters, got 70013"


def test_files_of_a_load_request_are_served_and_removed_with_their_model(client: Any, tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    files = _model_files(5, tmp_path)
    client.load_model("added", config="{}", files=files)
    np.testing.assert_array_equal(_infer(client, "added"), X + 5)
    client.load_model("simple", config="{}", files=files)
    np.testing.assert_array_equal(_infer(client, "simple"), X + 5)
    client.load_model("added", config="{}", files=_model_files(7, tmp_path))
    np.testing.assert_array_equal(_infer(client, "added"), X + 7)
    assert len(list(scratch.glob("ovmstrio-loaded-*"))) == 2
    client.load_model("simple")
    client.unload_model("added")
    np.testing.assert_array_equal(_infer(client, "simple"), X + 1)
    assert list(scratch.glob("ovmstrio-loaded-*")) == []
    assert "added" not in {name for (name, _), state in _states(client).items() if state == "READY"}


@pytest.mark.parametrize(
    "location", ["secret", "/secret", "../secret", "*/_ORT_MEM_ADDR_/*"], ids=["relative", "absolute", "up", "memory"]
)
def test_model_of_a_load_request_reads_no_file_of_the_server(
    client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, location: str
) -> None:
    (tmp_path / "secret").write_bytes(np.ones(3, np.float32).tobytes())
    monkeypatch.chdir(tmp_path)
    location = location.replace("/secret", f"{tmp_path}/secret") if location == "/secret" else location
    files = {"file:1/model.onnx": onnx_loss_file(weights=location)}
    text = _refusal(lambda: client.load_model("added", config="{}", files=files))
    assert 'external data of tensor "weights"' in text
    content = onnx_external_file(location="data/weights")
    weights = np.arange(4, dtype=np.float32).tobytes()
    client.load_model("added", config="{}", files={"file:1/model.onnx": content, "file:1/data/weights": weights})
    assert client.is_model_ready("added")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("CACHE_DIR", "{}"),
        ("cache_dir", "cache"),
        ("CACHE_PATH", "{}"),
        ("WEIGHTS_PATH", "/etc/passwd"),
        ("CONFIG_FILE", "kernels.xml"),
        ("NPUW_DUMP_SUBS_DIR", "dump"),
        ("NPUW_PLAN", "plan.xml"),
        ("DEVICE_PROPERTIES", "{{CPU:{{CACHE_DIR:{}}}}}"),
        ("DEVICE_PROPERTIES_CPU", "{{ CACHE_DIR : cache }}"),
        ("CPU.CACHE_DIR", "cache"),
        ("NUM_STREAMS", "{}"),
    ],
)
@pytest.mark.parametrize("has_files", [True, False])
def test_settings_of_a_load_request_name_no_path(
    client: Any, tmp_path: Path, name: str, value: str, *, has_files: bool
) -> None:
    place = tmp_path / "made"
    files = _model_files(5, tmp_path) if has_files else None
    config = json.dumps({"plugin_config": {name: value.format(place)}, "target_device": "HETERO:CPU"})
    text = _refusal(lambda: client.load_model("simple", config=config, files=files))
    assert "only the server's own configuration may set it" in text
    assert "CACHE_DIR" in text if "CACHE_DIR" in name + value else name.upper() in text.upper()
    assert not place.exists()


def test_settings_of_a_load_request_may_tune_a_model(client: Any) -> None:
    properties = {"PERFORMANCE_HINT": "THROUGHPUT", "NUM_STREAMS": 2, "INFERENCE_PRECISION_HINT": "f32"}
    client.load_model("simple", config=json.dumps({"plugin_config": properties}))
    np.testing.assert_array_equal(_infer(client, "simple"), X + 1)


def test_models_of_a_pipeline_are_loaded_and_unloaded_with_it(client: Any) -> None:
    client.load_model("dag")
    np.testing.assert_array_equal(_infer(client, "dag"), X + 1)
    assert _states(client)["callee", "1"] == "READY"
    client.unload_model("dag", unload_dependents=True)
    assert _states(client)["callee", "1"] in {"UNAVAILABLE", "UNLOADING"}


def test_load_request_loads_changed_files(client: Any, tmp_path: Path) -> None:
    client.load_model("simple")
    for suffix, content in ((name.rpartition(".")[2], data) for name, data in _model_files(9, tmp_path).items()):
        (file,) = (tmp_path / "repository" / "simple" / "2").glob(f"*.{suffix}")
        file.write_bytes(content)
    np.testing.assert_array_equal(_infer(client, "simple"), X + 1)
    client.load_model("simple")
    np.testing.assert_array_equal(_infer(client, "simple"), X + 9)


def test_unknown_names_and_parameters_are_refused(client: Any, server: ServedInThread) -> None:
    assert "failed to load" in _refusal(lambda: client.load_model("wrong_model_name"))
    assert "failed to unload" in _refusal(lambda: client.unload_model("wrong_model_name"))
    answer = server.ask("POST", "/v2/repository/models/simple/load", json={"parameters": {"confg": "{}"}})
    assert (answer.status_code, "'confg' is not known" in answer.text) == (400, True)
    answer = server.ask("POST", "/v2/repository/models/simple/load", json={"parameters": {"file:1/x": "no base64!"}})
    assert (answer.status_code, "as base64" in answer.text) == (400, True)


def test_load_requests_are_refused_without_explicit_model_control(tmp_path: Path) -> None:
    base = ir.save(ir.dummy(), tmp_path, "m")
    with serving_in_thread(model_name="m", model_path=base) as running:
        for verb in ("load", "unload"):
            answer = running.ask("POST", f"/v2/repository/models/m/{verb}", json={})
            assert (answer.status_code, "--model-control explicit" in answer.text) == (412, True)
        assert "model_repository" not in running.ask("GET", "/v2").json()["extensions"]
