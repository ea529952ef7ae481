from __future__ import annotations

import gzip
import json
import queue
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.support import ir
from tests.support.graphs import inference_graph
from tests.support.pipelines import dag_entry
from tests.support.ray_cluster import RayCluster, ray_cluster
from tests.support.tiny_llm import write_tiny_folder

triton = pytest.importorskip("tritonclient.grpc")

pytestmark = [
    pytest.mark.slow,
    # Imported, it would leave much behind in this process.
    pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra ray"),
]

PATIENCE_SECONDS = 120
SERVICES = ["dag", "failing", "failing_near", "far", "kept", "near", "rolled", "spread", "telling", "tiny"]
ENOUGH = 60
SEQUENCES = range(1, 7)
EVERYWHERE = {"num_cpus": 0.1, "replicas": 2, "resources": {"place": 1}}
HEAD = {"num_cpus": 0.1, "resources": {"head": 1}}
LIMIT = 1_000_000
STREAMED = 30
OUTPUT = {"near": ["out"], "far": ["out"], "spread": ["a"], "dag": ["y"], "kept": [], "none": []}

HANDLER = """
class Handler:
    def handle_get(self):
        return self.parts()

    def parts(self):
        yield "one "
        raise RuntimeError("within its answer")
"""

TELLER = """
class Handler:
    def handle_get(self):
        return iter(("one ", "two"))

    def handle_post(self, payload):
        return {"got": payload}
"""


def _configuration(root: Path, rolled: str) -> Path:
    pipeline = dag_entry("dag", "spread", ("x", "b"), ("y", "a"))
    document = {
        "model_config_list": [
            {"config": {"name": "spread", "base_path": "spread", "placement": EVERYWHERE}},
            {"config": {"name": "kept", "base_path": "kept", "stateful": True, "placement": {**HEAD, "replicas": 2}}},
            {"config": {"name": "rolled", "base_path": rolled, "placement": {**HEAD, "group": "callers"}}},
        ],
        "pipeline_config_list": [{**pipeline, "placement": "callers"}],
        "mediapipe_config_list": [
            {"name": "near", "base_path": ".", "graph_path": "graph.pbtxt", "placement": {**HEAD, "group": "ingress"}},
            {"name": "far", "base_path": ".", "graph_path": "graph.pbtxt", "placement": "callers"},
        ],
        "handler_config_list": [
            {"name": "failing", "path": "failing", "placement": {**HEAD, "group": "handlers"}},
            {"name": "failing_near", "path": "failing", "placement": "ingress"},
            {"name": "telling", "path": "telling", "placement": "handlers"},
        ],
        "text_model_config_list": [
            {"config": {"name": "tiny", "base_path": "tiny", "placement": {**HEAD, "group": "text"}}}
        ],
    }
    path = root / "config.json"
    path.write_text(json.dumps(document))
    return path


def _deploy(cluster: RayCluster, folder: Path, rolled: str) -> subprocess.CompletedProcess[str]:
    settings = f"sequence_store={folder / 'store'}", f"max_message_size={LIMIT}"
    return cluster.deploy(_configuration(folder, rolled), *(word for each in settings for word in ("--setting", each)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("ray")
    for name in ("spread", "old"):
        ir.save(ir.dummy(), root, name)
    ir.save(ir.passthrough("FP32", (1, 10), input_name="b", output_name="a"), root, "new")
    ir.save(ir.accumulator(), root, "kept")
    (root / "graph.pbtxt").write_text(inference_graph("spread"))
    for name, code in (("failing", HANDLER), ("telling", TELLER)):
        (root / name).mkdir()
        (root / name / "handler.py").write_text(code)
        (root / name / "nucleus.yaml").write_text("type: python\npath: handler.py\n")
    write_tiny_folder(root / "tiny")
    return root


@pytest.fixture(scope="module")
def cluster(folder: Path) -> Iterator[RayCluster]:
    with ray_cluster(2) as running:
        done = _deploy(running, folder, "old")
        assert done.returncode == 0, done.stderr
        yield running


@pytest.fixture
def rest(cluster: RayCluster) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://127.0.0.1:{cluster.http}", timeout=PATIENCE_SECONDS) as client:
        yield client


@pytest.fixture
def grpc(cluster: RayCluster) -> Iterator[Any]:
    with triton.InferenceServerClient(f"127.0.0.1:{cluster.grpc}") as client:
        yield client


def _post(client: httpx.Client, name: str, tensor: str = "b", size: int = 10) -> httpx.Response:
    given = {"name": tensor, "shape": [1, size], "datatype": "FP32", "data": [1.0] * size}
    return client.post(f"/v2/models/{name}/infer", json={"inputs": [given]})


def _step(client: httpx.Client, sequence: int, control: int = 0) -> float:
    inputs = [
        {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1.0, 1.0]},
        {"name": "sequence_id", "shape": [1], "datatype": "UINT64", "data": [sequence]},
        {"name": "sequence_control_input", "shape": [1], "datatype": "UINT32", "data": [control]},
    ]
    return _first(client.post("/v2/models/kept/infer", json={"inputs": inputs}))


def _input(tensor: str, size: int = 10) -> Any:
    given = triton.InferInput(tensor, [1, size], "FP32")
    given.set_data_from_numpy(np.ones((1, size), np.float32))
    return given


def _first(answer: httpx.Response) -> float:
    assert answer.status_code == 200, answer.text
    found: float = answer.json()["outputs"][0]["data"][0]
    return found


def test_models_answer_through_the_proxies_of_ray_over_both_protocols(rest: httpx.Client, grpc: Any) -> None:
    assert _first(_post(rest, "spread")) == 2.0
    assert grpc.infer("spread", [_input("b")], client_timeout=PATIENCE_SECONDS).as_numpy("a").tolist() == [[2.0] * 10]
    assert rest.get("/v2/health/ready").json() == {"ready": True}
    assert grpc.is_server_ready()
    assert sorted(rest.get("/v1/config").json()) == SERVICES


def test_errors_keep_their_statuses_and_texts(rest: httpx.Client, grpc: Any) -> None:
    assert _post(rest, "none").status_code == 404
    refused = _post(rest, "spread", size=9)
    assert (refused.status_code, "Invalid input shape" in refused.json()["error"]) == (400, True)
    for name, tensor, size, status in (
        ("none", "b", 10, "StatusCode.NOT_FOUND"),
        ("spread", "b", 9, "StatusCode.INVALID_ARGUMENT"),
        ("dag", "x", 9, "StatusCode.INVALID_ARGUMENT"),
    ):
        with pytest.raises(triton.InferenceServerException) as raised:
            grpc.infer(name, [_input(tensor, size)], client_timeout=PATIENCE_SECONDS)
        assert raised.value.status() == status
    assert rest.get("/metrics").status_code == 501


def test_requests_about_all_groups_are_answered_or_refused(rest: httpx.Client) -> None:
    assert sorted(each["name"] for each in rest.get("/v2/models/").json()["models"]) == SERVICES
    assert rest.get("/health").json() == {"status": "ok"}
    refused = rest.get("/v1/models")
    assert (refused.status_code, refused.json()["error"]["type"]) == (400, "invalid_request_error")
    assert 'place all text models in the group "ingress"' in refused.json()["error"]["message"]
    missing = rest.post("/v3/chat/completions", json={"messages": []})
    assert (missing.status_code, missing.json()["error"]["param"]) == (400, "model")


def test_steps_with_an_encoding_find_their_sequence(rest: httpx.Client) -> None:
    inputs = [{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1.0, 1.0]}]
    document = {"inputs": inputs, "parameters": {"sequence_id": 77, "sequence_start": True, "sequence_end": True}}
    body = gzip.compress(json.dumps(document).encode())
    assert _first(rest.post("/v2/models/kept/infer", content=body, headers={"content-encoding": "gzip"})) == 1.0


@pytest.mark.parametrize("name", ["spread", "near"])
def test_bodies_above_the_limit_are_refused_over_both_protocols(rest: httpx.Client, grpc: Any, name: str) -> None:
    body = b" " * (LIMIT + 1)
    for content in (body, iter([body[:LIMIT], body[LIMIT:]])):
        refused = rest.post(f"/v2/models/{name}/infer", content=content)
        assert (refused.status_code, f"the limit is {LIMIT}" in refused.text) == (413, True), refused.text
    with pytest.raises(triton.InferenceServerException, match=f"is larger than the limit of {LIMIT} bytes") as raised:
        grpc.infer(name, [_input("b", LIMIT)], client_timeout=PATIENCE_SECONDS)
    assert raised.value.status() == "StatusCode.RESOURCE_EXHAUSTED"


def test_handlers_answer_at_their_paths_and_stream(rest: httpx.Client, grpc: Any) -> None:
    assert rest.post("/telling", json={"a": 1}).json() == {"got": {"a": 1}}
    with rest.stream("GET", "/telling") as answer:
        assert (answer.status_code, answer.read()) == (200, b"one two")
    assert grpc.is_model_ready("telling")


def test_text_models_answer_by_openais_api_and_stream(rest: httpx.Client) -> None:
    request = {"model": "tiny", "messages": [{"role": "user", "content": "the"}], "max_tokens": 8, "ignore_eos": True}
    whole = rest.post("/v3/chat/completions", json=request)
    assert (whole.status_code, whole.json()["usage"]["completion_tokens"]) == (200, 8), whole.text
    with rest.stream("POST", "/v3/chat/completions", json={**request, "stream": True}) as answer:
        events = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["choices"][0]["finish_reason"] == "length"
    with rest.stream("POST", "/v3/chat/completions", json={**request, "stream": True, "max_tokens": 1500}) as answer:
        next(answer.iter_raw())
    assert rest.post("/v3/completions", json={"model": "tiny", "prompt": "the", "max_tokens": 2}).status_code == 200
    refused = rest.post("/v3/embeddings", json={"model": "tiny", "input": "a"})
    assert (refused.status_code, refused.json()["error"]["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize("name", ["failing", "failing_near"])
def test_a_broken_answer_is_a_protocol_error(rest: httpx.Client, name: str) -> None:
    for _ in range(2):
        with rest.stream("GET", f"/{name}") as answer, pytest.raises(httpx.RemoteProtocolError):
            answer.read()
        assert answer.status_code == 200
    assert _first(_post(rest, "near", "in")) == 2.0


def test_graphs_and_dags_call_models_of_other_groups(rest: httpx.Client) -> None:
    assert _first(_post(rest, "dag", "x")) == 2.0
    assert _first(_post(rest, "far", "in")) == 2.0
    assert _first(_post(rest, "near", "in")) == 2.0


def _streamed(client: Any, name: str, tensor: str, count: int) -> list[Any]:
    replies: queue.Queue[Any] = queue.Queue()
    client.start_stream(lambda result, error: replies.put(error or result.as_numpy(*OUTPUT[name]).tolist()))
    try:
        for _ in range(count):
            client.async_stream_infer(name, [_input(tensor)])
        return [replies.get(timeout=PATIENCE_SECONDS) for _ in range(count)]
    finally:
        client.stop_stream()


@pytest.mark.parametrize(("name", "tensor"), [("near", "in"), ("far", "in"), ("spread", "b"), ("dag", "x")])
def test_streams_reach_services_of_all_groups(grpc: Any, name: str, tensor: str) -> None:
    assert _streamed(grpc, name, tensor, STREAMED) == [[[2.0] * 10]] * STREAMED


def test_a_stream_that_fails_elsewhere_ends_with_its_status(grpc: Any) -> None:
    (refused,) = _streamed(grpc, "kept", "x", 1)
    assert (refused.status(), "which ModelInfer finds" in str(refused)) == ("StatusCode.UNIMPLEMENTED", True)
    (missing,) = _streamed(grpc, "none", "x", 1)
    assert missing.status() == "StatusCode.NOT_FOUND"


@contextmanager
def _load(cluster: RayCluster, *calls: tuple[str, str]) -> Iterator[Callable[[int], Counter[str]]]:
    counts: dict[str, Counter[str]] = {name: Counter() for name, _ in calls}
    changed = threading.Condition()
    over = threading.Event()

    def call(name: str, tensor: str) -> None:
        with httpx.Client(base_url=f"http://127.0.0.1:{cluster.http}", timeout=PATIENCE_SECONDS) as client:
            while not over.is_set():
                try:
                    answer = _post(client, name, tensor)
                    outcome = str(answer.status_code) if answer.status_code == 200 else answer.text
                except httpx.HTTPError as error:
                    outcome = repr(error)
                with changed:
                    counts[name][outcome] += 1
                    changed.notify_all()

    def wait(more: int) -> Counter[str]:
        with changed:
            wanted = {name: each.total() + more for name, each in counts.items()}
            done = changed.wait_for(
                lambda: all(counts[name].total() >= least for name, least in wanted.items()), PATIENCE_SECONDS
            )
            assert done, counts
            return sum(counts.values(), Counter())

    threads = [threading.Thread(target=call, args=each) for each in calls]
    for thread in threads:
        thread.start()
    try:
        yield wait
    finally:
        over.set()
        for thread in threads:
            thread.join(PATIENCE_SECONDS)


def test_a_new_version_is_rolled_out_without_a_lost_request(
    cluster: RayCluster, folder: Path, rest: httpx.Client
) -> None:
    assert _first(_post(rest, "rolled")) == 2.0
    assert [(_step(rest, sequence, 1), _step(rest, sequence)) for sequence in SEQUENCES] == [(1.0, 2.0)] * 6
    with _load(cluster, ("rolled", "b"), ("dag", "x")) as wait:
        wait(5)
        done = _deploy(cluster, folder, "new")
        assert done.returncode == 0, done.stderr
        assert list(wait(5)) == ["200"]
    assert _first(_post(rest, "rolled")) == 1.0
    assert [(_step(rest, sequence), _step(rest, sequence, 2)) for sequence in SEQUENCES] == [(3.0, 4.0)] * 6


def test_a_node_is_killed_under_load_without_a_lost_request(cluster: RayCluster) -> None:
    assert cluster.send_command("replicas", "spread") == "2"
    with _load(cluster, ("spread", "b"), ("dag", "x"), ("near", "in")) as wait:
        wait(5)
        assert cluster.send_command("kill") == "killed"
        assert list(wait(ENOUGH)) == ["200"]
    assert cluster.send_command("nodes") == "1"
