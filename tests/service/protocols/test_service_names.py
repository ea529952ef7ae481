"""Services whose names contain slashes and other characters with a meaning in paths, over every interface."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import openai
import pytest
import tritonclient.grpc
import tritonclient.http

from ovmstrio.config.specs import ModelSpec
from tests.support import ir
from tests.support.api_clients import serving_both
from tests.support.callers import bearer, gate_of
from tests.support.served_in_thread import ServedInThread, serving_in_thread

NAMES = (
    "org/model",
    "org",
    "a%2Fb",
    "a/b",
    "/a",
    "a/",
    "a//b",
    "a..b",
    "x:y",
    "a b?#&",
    "ü/ä",
    "org/versions/1",
    "50%",
)
X = {"name": "b", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}
GRAPH = "graphs/adding"
GRAPH_FILE = """
input_stream: "IN:b"
output_stream: "OUT:a"
node {
  calculator: "OpenVINOModelServerSessionCalculator"
  output_side_packet: "SESSION:session"
  node_options: {
    [type.googleapis.com / mediapipe.OpenVINOModelServerSessionCalculatorOptions]: { servable_name: "org/model" }
  }
}
node {
  calculator: "OpenVINOInferenceCalculator"
  input_side_packet: "SESSION:session"
  input_stream: "B:b"
  output_stream: "A:a"
  node_options: {
    [type.googleapis.com / mediapipe.OpenVINOInferenceCalculatorOptions]: {
      tag_to_input_tensor_names { key: "B" value: "b" }
      tag_to_output_tensor_names { key: "A" value: "a" }
    }
  }
}
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedInThread]:
    folder = tmp_path_factory.mktemp("named")
    path = ir.save(ir.dummy([-1, 2]), folder, "model")
    graph = folder / "graph.pbtxt"
    graph.write_text(GRAPH_FILE)
    config: dict[str, Any] = {
        "model_config_list": [{"config": {"name": name, "base_path": str(path)}} for name in NAMES]
    }
    config["mediapipe_config_list"] = [{"name": GRAPH, "base_path": str(folder), "graph_path": str(graph)}]
    (folder / "config.json").write_text(json.dumps(config))
    with serving_in_thread(config_path=folder / "config.json") as running:
        yield running


def _get(server: ServedInThread, path: str) -> Any:
    answer = server.ask("GET", path)
    assert answer.status_code == 200, (path, answer.text)
    return answer.json()


def _infer(server: ServedInThread, path: str) -> Any:
    answer = server.ask("POST", path, json={"inputs": [X]})
    assert answer.status_code == 200, (path, answer.text)
    (output,) = answer.json()["outputs"]
    return answer.json()["model_name"], output["data"]


@pytest.mark.parametrize("name", NAMES)
def test_every_name_is_reached_over_rest_with_its_slashes_encoded(server: ServedInThread, name: str) -> None:
    segment = quote(name, safe="")
    for version in ("", "/versions/1"):
        path = f"/v2/models/{segment}{version}"
        assert _infer(server, f"{path}/infer") == (name, [2, 3])
        assert _get(server, path)["name"] == name
        assert _get(server, f"{path}/ready") == {"name": name, "ready": True}
        assert _get(server, f"{path}/config")["name"] == name
        assert [each["name"] for each in _get(server, f"{path}/stats")["model_stats"]] == [name]
    for path in (f"/v1/models/{segment}", f"/v1/models/{segment}/versions/1", f"/v1/models/{segment}/labels/any"):
        answer = server.ask("POST", f"{path}:predict", json={"instances": [[1, 2]]})
        assert (answer.status_code, answer.json()) == (200, {"predictions": [[2, 3]]})
        assert [each["state"] for each in _get(server, path)["model_version_status"]] == ["AVAILABLE"]
        assert _get(server, f"{path}/metadata")["modelSpec"]["name"] == name
    answer = server.ask("POST", f"/v2/models/{segment}/generate", json={"b": [1, 2]})
    assert (answer.status_code, answer.json()["a"]) == (200, [2, 3])


@pytest.mark.parametrize("name", NAMES)
def test_every_name_is_reached_over_grpc_and_by_openai_clients(server: ServedInThread, name: str) -> None:
    with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
        given = tritonclient.grpc.InferInput("b", [1, 2], "FP32")
        given.set_data_from_numpy(np.array([[1, 2]], np.float32))
        result = client.infer(name, [given])
        assert (result.get_response().model_name, result.as_numpy("a").tolist()) == (name, [[2, 3]])
    with openai.OpenAI(base_url=f"{server.rest}/v3", api_key="none") as client:
        assert client.models.retrieve(name).id == name
        assert name in [each.id for each in client.models.list()]


@pytest.mark.parametrize("name", ["org/model", "a/b", "ü/ä", GRAPH])
def test_clients_that_leave_slashes_as_they_are_reach_served_names(server: ServedInThread, name: str) -> None:
    client = tritonclient.http.InferenceServerClient(server.http)
    given = tritonclient.http.InferInput("b", [1, 2], "FP32")
    given.set_data_from_numpy(np.array([[1, 2]], np.float32))
    result = client.infer(name, [given])
    assert (result.get_response()["model_name"], result.as_numpy("a").tolist()) == (name, [[2, 3]])
    assert client.is_model_ready(name)
    assert client.get_model_metadata(name)["name"] == name
    client.close()
    if name != GRAPH:
        answer = server.ask("POST", f"/v1/models/{quote(name)}:predict", json={"instances": [[1, 2]]})
        assert (answer.status_code, answer.json()) == (200, {"predictions": [[2, 3]]})


@pytest.mark.parametrize(
    "path",
    ["//v2/models/org/infer", "/v2//models/org/infer", "/v2/models//org//infer", "//v2//models//org%2Fmodel/infer"],
)
def test_doubled_slashes_in_a_path_count_as_one(server: ServedInThread, path: str) -> None:
    assert _infer(server, path) == ("org/model" if "%2F" in path else "org", [2, 3])
    assert _get(server, "//v2/health/ready") == {"ready": True}
    assert server.ask("POST", "/v1//models/org:predict", json={"inputs": [[1, 2]]}).json() == {"outputs": [[2, 3]]}
    assert "org" in [each["id"] for each in _get(server, "/v3//models")["data"]]


def test_paths_of_lists_metrics_and_changes_are_written_exactly(server: ServedInThread) -> None:
    for method, path in (("GET", "//v2/models"), ("GET", "//metrics"), ("POST", "/v1//config/reload")):
        assert server.ask(method, path).json()["error"].startswith("Invalid request URL"), path
    assert server.ask("POST", "/v1/config/reload").status_code == 200


async def test_refusals_do_not_reveal_which_names_with_slashes_exist(tmp_path: Path) -> None:
    spec = ModelSpec(name="org/add", base_path=ir.save(ir.dummy([-1, 2]), tmp_path, "add"))
    gate = gate_of({"owner": "infer:org/*", "other": "infer:other"})
    async with serving_both([spec], gate=gate) as both:

        async def ask(name: str, key: str, operation: str, method: str = "GET") -> tuple[int, str]:
            answer = await both.request(method, f"/v2/models/{name}{operation}", headers=bearer(key) if key else {})
            return answer.status_code, answer.text.replace(name, "NAME")

        for key, status in (("", 401), ("other", 403)):
            for method, operation in (("GET", ""), ("GET", "/ready"), ("GET", "/versions/1/ready"), ("POST", "/infer")):
                refusal = await ask("org/add", key, operation, method)
                assert refusal[0] == status
                assert refusal == await ask("org/nothing", key, operation, method)
        assert await ask("org/add", "owner", "/ready") == (200, '{"name":"NAME","ready":true}')
        assert (await ask("org/nothing", "owner", "/ready"))[0] == 400
        assert (await ask("org%2Fnothing", "owner", "/ready"))[0] == 404


@pytest.mark.parametrize("path", ["/v2/models/org/nothing", "/v2/models/org%2Fnothing/more", "/v1/models/nothing/b"])
def test_an_unknown_name_with_slashes_is_an_unknown_path(server: ServedInThread, path: str) -> None:
    answer = server.ask("GET", path)
    assert (answer.status_code, answer.json()["error"]) == (400, f"Invalid request URL - GET {path}")
