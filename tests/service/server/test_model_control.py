"""Loading and unloading by name, as Triton's clients do it, under ``--model_control explicit``."""

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
from tests.support.api_clients import DOORS, triton_module
from tests.support.onnx_files import onnx_external_file, onnx_loss_file
from tests.support.served_in_thread import ServedInThread, serving_in_thread

X = np.arange(10, dtype=np.float32).reshape(1, 10)


def write_config(folder: Path) -> Path:
    """Configure ``simple`` in two versions, ``first``, and a pipeline ``dag`` that calls ``callee``."""
    entries = []
    for name in ("simple", "first", "callee"):
        base = ir.save(ir.dummy(), folder / "repository", name)
        entries.append({"config": {"name": name, "base_path": str(base)}})
    ir.save(ir.dummy(), folder / "repository", "simple", 2)
    node = {
        "name": "node",
        "type": "DL model",
        "model_name": "callee",
        "inputs": [{"b": {"node_name": "request", "data_item": "b"}}],
        "outputs": [{"data_item": "a", "alias": "a"}],
    }
    dag = {
        "name": "dag",
        "inputs": ["b"],
        "nodes": [node],
        "outputs": [{"a": {"node_name": "node", "data_item": "a"}}],
    }
    config = folder / "config.json"
    config.write_text(json.dumps({"model_config_list": entries, "pipeline_config_list": [dag]}))
    return config


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServedInThread]:
    """Serve so that ``first`` is loaded at the start; files of requests go below the test's folder."""
    (tmp_path / "scratch").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "scratch"))
    monkeypatch.setattr("tempfile.tempdir", None)
    config = write_config(tmp_path)
    with serving_in_thread(config_path=config, model_control="explicit", load_model="first") as running:
        yield running


@pytest.fixture(params=DOORS)
def client(server: ServedInThread, request: pytest.FixtureRequest) -> Iterator[Any]:
    """Give a client of tritonclient's, of either door."""
    module = triton_module(request.param)
    address = server.grpc if request.param == "grpc" else server.http
    with module.InferenceServerClient(address) as made:
        made.module = module
        yield made


def infer(client: Any, model: str, version: str = "") -> Any:
    """Ask a model that adds to its input."""
    given = client.module.InferInput("b", list(X.shape), "FP32")
    given.set_data_from_numpy(X)
    return client.infer(model, [given], model_version=version).as_numpy("a")


def listed(client: Any) -> dict[tuple[str, str], str]:
    """Give the state of each version in the index."""
    index = client.get_model_repository_index()
    entries = [(each.name, each.version, each.state) for each in index.models] if hasattr(index, "models") else None
    entries = entries or [(each["name"], each["version"], each["state"]) for each in index]
    return {(name, version): state for name, version, state in entries}


def refusal(work: Callable[[], Any]) -> str:
    """Give the text of the error that a call ends with."""
    with pytest.raises(InferenceServerException) as refused:
        work()
    return str(refused.value.message())


def onnx_like(offset: float, tmp_path: Path) -> dict[str, bytes]:
    """Make the files of a model that adds something else than one."""
    import openvino.opset13 as op

    b = op.parameter([-1, 10], ov.Type.f32)
    b.output(0).set_names({"b"})
    a = op.add(b, op.constant(np.float32(offset)))
    a.output(0).set_names({"a"})
    ov.save_model(ov.Model([op.result(a)], [b]), tmp_path / "made.xml", compress_to_fp16=False)
    return {f"file:1/made{suffix}": (tmp_path / f"made{suffix}").read_bytes() for suffix in (".xml", ".bin")}


def test_nothing_is_loaded_before_it_is_asked_for(client: Any) -> None:
    """The server is ready with what it was told to begin with; the index has what could be loaded."""
    assert client.is_server_ready()
    assert listed(client) == {
        ("first", "1"): "READY",
        ("callee", ""): "UNAVAILABLE",
        ("dag", ""): "UNAVAILABLE",
        ("simple", ""): "UNAVAILABLE",
    }
    assert not client.is_model_ready("simple")
    client.load_model("simple")
    assert client.is_model_ready("simple")
    np.testing.assert_array_equal(infer(client, "simple"), X + 1)
    client.unload_model("simple")
    assert not client.is_model_ready("simple")
    assert listed(client)["simple", "2"] in {"UNAVAILABLE", "UNLOADING"}
    assert "not found" in refusal(lambda: infer(client, "simple"))
    client.load_model("simple")
    np.testing.assert_array_equal(infer(client, "simple"), X + 1)


def test_settings_may_come_with_the_request(client: Any) -> None:
    """Triton's words and those of config.json; another load without settings goes back to the configured ones."""
    client.load_model("simple", config='{"max_batch_size": "16", "name": "simple", "backend": "onnxruntime"}')
    told = client.get_model_config("simple")
    rows = told["max_batch_size"] if isinstance(told, dict) else told.config.max_batch_size
    assert rows == 16

    client.load_model("simple", config=json.dumps({"version_policy": {"specific": {"versions": [1]}}, "nireq": 2}))
    ready = {key for key, state in listed(client).items() if state == "READY"}
    assert ready == {("first", "1"), ("simple", "1")}

    client.load_model("simple")
    np.testing.assert_array_equal(infer(client, "simple", "2"), X + 1)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ('"parameters": {"config": {{"max_batch_size": "16"}}}', "failed to load"),
        ("[]", "a JSON object"),
        ('{"max_batch_size": -1}', "config.max_batch_size"),
        ('{"max_batch_size": true}', "config.max_batch_size"),
        ('{"nireqs": 2}', "unknown key 'nireqs'; did you mean 'nireq'?"),
        (json.dumps({f"nireq{number}": 2 for number in range(1000)}), "unknown key 'nireq7'"),
        ('{"nireq": "many"}', "nireq"),
        ('{"version_policy": {"newest": {}}}', "unknown policy 'newest'"),
        ('{"target_device": "NOWHERE"}', "failed to load"),
    ],
)
def test_settings_that_cannot_be_used_change_nothing(client: Any, config: str, expected: str) -> None:
    """What was served goes on, and the text says what is wrong."""
    client.load_model("simple")

    text = refusal(lambda: client.load_model("simple", config=config))

    assert text.startswith('failed to load "simple"')
    assert expected in text
    np.testing.assert_array_equal(infer(client, "simple"), X + 1)


def test_long_settings_are_refused_before_they_are_read(client: Any) -> None:
    """The reader of settings takes microseconds for each value."""
    text = refusal(lambda: client.load_model("simple", config=json.dumps({"nireq": "x" * 70_000})))
    assert text == "the parameter config: expected at most 65536 characters, got 70013"


def test_files_may_come_with_the_request(client: Any, tmp_path: Path) -> None:
    """A new name, the place of one that is configured, and back; no file is left when a model is gone."""
    scratch = tmp_path / "scratch"
    files = onnx_like(5, tmp_path)
    client.load_model("added", config="{}", files=files)
    np.testing.assert_array_equal(infer(client, "added"), X + 5)
    client.load_model("simple", config="{}", files=files)
    np.testing.assert_array_equal(infer(client, "simple"), X + 5)
    client.load_model("added", config="{}", files=onnx_like(7, tmp_path))
    np.testing.assert_array_equal(infer(client, "added"), X + 7)
    assert len(list(scratch.glob("ovmstrio-loaded-*"))) == 2

    client.load_model("simple")
    client.unload_model("added")

    np.testing.assert_array_equal(infer(client, "simple"), X + 1)
    assert list(scratch.glob("ovmstrio-loaded-*")) == []
    assert "added" not in {name for (name, _), state in listed(client).items() if state == "READY"}


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("file:" + "A" * 256, "{}"),
        ("file:../1/model.xml", "{}"),
        ("file:/etc/model.xml", "{}"),
        ("file:1/../../model.xml", "{}"),
        ("file:1//model.xml", "{}"),
        ("file:" + "a/" * 20 + "b", "{}"),
        ("file:1/model.xml", "{}"),
        ("file:1/model.xml", None),
    ],
)
def test_files_that_are_no_model_change_nothing(client: Any, tmp_path: Path, name: str, config: str | None) -> None:
    """Paths stay below the model's folder; what was served goes on, and nothing is left behind."""
    client.load_model("simple")

    text = refusal(lambda: client.load_model("simple", config=config, files={name: b"no model"}))

    assert "failed to load" in text
    np.testing.assert_array_equal(infer(client, "simple"), X + 1)
    assert list((tmp_path / "scratch").glob("ovmstrio-loaded-*")) == []


@pytest.mark.parametrize(
    "location", ["secret", "/secret", "../secret", "*/_ORT_MEM_ADDR_/*"], ids=["relative", "absolute", "up", "memory"]
)
def test_a_model_that_comes_with_the_request_reads_no_file_of_the_server(
    client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, location: str
) -> None:
    """Neither below the working directory, nor elsewhere, nor as an address in memory; weights that come along are."""
    (tmp_path / "secret").write_bytes(np.ones(3, np.float32).tobytes())
    monkeypatch.chdir(tmp_path)
    location = location.replace("/secret", f"{tmp_path}/secret") if location == "/secret" else location
    files = {"file:1/model.onnx": onnx_loss_file(weights=location)}

    text = refusal(lambda: client.load_model("added", config="{}", files=files))

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
def test_settings_that_come_with_the_request_name_no_path(
    client: Any, tmp_path: Path, name: str, value: str, *, has_files: bool
) -> None:
    """Whatever way the property is written; nothing is made there."""
    place = tmp_path / "made"
    files = onnx_like(5, tmp_path) if has_files else None
    config = json.dumps({"plugin_config": {name: value.format(place)}, "target_device": "HETERO:CPU"})

    text = refusal(lambda: client.load_model("simple", config=config, files=files))

    assert "only the server's own configuration may set it" in text
    assert "CACHE_DIR" in text if "CACHE_DIR" in name + value else name.upper() in text.upper()
    assert not place.exists()


def test_settings_that_come_with_the_request_may_tune_a_model(client: Any) -> None:
    """Properties that name no path are OpenVINO's matter."""
    properties = {"PERFORMANCE_HINT": "THROUGHPUT", "NUM_STREAMS": 2, "INFERENCE_PRECISION_HINT": "f32"}
    client.load_model("simple", config=json.dumps({"plugin_config": properties}))
    np.testing.assert_array_equal(infer(client, "simple"), X + 1)


def test_what_a_pipeline_calls_comes_and_goes_with_it(client: Any) -> None:
    """It is loaded with the pipeline; it stays when the pipeline goes, unless that takes it along."""
    client.load_model("dag")
    np.testing.assert_array_equal(infer(client, "dag"), X + 1)
    assert listed(client)["callee", "1"] == "READY"
    client.unload_model("dag", unload_dependents=True)
    assert listed(client)["callee", "1"] in {"UNAVAILABLE", "UNLOADING"}


def test_a_model_whose_files_changed_is_loaded_again(client: Any, tmp_path: Path) -> None:
    """Asking for it once more is enough."""
    client.load_model("simple")
    for suffix, content in ((name.rpartition(".")[2], data) for name, data in onnx_like(9, tmp_path).items()):
        (file,) = (tmp_path / "repository" / "simple" / "2").glob(f"*.{suffix}")
        file.write_bytes(content)
    np.testing.assert_array_equal(infer(client, "simple"), X + 1)

    client.load_model("simple")

    np.testing.assert_array_equal(infer(client, "simple"), X + 9)


def test_unknown_names_and_parameters_are_refused(client: Any, server: ServedInThread) -> None:
    """Triton's example looks for these words."""
    assert "failed to load" in refusal(lambda: client.load_model("wrong_model_name"))
    assert "failed to unload" in refusal(lambda: client.unload_model("wrong_model_name"))
    answer = server.ask("POST", "/v2/repository/models/simple/load", json={"parameters": {"confg": "{}"}})
    assert (answer.status_code, "'confg' is not known" in answer.text) == (400, True)
    answer = server.ask("POST", "/v2/repository/models/simple/load", json={"parameters": {"file:1/x": "no base64!"}})
    assert (answer.status_code, "as base64" in answer.text) == (400, True)


def test_a_server_that_follows_its_configuration_loads_nothing_by_name(tmp_path: Path) -> None:
    """The text names the option that lets clients do it; the extension is not listed."""
    base = ir.save(ir.dummy(), tmp_path, "m")
    with serving_in_thread(model_name="m", model_path=base) as running:
        for verb in ("load", "unload"):
            answer = running.ask("POST", f"/v2/repository/models/m/{verb}", json={})
            assert (answer.status_code, "--model_control explicit" in answer.text) == (412, True)
        assert "model_repository" not in running.ask("GET", "/v2").json()["extensions"]
