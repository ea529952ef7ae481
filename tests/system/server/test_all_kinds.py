"""One server, one ``config.json``, every kind of service: each called over its own protocols, by clients of its own."""

from __future__ import annotations

import json
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.utils import np_to_triton_dtype

from ovmstrio.protocol.pipeline_messages import METHOD, REQUEST, RESPONSE
from tests.support.all_kinds import NAMES, OPS, write_all_kinds
from tests.support.processes import OvmsProcess, serving

pytestmark = pytest.mark.e2e

PATIENCE_SECONDS = 30
ROW = np.arange(10, dtype=np.float32).reshape(1, 10)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Give a folder that is to have everything that is served."""
    return tmp_path


@pytest.fixture
def server(folder: Path) -> Iterator[OvmsProcess]:
    """Serve it all, with a log for programs; changes are seen at once."""
    options = ["--log_format", "json", "--file_system_poll_wait_seconds", "0.1"]
    with serving("--config_path", str(write_all_kinds(folder)), *options) as running:
        yield running


def _infer(server: OvmsProcess, name: str, given: str, wanted: str, array: np.ndarray[Any, Any]) -> Any:
    """Ask over KServe's gRPC and REST, which give the same."""
    tensor = tritonclient.grpc.InferInput(given, array.shape, np_to_triton_dtype(array.dtype))
    tensor.set_data_from_numpy(array)
    with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
        by_grpc = client.infer(name, [tensor], client_timeout=PATIENCE_SECONDS).as_numpy(wanted).tolist()
    data = [each.decode() for each in array.tolist()] if array.dtype == object else array.tolist()
    body = {"inputs": [{"name": given, "shape": array.shape, "datatype": tensor.datatype(), "data": data}]}
    answer = _post(server, f"/v2/models/{name}/infer", body)
    (output,) = answer["outputs"]
    assert output["name"] == wanted
    assert np.array(output["data"]).ravel().tolist() == [_text(each) for each in np.array(by_grpc).ravel().tolist()]
    return output["data"]


def _text(value: Any) -> Any:
    return value.decode() if isinstance(value, bytes) else value


def _post(server: OvmsProcess, path: str, body: Any) -> Any:
    answer = httpx.post(server.rest + path, json=body, timeout=PATIENCE_SECONDS, trust_env=False)
    assert answer.status_code == 200, answer.text
    return answer.json()


def _ask_ops_by_http(server: OvmsProcess, x: str) -> str:
    (value,) = _post(server, "/ops/prediction", {"key": ["x"], "value": [x]})["value"]
    return str(value)


def _ask_ops(server: OvmsProcess, x: str) -> str:
    """Ask over both protocols of Paddle Serving, which give the same."""
    by_http = _ask_ops_by_http(server, x)
    with grpc.insecure_channel(server.grpc) as channel:
        ask = channel.unary_unary(METHOD, REQUEST.SerializeToString, RESPONSE.FromString)
        answer = ask(REQUEST(key=["x"], value=[x], name="ops"), timeout=PATIENCE_SECONDS)
    assert list(answer.value) == [by_http]
    return by_http


def _ask_all(server: OvmsProcess) -> None:
    text = np.array([b"abc"], object)
    expected = (ROW + 1).ravel().tolist()
    assert np.ravel(_infer(server, "model", "b", "a", ROW)).tolist() == expected
    assert np.ravel(_infer(server, "dag", "b", "a", ROW)).tolist() == expected
    assert _infer(server, "graph", "in", "out", np.frombuffer(b"abc", np.uint8)) == list(b"ABC")
    assert _post(server, "/handler", [1, 2, 3]) == 6
    assert _ask_ops(server, "x") == "first x"
    assert _infer(server, "ops", "x", "y", text) == ["first abc"]


def test_each_is_called_over_its_own_protocols(server: OvmsProcess) -> None:
    """KServe's for what takes tensors, paths of their own for handlers and Ops, and Paddle Serving's gRPC."""
    _ask_all(server)


def test_a_stream_calls_whatever_takes_tensors(server: OvmsProcess) -> None:
    """One stream of Triton's client asks a model and a pipeline in turn, and gets the answers in that order."""
    tensor = tritonclient.grpc.InferInput("b", ROW.shape, "FP32")
    tensor.set_data_from_numpy(ROW)
    answers: SimpleQueue[Any] = SimpleQueue()
    with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
        client.start_stream(callback=lambda result, error: answers.put(error or result))
        for name in ("dag", "model", "dag"):
            client.async_stream_infer(name, [tensor])
        got = [answers.get(timeout=PATIENCE_SECONDS) for _ in range(3)]
        client.stop_stream()
    assert [each.get_response().model_name for each in got] == ["dag", "model", "dag"]
    assert all((each.as_numpy("a") == ROW + 1).all() for each in got)


def test_all_are_listed(server: OvmsProcess) -> None:
    """By KServe's index and by OVMS's state of the configuration, over gRPC and REST."""
    with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
        listed = client.get_model_repository_index(client_timeout=PATIENCE_SECONDS)
        assert {each.name: each.state for each in listed.models} == dict.fromkeys(NAMES, "READY")
    states = {
        name: [each["state"] for each in document["model_version_status"]]
        for name, document in server.get("/v1/config").json().items()
    }
    assert states == {name: ["AVAILABLE"] for name in NAMES}
    for name in NAMES:
        assert server.get(f"/v2/models/{name}/ready").status_code == 200


def _sum(metrics: str, family: str, name: str, **labels: str) -> float:
    """Add up a family's samples of a service."""
    wanted = {"name": name, **labels}
    return sum(
        float(value)
        for given, value in re.findall(rf"(?m)^{family}{{(.*?)}} (\S+)$", metrics)
        if wanted.items() <= dict(re.findall(r'(\w+)="(.*?)"', given)).items()
    )


def _count(metrics: str, family: str, **labels: str) -> float:
    """Add up how many values histograms have."""
    return sum(
        float(value)
        for given, value in re.findall(rf"(?m)^{family}_count{{(.*?)}} (\S+)$", metrics)
        if labels.items() <= dict(re.findall(r'(\w+)="(.*?)"', given)).items()
    )


def test_calls_of_each_are_counted(server: OvmsProcess) -> None:
    """By the server under each name, and by Ops in families of their own beside them."""
    _ask_all(server)
    metrics = server.get("/metrics").text
    inferred = {name: _sum(metrics, "ovms_requests_success", name, method="ModelInfer") for name in NAMES}
    assert inferred == {"model": 2, "dag": 2, "graph": 0, "handler": 0, "ops": 2}
    called = {name: _sum(metrics, "ovmstrio_requests_total", name, code="OK") for name in NAMES}
    assert called == {"model": 2, "dag": 2, "graph": 2, "handler": 1, "ops": 4}
    assert _sum(metrics, "ovms_requests_accepted", "graph") == 2
    assert _sum(metrics, "ovms_responses", "graph") == 2
    kinds = {"model": 2, "pipeline": 2, "graph": 2, "handler": 1, "op pipeline": 4}
    assert {kind: _count(metrics, "ovmstrio_request_time_us", kind=kind) for kind in kinds} == kinds
    assert _count(metrics, "ovmstrio_node_time_us", name="dag", node="node") == 2
    assert _count(metrics, "ovmstrio_node_time_us", name="graph", node="node") == 2
    assert 'pd_query_request_success_total{name="ops"} 4.0' in metrics.splitlines()
    assert metrics.count("# TYPE pd_query_request_success_total ") == 1


def _until(server: OvmsProcess, expected: str) -> None:
    """Ask over one protocol only, for a change may come between two."""
    ends = time.monotonic() + PATIENCE_SECONDS
    while _ask_ops_by_http(server, "x") != expected:
        assert time.monotonic() < ends, "the change has not been seen"
        threading.Event().wait(0.05)
    assert _ask_ops(server, "x") == expected


def test_ops_are_reloaded_alone_and_the_end_is_gentle(server: OvmsProcess, folder: Path) -> None:
    """A change of the script or of the configuration reloads them, nothing else; the idle server then ends with 0."""
    _ask_all(server)
    script, config = folder / "ops" / "web_service.py", folder / "ops" / "config.yml"
    script.write_text(OPS.replace("first", "second"))
    _until(server, "second x")
    config.write_text(config.read_text().replace("4", "5"))
    ends = time.monotonic() + PATIENCE_SECONDS
    while server.get("/ops/trace").json()["worker_num"] != 5:
        assert time.monotonic() < ends, "the change has not been seen"
        threading.Event().wait(0.05)
    code, output = server.stop()
    assert code == 0, output
    entries = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    loads = Counter(entry["name"] for entry in entries if entry["event"] == "available")
    assert loads == {**dict.fromkeys(NAMES, 1), "ops": 3}
    events = [entry["event"] for entry in entries]
    assert "drained" in events
    assert "requests cut" not in events
