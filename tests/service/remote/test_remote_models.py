from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
import trustme

from ovmstrio.encoding.messages import message_class
from tests.support import ir
from tests.support.graphs import graph_text, inference_graph, python_node
from tests.support.pipelines import dag_entry
from tests.support.served_in_thread import ServedInThread, serving_in_thread
from tests.support.waits import WAIT_SECONDS, until

WAITING_NODE = """
import trio


class OvmsPythonModel:
    async def execute(self, inputs):
        await trio.sleep_forever()
"""


def _remote(name: str, *addresses: str, **settings: Any) -> dict[str, Any]:
    return {"config": {"name": name, "remote": list(addresses), "health_seconds": 0.2, **settings}}


def _config(folder: Path, models: list[dict[str, Any]], **lists: Any) -> Path:
    config = folder / "config.json"
    config.write_text(json.dumps({"model_config_list": models, **lists}))
    return config


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("far")
    models = {
        "dummy": ir.dummy(),
        "large": ir.dummy((1, 4 * 2**20)),
        "accumulator": ir.accumulator(),
        "texts": ir.string_passthrough(),
    }
    entries = [
        {"config": {"name": name, "base_path": str(ir.save(model, root, name)), "stateful": name == "accumulator"}}
        for name, model in models.items()
    ]
    (root / "wait").mkdir()
    (root / "wait" / "wait.py").write_text(WAITING_NODE)
    (root / "wait" / "graph.pbtxt").write_text(graph_text(python_node("wait.py")))
    _config(root, entries, mediapipe_config_list=[{"name": "wait"}])
    return root


@pytest.fixture(scope="module")
def far(folder: Path) -> Iterator[ServedInThread]:
    with serving_in_thread(config_path=folder / "config.json") as server:
        yield server


class _OtherService(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpcio has no types
    def __init__(self) -> None:
        self.seconds_left = 0.0

    def service(self, details: Any) -> Any:
        answers = {"ModelMetadata": self.describe, "ModelReady": self.be_ready, "ModelInfer": self.infer}
        return grpc.unary_unary_rpc_method_handler(answers[details.method.rpartition("/")[2]])

    def describe(self, data: bytes, context: Any) -> bytes:
        answer = message_class("inference.ModelMetadataResponse")(name="x", platform="other")
        answer.inputs.add(name="i", datatype="INT32", shape=[-1])
        answer.outputs.add(name="o", datatype="INT32", shape=[-1])
        return bytes(answer.SerializeToString())

    def be_ready(self, data: bytes, context: Any) -> bytes:
        return bytes(message_class("inference.ModelReadyResponse")(ready=True).SerializeToString())

    def infer(self, data: bytes, context: Any) -> bytes:
        request = message_class("inference.ModelInferRequest").FromString(data)
        self.seconds_left = context.time_remaining()
        if request.id == "too much":
            context.set_trailing_metadata([("retry-after", "7")])
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
        if not request.raw_input_contents[0]:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "nichts: ä\n100 %")
        answer = message_class("inference.ModelInferResponse")(model_name="x", raw_output_contents=[])
        answer.outputs.add(name="o", datatype="INT32", shape=request.inputs[0].shape)
        answer.raw_output_contents.append(request.raw_input_contents[0])
        answer.parameters["note"].string_param = "yes"
        return bytes(answer.SerializeToString())


@pytest.fixture(scope="module")
def other() -> Iterator[tuple[_OtherService, str]]:
    service = _OtherService()
    server = grpc.server(ThreadPoolExecutor(2), options=[("grpc.max_receive_message_length", -1)])
    server.add_generic_rpc_handlers((service,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield service, f"grpc://127.0.0.1:{port}"
    server.stop(None).wait(WAIT_SECONDS)


@pytest.fixture(scope="module")
def near(
    tmp_path_factory: pytest.TempPathFactory, folder: Path, far: ServedInThread, other: tuple[_OtherService, str]
) -> Iterator[ServedInThread]:
    root = tmp_path_factory.mktemp("near")
    (root / "graph").mkdir()
    (root / "graph" / "graph.pbtxt").write_text(inference_graph("grpc"))
    addresses = {"grpc": f"grpc://{far.grpc}", "rest": f"http://{far.http}"}
    with serving_in_thread(config_path=folder / "config.json") as second:
        models = [
            *(_remote(name, where, remote_name="dummy") for name, where in addresses.items()),
            *(_remote(f"wait_{name}", where, remote_name="wait") for name, where in addresses.items()),
            *(_remote(f"large_{name}", where, remote_name="large") for name, where in addresses.items()),
            *(_remote(f"texts_{name}", where, remote_name="texts") for name, where in addresses.items()),
            _remote("short", addresses["grpc"], remote_name="wait", timeout_seconds=0.5),
            _remote("sequences", addresses["grpc"], f"grpc://{second.grpc}", remote_name="accumulator"),
            _remote("other", other[1], timeout_seconds=30),
        ]
        pipeline = dag_entry("dag", "grpc", ("x", "b"), ("y", "a"))
        lists: dict[str, Any] = {"mediapipe_config_list": [{"name": "graph"}], "pipeline_config_list": [pipeline]}
        with serving_in_thread(config_path=_config(root, models, **lists)) as server:
            yield server


@pytest.fixture(scope="module")
def client(near: ServedInThread) -> Iterator[Any]:
    made = triton.InferenceServerClient(near.grpc)
    yield made
    made.close()


def _input(values: Any, name: str = "b", datatype: str = "FP32") -> Any:
    array = np.asarray(values)
    made = triton.InferInput(name, array.shape, datatype)
    made.set_data_from_numpy(array)
    return made


def _row(value: float, name: str = "b") -> Any:
    return _input(np.full((1, 10), value, np.float32), name)


def _metric(server: ServedInThread, beginning: str, *labels: str) -> float:
    lines = server.ask("GET", "/metrics").text.splitlines()
    found = [line for line in lines if line.startswith(beginning) and all(label in line for label in labels)]
    return sum(float(line.split()[-1]) for line in found)


@pytest.mark.parametrize(
    ("name", "given", "output"), [("grpc", "b", "a"), ("rest", "b", "a"), ("graph", "in", "out"), ("dag", "x", "y")]
)
def test_clients_graphs_and_pipelines_call_a_remote_model(client: Any, name: str, given: str, output: str) -> None:
    result = client.infer(name, [_row(3, given)], client_timeout=WAIT_SECONDS)
    assert result.as_numpy(output)[0].tolist() == [4.0] * 10


@pytest.mark.parametrize("transport", ["grpc", "rest"])
def test_texts_in_json_reach_a_remote_model(near: ServedInThread, transport: str) -> None:
    given = {"name": "strings", "shape": [3], "datatype": "BYTES", "data": ["a", "", "é"]}
    answer = near.ask("POST", f"/v2/models/texts_{transport}/infer", json={"inputs": [given]})
    assert (answer.status_code, answer.json().get("outputs", [{}])[0].get("data")) == (200, given["data"])


@pytest.mark.parametrize("transport", ["grpc", "rest"])
def test_numbers_for_texts_are_refused_by_a_remote_model(near: ServedInThread, transport: str) -> None:
    request = message_class("inference.ModelInferRequest")(model_name=f"texts_{transport}")
    given = request.inputs.add(name="strings", datatype="BYTES", shape=[2])
    given.contents.int_contents.extend([1, 2])
    with grpc.insecure_channel(near.grpc) as channel:
        infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer", type(request).SerializeToString)
        with pytest.raises(grpc.RpcError, match=r"Invalid string input.*0 strings"):
            infer(request, timeout=WAIT_SECONDS)


@pytest.mark.parametrize("transport", ["grpc", "rest"])
def test_metadata_and_errors_are_those_of_the_other_server(far: ServedInThread, client: Any, transport: str) -> None:
    known = client.get_model_metadata(transport)
    assert [(each.name, each.datatype, list(each.shape)) for each in known.inputs] == [("b", "FP32", [1, 10])]
    with pytest.raises(triton.InferenceServerException) as caught:
        client.infer(transport, [_input(np.ones((1, 11), np.float32))], client_timeout=WAIT_SECONDS)
    assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"
    assert caught.value.message().startswith("Invalid input shape - Expected: (1,10); Actual: (1,11)")
    where = f"grpc://{far.grpc}" if transport == "grpc" else f"http://{far.http}"
    assert f"reported by {where}" in caught.value.message()


@pytest.mark.parametrize("transport", ["grpc", "rest"])
def test_a_cancelled_call_is_cancelled_at_the_other_server(far: ServedInThread, client: Any, transport: str) -> None:
    labels = ('name="wait"', 'code="Cancelled"')
    before = _metric(far, "ovmstrio_requests_total", *labels)
    done = threading.Event()
    given = [_input(np.ones(1, np.float32), "in")]
    call = client.async_infer(f"wait_{transport}", given, callback=lambda result, error: done.set())
    until(lambda: _metric(far, "ovms_current_graphs", 'name="wait"') == 1)
    call.cancel()
    assert done.wait(WAIT_SECONDS)
    until(lambda: _metric(far, "ovms_current_graphs", 'name="wait"') == 0)
    assert _metric(far, "ovmstrio_requests_total", *labels) == before + 1


@pytest.mark.parametrize("seconds", [0.5, 60])
def test_the_rest_of_a_deadline_is_passed_on(far: ServedInThread, client: Any, seconds: float) -> None:
    with pytest.raises(triton.InferenceServerException) as caught:
        client.infer("short", [_input(np.ones(1, np.float32), "in")], client_timeout=seconds)
    assert caught.value.status() == "StatusCode.DEADLINE_EXCEEDED"
    until(lambda: _metric(far, "ovms_current_graphs", 'name="wait"') == 0)


@pytest.mark.parametrize("transport", ["grpc", "rest"])
def test_tensors_larger_than_a_window_are_unchanged(client: Any, transport: str) -> None:
    values = np.arange(4 * 2**20, dtype=np.float32).reshape(1, -1)
    result = client.infer(f"large_{transport}", [_input(values)], client_timeout=WAIT_SECONDS)
    assert np.array_equal(result.as_numpy("a"), values + 1)


@pytest.mark.parametrize("sequence", [7, 8, "text"])
def test_a_sequence_stays_with_its_server(client: Any, sequence: int | str) -> None:
    known = client.get_model_metadata("sequences")
    name, shape = known.inputs[0].name, [int(size) for size in known.inputs[0].shape]
    for step in range(1, 6):
        flags = {"sequence_id": sequence, "sequence_start": step == 1, "sequence_end": step == 5}
        given = [_input(np.ones(shape, np.float32), name)]
        result = client.infer("sequences", given, client_timeout=WAIT_SECONDS, **flags)
        assert np.asarray(result.as_numpy(known.outputs[0].name)).max() == step


def test_a_server_of_grpcio_is_interoperable(client: Any, other: tuple[_OtherService, str]) -> None:
    assert client.get_model_metadata("other").platform == "other"
    values = np.arange(3_000_000, dtype=np.int32)
    result = client.infer("other", [_input(values, "i", "INT32")], client_timeout=WAIT_SECONDS)
    assert np.array_equal(result.as_numpy("o"), values)
    assert result.get_response().parameters["note"].string_param == "yes"
    assert 0 < other[0].seconds_left <= 30.1
    with pytest.raises(triton.InferenceServerException) as caught:
        client.infer("other", [_input(np.zeros(0, np.int32), "i", "INT32")], client_timeout=WAIT_SECONDS)
    assert caught.value.status() == "StatusCode.FAILED_PRECONDITION"
    assert "nichts: ä\n100 %" in caught.value.message()


def test_the_time_to_wait_of_an_overloaded_server_is_passed_on(near: ServedInThread) -> None:
    given = {"name": "i", "shape": [1], "datatype": "INT32", "data": [1]}
    answer = near.ask("POST", "/v2/models/other/infer", json={"id": "too much", "inputs": [given]})
    assert (answer.status_code, answer.headers.get("retry-after")) == (429, "7")
    assert answer.json()["error"].startswith("full; reported by grpc://")


def test_tls_servers_are_called_with_a_certificate_and_verified(tmp_path: Path, folder: Path) -> None:
    authority, unknown = trustme.CA(), trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    unknown.cert_pem.write_to_path(tmp_path / "unknown.pem")
    for name in ("localhost", "client"):
        authority.issue_cert(name).private_key_and_cert_chain_pem.write_to_path(tmp_path / f"{name}.pem")
    own = tmp_path / "localhost.pem"
    options = {"tls_cert": own, "tls_key": own, "client_ca": tmp_path / "ca.pem"}
    tls = {"ca": "ca.pem", "cert": "client.pem", "key": "client.pem", "server_name": "localhost"}
    with serving_in_thread(model_name="dummy", model_path=folder / "dummy", **options) as secret:
        models = [
            _remote("over_grpc", f"grpcs://{secret.grpc}", remote_name="dummy", tls=tls),
            _remote("over_rest", f"https://{secret.http}", remote_name="dummy", tls=tls),
            _remote("unknown", f"grpcs://{secret.grpc}", remote_name="dummy", tls={**tls, "ca": "unknown.pem"}),
        ]
        config = _config(tmp_path, models)
        with serving_in_thread(config_path=config) as near, triton.InferenceServerClient(near.grpc) as client:
            for name in ("over_grpc", "over_rest"):
                until(lambda name=name: client.is_model_ready(name))  # type: ignore[misc]  # the loop's own
                result = client.infer(name, [_row(3)], client_timeout=WAIT_SECONDS)
                assert result.as_numpy("a")[0].tolist() == [4.0] * 10
            with pytest.raises(triton.InferenceServerException, match="cannot be reached: self-signed certificate"):
                client.infer("unknown", [_row(3)], client_timeout=WAIT_SECONDS)
