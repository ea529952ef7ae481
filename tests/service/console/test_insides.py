from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.support.all_kinds import write_all_kinds
from tests.support.api_clients import triton_module
from tests.support.served_in_thread import ServedInThread, serving_in_thread


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedInThread]:
    config = write_all_kinds(tmp_path_factory.mktemp("kinds"))
    with serving_in_thread(config_path=config) as served:
        yield served


def _inside(server: ServedInThread, name: str) -> dict[str, Any]:
    answer = server.ask("GET", f"/console/api/services/{name}")
    assert answer.status_code == 200, answer.text
    document: dict[str, Any] = answer.json()
    return document


def _call(server: ServedInThread, name: str, document: Any, path: str = "infer") -> int:
    return server.ask("POST", f"/v2/models/{name}/{path}", json=document).status_code


def _dense(values: int = 10) -> dict[str, Any]:
    return {"inputs": [{"name": "b", "shape": [1, values], "datatype": "FP32", "data": [0.5] * values}]}


TEXTS = {"inputs": [{"name": "in", "shape": [1], "datatype": "BYTES", "data": ["a"]}]}


@pytest.mark.parametrize(
    ("name", "document", "streams"),
    [("dag", _dense(), {"b": 1, "a": 1}), ("graph", TEXTS, {"in": 1, "out": 1})],
)
def test_runs_and_packets_are_counted(
    server: ServedInThread, name: str, document: Any, streams: dict[str, int]
) -> None:
    before = _inside(server, name)
    assert _call(server, name, document) == 200
    after = _inside(server, name)
    (key,) = after["nodes"]
    was, now = before["nodes"][key], after["nodes"][key]
    assert (now["runs"] - was["runs"], now["active"], now["seconds"] > was["seconds"]) == (1, 0, True)
    edges = {edge["stream"]: str(number) for number, edge in enumerate(after["drawing"]["edges"])}
    assert {each: after["streams"][number] - before["streams"][number] for each, number in edges.items()} == streams


def test_runs_and_failures_of_ops_are_counted_with_their_times(server: ServedInThread) -> None:
    assert server.ask("POST", "/ops/prediction", json={"key": ["x"], "value": ["y"]}).json()["err_no"] == 0
    before = _inside(server, "ops")
    key = next(box["key"] for layer in before["drawing"]["layers"] for box in layer if box["title"] == "count")
    answer = server.ask("POST", "/ops/prediction", json={"key": ["not x"], "value": ["y"]})
    assert answer.json()["err_no"] != 0
    after = _inside(server, "ops")
    was, now = before["nodes"][key], after["nodes"][key]
    assert (now["runs"] - was["runs"], now["failures"] - was["failures"], now["active"]) == (1, 1, 0)
    assert 0 < now["p50"] <= now["p99"]
    assert sum(now["times"].values()) == now["runs"]
    metrics = server.ask("GET", "/metrics").text
    failed = server.ask("GET", "/console/api/failures").json()["failures"][-1]
    assert (failed["name"], failed["node"], failed["code"]) == ("ops", "count", "UNKNOW")
    assert "Raise_msg: x" in failed["message"]
    assert 'ovmstrio_requests_total{api="PaddleServing",code="UNKNOW",interface="REST"' in metrics
    assert f'ovmstrio_node_failures_total{{name="ops",node="count"}} {now["failures"]}.0' in metrics
    assert f'ovmstrio_node_time_seconds_count{{name="ops",node="count"}} {now["runs"] - now["failures"]}.0' in metrics


def test_a_model_has_facts_of_its_compilation(server: ServedInThread) -> None:
    document = _inside(server, "model")
    facts = document["facts"]
    assert (facts["device"], facts["devices"]) == ("CPU", "CPU")
    assert facts["streams"] >= 1
    assert facts["precision"] in {"float32", "bfloat16", "float16"}
    assert document["inputs"] == [{"name": "b", "datatype": "FP32", "shape": ["1", "10"]}]
    assert document["outputs"][0]["name"] == "a"
    assert document["drawing"] is None


def test_a_handler_has_the_number_of_its_threads(server: ServedInThread) -> None:
    assert server.ask("POST", "/handler", json=[1, 2]).json() == 3
    assert _inside(server, "handler")["facts"]["dedicated threads"] >= 1


def test_a_failed_request_has_the_node_that_failed(tmp_path: Path) -> None:
    node = "class OvmsPythonModel:\n    def execute(self, inputs):\n        raise ValueError('<b>no</b>')\n"
    config = write_all_kinds(tmp_path, node=node)
    with serving_in_thread(config_path=config) as server:
        assert _call(server, "graph", TEXTS) >= 400
        (failed,) = server.ask("GET", "/console/api/failures").json()["failures"]
        (tally,) = _inside(server, "graph")["nodes"].values()
        metrics = server.ask("GET", "/metrics").text
    assert failed["name"] == "graph"
    assert failed["node"]
    assert "<b>no</b>" in failed["message"]
    assert (tally["runs"], tally["failures"], tally["active"]) == (1, 1, 0)
    assert f'ovmstrio_node_failures_total{{name="graph",node="{failed["node"]}"}} 1.0' in metrics


def test_bodies_of_failed_requests_are_kept_on_request_without_secrets(tmp_path: Path) -> None:
    secret, config = "shown-in-the-head", write_all_kinds(tmp_path)
    document = {"password": "very secret", "note": f"mine is {secret}", "inputs": "x" * 4000}
    triton = triton_module("grpc")
    with serving_in_thread(config_path=config, console_body_bytes=1000) as server:
        assert _call(server, "model", _dense()) == 200
        headers = {"authorization": f"Bearer {secret}"}
        assert server.ask("POST", "/v2/models/model/infer", json=document, headers=headers).status_code == 400
        with triton.InferenceServerClient(server.grpc) as client:
            tensor = triton.InferInput("wrong_name", [1, 10], "FP32")
            tensor.set_data_from_numpy(np.ones((1, 10), np.float32))
            with pytest.raises(triton.InferenceServerException):
                client.infer("model", [tensor])
        rest, grpc = server.ask("GET", "/console/api/failures").json()["failures"]
    assert rest["body"].startswith('{"password":"***","note":"mine is ***","inputs":"xxx')
    assert (
        len(rest["body"]) <= 1000 < rest["body_bytes"] == len(httpx.Request("POST", "http://a", json=document).content)
    )
    assert "wrong_name" in grpc["body"]
    assert grpc["body_bytes"] > 0


def test_bodies_of_failed_requests_are_not_kept_by_default(server: ServedInThread) -> None:
    assert server.ask("POST", "/v2/models/model/infer", json={"inputs": "mine"}).status_code == 400
    failed = server.ask("GET", "/console/api/failures").json()["failures"][-1]
    assert (failed["name"], failed["body"], failed["body_bytes"]) == ("model", "", 0)


def test_a_handler_that_raises_is_among_the_failed_requests(server: ServedInThread) -> None:
    before = len(server.ask("GET", "/console/api/failures").json()["failures"])
    assert server.ask("POST", "/handler", json="a text").status_code == 500
    failures = server.ask("GET", "/console/api/failures").json()["failures"]
    assert len(failures) == before + 1
    assert (failures[-1]["name"], failures[-1]["kind"], failures[-1]["code"]) == ("handler", "handler", "500")
    assert "TypeError" in failures[-1]["message"]
    assert "handler.py:4" in failures[-1]["message"]


def test_calls_are_recorded_while_a_viewer_wants_traces(server: ServedInThread) -> None:
    with (
        httpx.Client(base_url=f"http://{server.http}", timeout=60, trust_env=False) as client,
        client.stream("GET", "/console/api/live?traces=1") as stream,
    ):
        lines = stream.iter_lines()
        assert next(lines) == "event: whole"
        assert _call(server, "dag", _dense()) == 200
        kept = client.get("/console/api/traces").json()["traces"]
        trace = client.get(f"/console/api/traces/{kept[0]['trace_id']}").json()
    assert trace["trace_id"] == kept[0]["trace_id"]
    assert {span["kind"] for span in trace["tree"]} >= {"server"}
    assert server.ask("GET", "/console/api/traces/none").status_code == 404
