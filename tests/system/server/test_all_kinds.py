from __future__ import annotations

import json
import re
from collections import Counter
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import grpc
import httpx
import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.utils import np_to_triton_dtype

from ovmstrio.encoding.messages import METHOD, REQUEST, RESPONSE
from tests.support.all_kinds import NAMES, OPS, write_all_kinds
from tests.support.processes import OvmsProcess, serving
from tests.support.waits import WAIT_SECONDS, until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.system_servers import SystemServers

ROW = np.arange(10, dtype=np.float32).reshape(1, 10)


@pytest.fixture
def server(servers: SystemServers) -> OvmsProcess:
    return servers.serving("all_kinds")


def _infer(server: OvmsProcess, name: str, given: str, wanted: str, array: np.ndarray[Any, Any]) -> Any:
    tensor = tritonclient.grpc.InferInput(given, array.shape, np_to_triton_dtype(array.dtype))
    tensor.set_data_from_numpy(array)
    with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
        by_grpc = client.infer(name, [tensor], client_timeout=WAIT_SECONDS).as_numpy(wanted).tolist()
    data = [each.decode() for each in array.tolist()] if array.dtype == object else array.tolist()
    body = {"inputs": [{"name": given, "shape": array.shape, "datatype": tensor.datatype(), "data": data}]}
    (output,) = _post(server, f"/v2/models/{name}/infer", body)["outputs"]
    assert output["name"] == wanted
    assert np.array(output["data"]).ravel().tolist() == [
        each.decode() if isinstance(each, bytes) else each for each in np.array(by_grpc).ravel().tolist()
    ]
    return output["data"]


def _post(server: OvmsProcess, path: str, body: Any) -> Any:
    answer = httpx.post(server.rest + path, json=body, timeout=WAIT_SECONDS, trust_env=False)
    assert answer.status_code == 200, answer.text
    return answer.json()


def _call_ops_by_http(server: OvmsProcess, x: str) -> str:
    (value,) = _post(server, "/ops/prediction", {"key": ["x"], "value": [x]})["value"]
    return str(value)


def _call_ops(server: OvmsProcess, x: str) -> str:
    """Call the Ops over both protocols of Paddle Serving, and return the value, which must be the same over both."""
    by_http = _call_ops_by_http(server, x)
    with grpc.insecure_channel(server.grpc) as channel:
        predict = channel.unary_unary(METHOD, REQUEST.SerializeToString, RESPONSE.FromString)
        answer = predict(REQUEST(key=["x"], value=[x], name="ops"), timeout=WAIT_SECONDS)
    assert list(answer.value) == [by_http]
    return by_http


def _call_all(server: OvmsProcess) -> None:
    expected = (ROW + 1).ravel().tolist()
    assert np.ravel(_infer(server, "model", "b", "a", ROW)).tolist() == expected
    assert np.ravel(_infer(server, "dag", "b", "a", ROW)).tolist() == expected
    assert _infer(server, "graph", "in", "out", np.frombuffer(b"abc", np.uint8)) == list(b"ABC")
    assert _post(server, "/handler", [1, 2, 3]) == 6
    assert _call_ops(server, "x") == "first x"
    assert _infer(server, "ops", "x", "y", np.array([b"abc"], object)) == ["first abc"]


def test_one_stream_calls_models_and_pipelines_in_order(server: OvmsProcess) -> None:
    tensor = tritonclient.grpc.InferInput("b", ROW.shape, "FP32")
    tensor.set_data_from_numpy(ROW)
    answers: SimpleQueue[Any] = SimpleQueue()
    with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
        client.start_stream(callback=lambda result, error: answers.put(error or result))
        for name in ("dag", "model", "dag"):
            client.async_stream_infer(name, [tensor])
        got = [answers.get(timeout=WAIT_SECONDS) for _ in range(3)]
        client.stop_stream()
    assert [each.get_response().model_name for each in got] == ["dag", "model", "dag"]
    assert all((each.as_numpy("a") == ROW + 1).all() for each in got)


def test_all_kinds_are_listed(server: OvmsProcess) -> None:
    with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
        listed = client.get_model_repository_index(client_timeout=WAIT_SECONDS)
    states = {
        name: [each["state"] for each in document["model_version_status"]]
        for name, document in server.get("/v1/config").json().items()
    }
    assert {each.name: each.state for each in listed.models} == dict.fromkeys(states, "READY")
    assert states == {name: ["AVAILABLE"] for name in states}
    assert states.keys() >= set(NAMES)
    for name in NAMES:
        assert server.get(f"/v2/models/{name}/ready").status_code == 200


def _samples(metrics: str) -> list[tuple[str, dict[str, str], float]]:
    found = re.findall(r"(?m)^(\w+){(.*?)} (\S+)$", metrics)
    return [(family, dict(re.findall(r'(\w+)="(.*?)"', labels)), float(value)) for family, labels, value in found]


def _counts(server: OvmsProcess) -> dict[tuple[str, str], float]:
    metrics = server.get("/metrics").text
    assert metrics.count("# TYPE pd_query_request_success_total ") == 1
    samples = _samples(metrics)

    def total(family: str, **wanted: str) -> float:
        return sum(value for name, labels, value in samples if name == family and wanted.items() <= labels.items())

    kinds = ("model", "pipeline", "graph", "handler", "op pipeline")
    return {
        **{("inferred", each): total("ovms_requests_success", name=each, method="ModelInfer") for each in NAMES},
        **{("called", each): total("ovmstrio_requests_total", name=each, code="OK") for each in NAMES},
        **{("timed", each): total("ovmstrio_request_time_seconds_count", kind=each) for each in kinds},
        **{
            ("nodes", each): total("ovmstrio_node_time_seconds_count", name=each, node="node")
            for each in ("dag", "graph")
        },
        ("accepted", "graph"): total("ovms_requests_accepted", name="graph"),
        ("responses", "graph"): total("ovms_responses", name="graph"),
        ("queries", "ops"): total("pd_query_request_success_total", name="ops"),
    }


def test_calls_over_all_protocols_are_answered_and_counted(server: OvmsProcess) -> None:
    before = _counts(server)
    _call_all(server)
    after = _counts(server)
    assert {key: after[key] - before[key] for key in after} == {
        **{("inferred", name): count for name, count in zip(NAMES, (2, 2, 0, 0, 2), strict=True)},
        **{("called", name): count for name, count in zip(NAMES, (2, 2, 2, 1, 4), strict=True)},
        ("timed", "model"): 2,
        ("timed", "pipeline"): 2,
        ("timed", "graph"): 2,
        ("timed", "handler"): 1,
        ("timed", "op pipeline"): 4,
        ("nodes", "dag"): 2,
        ("nodes", "graph"): 2,
        ("accepted", "graph"): 2,
        ("responses", "graph"): 2,
        ("queries", "ops"): 4,
    }


def test_changed_ops_are_reloaded_alone(tmp_path: Path) -> None:
    options = ["--log_format", "json", "--file_system_poll_wait_seconds", "0.1"]
    with serving("--config_path", str(write_all_kinds(tmp_path)), *options) as server:
        _call_all(server)
        script, config = tmp_path / "ops" / "web_service.py", tmp_path / "ops" / "config.yml"
        script.write_text(OPS.replace("first", "second"))
        until(lambda: _call_ops_by_http(server, "x") == "second x")
        assert _call_ops(server, "x") == "second x"
        config.write_text(config.read_text().replace("4", "5"))
        until(lambda: server.get("/ops/trace").json()["worker_num"] == 5)
        code, output = server.stop()
    assert code == 0, output
    entries = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    loads = Counter(entry["name"] for entry in entries if entry["event"] == "service available")
    assert loads == {**dict.fromkeys(NAMES, 1), "ops": 3}
    events = [entry["event"] for entry in entries]
    assert "drained" in events
    assert "requests cut" not in events
