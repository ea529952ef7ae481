"""A Triton repository of real models, migrated and served: the same answers as the models give themselves."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import openvino as ov
import pytest

from tests.support import ir
from tests.support.commands import run_command
from tests.support.onnx_files import onnx_file
from tests.support.saved_models import write_classifier
from tests.support.served_in_thread import ServedInThread, serving_in_thread

X = np.array([[1, -2, 3, -4], [5, 6, -7, 8]], np.float32)

CONFIGS = {
    "adder": """
        name: "adder"
        backend: "openvino"
        max_batch_size: 8
        input [ { name: "b" data_type: TYPE_FP32 dims: [ 4 ] } ]
        output [ { name: "a" data_type: TYPE_FP32 dims: [ 4 ] } ]
        dynamic_batching { preferred_batch_size: [ 4 ] max_queue_delay_microseconds: 1000 }
        parameters: { key: "INFERENCE_NUM_THREADS" value: { string_value: "1" } }
    """,
    "re lu.v2": """
        platform: "onnxruntime_onnx"
        input { name: "x" data_type: TYPE_FP32 dims: [ 1, 4 ] }
        output { name: "y" data_type: TYPE_FP32 dims: [ 1, 4 ] }
    """,
    "classifier": 'platform: "tensorflow_savedmodel" max_batch_size: 4',
    "flat": 'backend: "openvino" max_batch_size: 4 input { name: "b" dims: [ 1 ] reshape: { shape: [ ] } }',
    "chosen": 'backend: "onnxruntime" default_model_filename: "second.onnx" version_policy { all { } }',
    "folder": 'backend: "onnxruntime"',
    "both": 'platform: "openvino" version_policy { specific { versions: [ 2 ] } }',
    "total": 'backend: "openvino" sequence_batching { oldest { max_candidate_sequences: 7 } }',
    "chain": """
        platform: "ensemble"
        max_batch_size: 8
        input [ { name: "IN" data_type: TYPE_FP32 dims: [ 4 ] } ]
        output [ { name: "OUT" data_type: TYPE_FP32 dims: [ 4 ] }, { name: "mid" data_type: TYPE_FP32 dims: [ 4 ] } ]
        ensemble_scheduling { step [
            { model_name: "adder" model_version: -1
              input_map { key: "b" value: "mid" } output_map { key: "a" value: "OUT" } },
            { model_name: "adder" model_version: 1
              input_map { key: "b" value: "IN" } output_map { key: "a" value: "mid" } }
        ] }
    """,
    "nested ensemble": """
        input [ { name: "IN" data_type: TYPE_FP32 dims: [ -1, 4 ] } ]
        output [ { name: "D" data_type: TYPE_FP32 dims: [ -1, 4 ] },
                 { name: "S" data_type: TYPE_FP32 dims: [ -1, 4 ] } ]
        ensemble_scheduling { step [
            { model_name: "chain" model_version: -1
              input_map { key: "IN" value: "IN" } output_map { key: "OUT" value: "plus two" } },
            { model_name: "both" model_version: 2
              input_map { key: "x" value: "plus two" } input_map { key: "y" value: "IN" }
              output_map { key: "difference" value: "D" } output_map { key: "sum" value: "S" } }
        ] }
    """,
}


def _write(repository: Path) -> None:
    ir.save(ir.dummy((-1, 4)), repository, "adder")
    ir.save(ir.sum_of_two((-1, 4)), repository, "both", 2)
    ir.save(ir.dummy((-1,)), repository, "flat")
    ir.save(ir.accumulator(), repository, "total")
    ir.save(ir.dummy((1, 4), addend=10), repository, "found")
    for name, files in {
        "re lu.v2": {"1/model.onnx": "Relu"},
        "chosen": {"1/first.onnx": "Abs", "1/second.onnx": "Neg", "3/second.onnx": "Relu"},
        "folder": {"1/model.onnx/model.onnx": "Abs"},
    }.items():
        for file, operation in files.items():
            (repository / name / file).parent.mkdir(parents=True, exist_ok=True)
            (repository / name / file).write_bytes(onnx_file(operation))
    write_classifier(repository / "classifier" / "1" / "model.savedmodel")
    for name, text in CONFIGS.items():
        (repository / name).mkdir(exist_ok=True)
        (repository / name / "config.pbtxt").write_text(text)


@pytest.fixture(scope="module")
def migrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("migrated")
    _write(folder / "repository")
    result = run_command("migrate", "triton", str(folder / "repository"), "--output", str(folder / "new"), "--json")
    assert result.exit_code == 0, result.output
    assert all(each["reason"] is None for each in json.loads(result.stdout)["models"])
    return folder / "new" / "config.json"


@pytest.fixture(scope="module")
def served(migrated: Path) -> Iterator[ServedInThread]:
    with serving_in_thread(config_path=migrated) as server:
        yield server


def _infer(server: ServedInThread, name: str, inputs: dict[str, Any], version: int | None = None) -> dict[str, Any]:
    tensors = [
        {"name": key, "datatype": "FP32", "shape": list(value.shape), "data": value.ravel().tolist()}
        for key, value in inputs.items()
    ]
    path = f"/v2/models/{quote(name)}" + (f"/versions/{version}" if version else "")
    response = server.ask("POST", f"{path}/infer", json={"inputs": tensors})
    assert response.status_code == 200, response.text
    return {each["name"]: np.array(each["data"]).reshape(each["shape"]) for each in response.json()["outputs"]}


def test_the_migrated_configuration_passes_the_check(migrated: Path) -> None:
    result = run_command("check", str(migrated), "--strict")
    assert result.exit_code == 0, result.output
    for name in ("adder", "re lu.v2", "classifier", "folder", "total", "chain", "nested ensemble", "found"):
        assert f"loads  {name} version 1" in result.stdout
    assert "chosen version 3" in result.stdout
    assert "both version 2" in result.stdout


@pytest.mark.parametrize("name", ["adder", "found"])
def test_a_served_model_answers_as_openvino_does(served: ServedInThread, migrated: Path, name: str) -> None:
    rows = X if name == "adder" else X[:1]
    compiled = ov.Core().compile_model(migrated.parents[1] / "repository" / name / "1" / "model.xml", "CPU")
    expected = compiled([rows])[0]
    np.testing.assert_array_equal(_infer(served, name, {"b": rows})["a"], expected)


def test_files_are_those_that_triton_serves(served: ServedInThread) -> None:
    row = X[:1]
    np.testing.assert_array_equal(_infer(served, "re lu.v2", {"x": row})["y"], np.maximum(row, 0))
    np.testing.assert_array_equal(_infer(served, "folder", {"x": row})["y"], np.abs(row))
    np.testing.assert_array_equal(_infer(served, "chosen", {"x": row}, 1)["y"], -row)
    np.testing.assert_array_equal(_infer(served, "chosen", {"x": row}, 3)["y"], np.maximum(row, 0))
    features = np.array([[1, 2, 3]], np.float32)
    metadata = served.ask("GET", "/v2/models/classifier").json()
    answer = _infer(served, "classifier", {metadata["inputs"][0]["name"]: features})
    np.testing.assert_array_equal(answer["scores"], features @ np.arange(6, dtype=np.float32).reshape(3, 2))


def test_ensembles_answer_as_their_steps_do_one_after_the_other(served: ServedInThread) -> None:
    once = _infer(served, "adder", {"b": X})["a"]
    twice = _infer(served, "adder", {"b": once})["a"]
    answer = _infer(served, "chain", {"IN": X})
    np.testing.assert_array_equal(answer["mid"], once)
    np.testing.assert_array_equal(answer["OUT"], twice)
    nested = _infer(served, "nested ensemble", {"IN": X})
    np.testing.assert_array_equal(nested["S"], 2 * X + 2)
    np.testing.assert_array_equal(nested["D"], np.full_like(X, 2))


def test_batches_are_limited_as_in_triton(served: ServedInThread) -> None:
    nine = np.ones((9, 4), np.float32)
    tensor = {"name": "b", "datatype": "FP32", "shape": [9, 4], "data": nine.ravel().tolist()}
    response = served.ask("POST", "/v2/models/adder/infer", json={"inputs": [tensor]})
    assert response.status_code == 400, response.text
    np.testing.assert_array_equal(_infer(served, "adder", {"b": nine[:8]})["a"], nine[:8] + 1)


def test_a_reshaped_input_has_the_shape_of_the_model(served: ServedInThread) -> None:
    np.testing.assert_array_equal(_infer(served, "flat", {"b": np.array([1, 2, 3])})["a"], [2, 3, 4])


def test_sequences_of_a_model_with_state_add_up(served: ServedInThread) -> None:
    sums = []
    for number in range(3):
        tensor = {"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [number, 1]}
        parameters = {"sequence_id": 5, "sequence_start": number == 0, "sequence_end": number == 2}
        body = {"inputs": [tensor], "parameters": parameters}
        response = served.ask("POST", "/v2/models/total/infer", json=body)
        sums += [each["data"] for each in response.json()["outputs"] if each["name"] == "y"]
    assert sums == [[0, 1], [1, 2], [3, 3]]


def test_only_the_report_is_printed(tmp_path: Path) -> None:
    folder = tmp_path / "repo" / "m"
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text('backend: "onnxruntime" default_model_filename: "net.onnx"')
    for name in ("a.onnx", "net.onnx"):
        (folder / "1" / name).write_bytes(onnx_file("Abs"))
    command = [sys.executable, "-m", "ovmstrio.cli", "migrate", "triton", "repo", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert json.loads(done.stdout)["output"] == "config.json"
    assert not done.stderr
