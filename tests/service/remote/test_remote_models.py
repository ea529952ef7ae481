"""Models of another server, which is a process of its own: called, killed, slow and gone."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
import trustme

from ovmstrio.protocol.descriptors import message_class
from tests.support import ir
from tests.support.graphs import graph_text, inference_graph, python_node
from tests.support.ports import free_ports
from tests.support.processes import OvmsProcess, running, serving

_WAIT = """
import trio


class OvmsPythonModel:
    async def execute(self, inputs):
        await trio.sleep_forever()
"""

pytestmark = pytest.mark.e2e


def _remote(name: str, *addresses: str, **settings: Any) -> dict[str, Any]:
    return {"config": {"name": name, "remote": list(addresses), "health_seconds": 0.2, **settings}}


@contextmanager
def _near(folder: Path, *models: dict[str, Any], ready: bool = True, **lists: Any) -> Iterator[OvmsProcess]:
    config = folder / "near.json"
    config.write_text(json.dumps({"model_config_list": models, **lists}))
    with serving("--config_path", str(config), "--file_system_poll_wait_seconds", "0.2", ready=ready) as server:
        yield server


@contextmanager
def _far(folder: Path, ports: Sequence[int] = ()) -> Iterator[OvmsProcess]:
    """Serve what a folder has; at given ports, so that it can come back."""
    models = [path.name for path in (folder / "models").iterdir()]
    config = folder / "far.json"
    entries = [
        {"config": {"name": name, "base_path": f"models/{name}", "stateful": name == "accumulator"}} for name in models
    ]
    graphs = [{"name": "wait"}]
    config.write_text(json.dumps({"model_config_list": entries, "mediapipe_config_list": graphs}))
    grpc_port, rest_port = ports or free_ports(2)
    options = ["serve", "--port", str(grpc_port), "--rest_port", str(rest_port), "--trial_load", "off"]
    options += ["--grpc_bind_address", "127.0.0.1", "--rest_bind_address", "127.0.0.1", "--config_path", str(config)]
    options += ["--metrics_enable"]
    with running(*options, grpc=grpc_port, rest=rest_port) as server:
        yield server


def _input(values: Any, name: str = "b", datatype: str = "FP32") -> Any:
    array = np.asarray(values)
    made = triton.InferInput(name, array.shape, datatype)
    made.set_data_from_numpy(array)
    return made


def _infer(client: Any, model: str = "m", value: float = 1, **options: Any) -> list[float]:
    result = client.infer(model, [_input(np.full((1, 10), value, np.float32))], client_timeout=30, **options)
    found: list[float] = result.as_numpy(options.get("output", "a"))[0].tolist()
    return found


@contextmanager
def _client(server: OvmsProcess) -> Iterator[Any]:
    client = triton.InferenceServerClient(server.grpc)
    try:
        yield client
    finally:
        client.close()


def _wait(condition: Callable[[], bool]) -> None:
    ends = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < ends
        threading.Event().wait(0.05)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models of the far server: a quick one, a large one, one with sequences, and a graph that never answers."""
    root = tmp_path_factory.mktemp("far")
    ir.save(ir.dummy(), root / "models", "dummy")
    ir.save(ir.dummy((1, 4 * 2**20)), root / "models", "large")
    (root / "wait").mkdir()
    (root / "wait" / "wait.py").write_text(_WAIT)
    (root / "wait" / "graph.pbtxt").write_text(graph_text(python_node("wait.py")))
    ir.save(ir.accumulator(), root / "models", "accumulator")
    return root


@pytest.fixture(scope="module")
def far(folder: Path) -> Iterator[OvmsProcess]:
    """A server that stays."""
    with _far(folder) as server:
        yield server


def test_clients_graphs_and_pipelines_call_it_like_any_model(tmp_path: Path, far: OvmsProcess) -> None:
    """Over both protocols; metadata and errors are the other server's."""
    (tmp_path / "graph").mkdir()
    (tmp_path / "graph" / "graph.pbtxt").write_text(inference_graph("m"))
    source = {"node_name": "request", "data_item": "x"}
    node = {
        "name": "n",
        "model_name": "m",
        "type": "DL model",
        "inputs": [{"b": source}],
        "outputs": [{"data_item": "a", "alias": "y"}],
    }
    pipeline = {
        "name": "dag",
        "inputs": ["x"],
        "nodes": [node],
        "outputs": [{"y": {"node_name": "n", "data_item": "y"}}],
    }
    lists: dict[str, Any] = {"mediapipe_config_list": [{"name": "graph"}], "pipeline_config_list": [pipeline]}
    models = [_remote("m", f"grpc://{far.grpc}", remote_name="dummy"), _remote("rest", far.rest, remote_name="dummy")]
    with _near(tmp_path, *models, **lists) as near, _client(near) as client:
        known = client.get_model_metadata("m")
        assert [(each.name, each.datatype, list(each.shape)) for each in known.inputs] == [("b", "FP32", [1, 10])]
        assert _infer(client, "m", 3) == [4.0] * 10
        assert _infer(client, "rest", 4) == [5.0] * 10
        for name, given, output in (("graph", "in", "out"), ("dag", "x", "y")):
            result = client.infer(name, [_input(np.ones((1, 10), np.float32), given)], client_timeout=30)
            assert result.as_numpy(output)[0].tolist() == [2.0] * 10
        for name, where in (("m", f"grpc://{far.grpc}"), ("rest", far.rest)):
            with pytest.raises(triton.InferenceServerException) as caught:
                client.infer(name, [_input(np.ones((1, 11), np.float32))], client_timeout=30)
            assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"
            assert caught.value.message().startswith("Invalid input shape - Expected: (1,10); Actual: (1,11)")
            assert f"told by {where}" in caught.value.message()


@contextmanager
def _secret(folder: Path, tmp_path: Path, authority: trustme.CA) -> Iterator[tuple[int, int]]:
    """Serve a model to clients that show a certificate; gives the ports of gRPC and REST."""
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    for name in ("localhost", "client"):
        authority.issue_cert(name).private_key_and_cert_chain_pem.write_to_path(tmp_path / f"{name}.pem")
    grpc_port, rest_port, probe_port = free_ports(3)
    file = str(tmp_path / "localhost.pem")
    options = ["--model_name", "dummy", "--model_path", str(folder / "models" / "dummy"), "--trial_load", "off"]
    options += ["--port", str(grpc_port), "--rest_port", str(rest_port), "--probe_port", str(probe_port)]
    options += ["--grpc_bind_address", "127.0.0.1", "--rest_bind_address", "127.0.0.1"]
    options += ["--tls_cert", file, "--tls_key", file, "--client_ca", str(tmp_path / "ca.pem")]
    with running("serve", *options, grpc=grpc_port, rest=probe_port):
        yield grpc_port, rest_port


def test_a_server_with_tls_is_called_with_a_certificate(tmp_path: Path, folder: Path) -> None:
    """Over both protocols; one whose certificate nobody knows is not called, and says why."""
    authority, other = trustme.CA(), trustme.CA()
    other.cert_pem.write_to_path(tmp_path / "other.pem")
    tls = {"ca": "ca.pem", "cert": "client.pem", "key": "client.pem", "server_name": "localhost"}
    with _secret(folder, tmp_path, authority) as (grpc_port, rest_port):
        entries = [
            _remote("over_grpc", f"grpcs://127.0.0.1:{grpc_port}", remote_name="dummy", tls=tls),
            _remote("over_rest", f"https://127.0.0.1:{rest_port}", remote_name="dummy", tls=tls),
            _remote("unknown", f"grpcs://127.0.0.1:{grpc_port}", remote_name="dummy", tls={**tls, "ca": "other.pem"}),
        ]
        with _near(tmp_path, *entries, ready=False) as near, _client(near) as client:
            near.wait_live()
            for name in ("over_grpc", "over_rest"):
                _wait(partial(client.is_model_ready, name))
                assert _infer(client, name, 3) == [4.0] * 10
            with pytest.raises(triton.InferenceServerException, match="cannot be reached: self-signed certificate"):
                _infer(client, "unknown")


def test_a_call_that_is_cancelled_here_is_cancelled_there(tmp_path: Path, far: OvmsProcess) -> None:
    """Its metrics say so; over gRPC and over REST."""
    models = [_remote("grpc", f"grpc://{far.grpc}", remote_name="wait"), _remote("rest", far.rest, remote_name="wait")]
    with _near(tmp_path, *models) as near, _client(near) as client:
        for name in ("grpc", "rest"):
            before = _metric(far, "ovmstrio_requests_total", 'name="wait"', 'code="Cancelled"')
            done = threading.Event()
            given = [_input(np.ones(1, np.float32), "in")]
            call = client.async_infer(name, given, callback=lambda result, error, done=done: done.set())
            _wait(lambda: _metric(far, "ovms_current_graphs", 'name="wait"') == 1)
            call.cancel()
            assert done.wait(60)
            _wait(lambda: _metric(far, "ovms_current_graphs", 'name="wait"') == 0)
            after = _metric(far, "ovmstrio_requests_total", 'name="wait"', 'code="Cancelled"')
            assert after == before + 1


def test_what_is_left_of_a_deadline_is_passed_on(tmp_path: Path, far: OvmsProcess) -> None:
    """And the configured time is, where a caller has all the time there is."""
    models = [_remote("m", f"grpc://{far.grpc}", remote_name="wait", timeout_seconds=0.5)]
    with _near(tmp_path, *models) as near, _client(near) as client:
        for options in ({"client_timeout": 0.5}, {"client_timeout": 60}):
            with pytest.raises(triton.InferenceServerException) as caught:
                client.infer("m", [_input(np.ones(1, np.float32), "in")], **options)
            assert caught.value.status() == "StatusCode.DEADLINE_EXCEEDED"
            _wait(lambda: _metric(far, "ovms_current_graphs", 'name="wait"') == 0)


def test_a_server_that_is_killed_and_comes_back(tmp_path: Path, folder: Path) -> None:
    """Calls fail with UNAVAILABLE and the reason, readiness says so, and nothing has to be loaded again."""
    ports = free_ports(2)
    where = f"grpc://127.0.0.1:{ports[0]}"
    with ExitStack() as stack:
        first = stack.enter_context(_far(folder, ports))
        near = stack.enter_context(_near(tmp_path, _remote("m", where, remote_name="dummy", retry_pause_ms=1)))
        client = stack.enter_context(_client(near))
        assert _infer(client) == [2.0] * 10
        first.stop(signal.SIGKILL)
        with pytest.raises(triton.InferenceServerException, match=where) as caught:
            _infer(client)
        assert caught.value.status() == "StatusCode.UNAVAILABLE"
        _wait(lambda: not near.answers("/v2/health/ready"))
        assert f'remote model \\"m\\": {where}' in near.get("/v2/health/ready").text
        stack.enter_context(_far(folder, ports))
        near.wait_ready()
        assert _infer(client) == [2.0] * 10


@pytest.mark.slow
def test_calls_go_on_while_one_of_two_servers_drains_or_is_killed(tmp_path: Path, folder: Path) -> None:
    """None is lost with one that ends gently; those under way with one that is killed fail and are not made again."""
    with ExitStack() as stack:
        servers = [stack.enter_context(_far(folder)) for _ in range(2)]
        addresses = [f"grpc://{server.grpc}" for server in servers]
        near = stack.enter_context(_near(tmp_path, _remote("m", *addresses, remote_name="dummy")))
        client = stack.enter_context(_client(near))
        failures: list[BaseException] = []
        answered = [0]
        over = threading.Event()

        def call() -> None:
            while not over.is_set():
                try:
                    assert _infer(client) == [2.0] * 10
                    answered[0] += 1
                except triton.InferenceServerException as error:
                    failures.append(error)

        threads = [threading.Thread(target=call) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            _wait(lambda: answered[0] > 50)
            assert servers[0].stop()[0] == 0
            now = answered[0]
            _wait(lambda: answered[0] > now + 50)
        finally:
            over.set()
            for thread in threads:
                thread.join()
        assert failures == []
        assert near.answers("/v2/health/ready")


@pytest.mark.slow
def test_a_server_that_is_not_there_yet_is_waited_for(tmp_path: Path, folder: Path) -> None:
    """The model is loaded when it comes; everything else is served meanwhile."""
    ports = free_ports(2)
    where = f"grpc://127.0.0.1:{ports[0]}"
    local = {"config": {"name": "local", "base_path": str(folder / "models" / "dummy")}}
    models = [_remote("m", where, remote_name="dummy"), local]
    with _near(tmp_path, *models, ready=False) as near, _client(near) as client:
        near.wait_live()
        _wait(lambda: near.answers("/v2/models/local/ready"))
        _wait(lambda: f"{where} cannot be reached: Connection refused" in near.get("/v2/health/ready").text)
        with _far(folder, ports):
            near.wait_ready()
            assert _infer(client) == [2.0] * 10


def test_a_sequence_stays_with_the_server_where_it_began(tmp_path: Path, folder: Path, far: OvmsProcess) -> None:
    """Of two that take turns otherwise; its steps add up."""
    with _far(folder) as other:
        addresses = [f"grpc://{server.grpc}" for server in (far, other)]
        with _near(tmp_path, _remote("m", *addresses, remote_name="accumulator")) as near, _client(near) as client:
            known = client.get_model_metadata("m")
            name, shape = known.inputs[0].name, [int(size) for size in known.inputs[0].shape]
            for sequence in (7, 8, "text"):
                for step in range(1, 6):
                    flags = {"sequence_start": step == 1, "sequence_end": step == 5}
                    result = client.infer(
                        "m",
                        [_input(np.ones(shape, np.float32), name)],
                        sequence_id=sequence,
                        client_timeout=30,
                        **flags,
                    )
                    assert np.asarray(result.as_numpy(known.outputs[0].name)).max() == step


def test_large_tensors_come_back_as_they_were(tmp_path: Path, far: OvmsProcess) -> None:
    """More than any window of HTTP/2, over both protocols."""
    values = np.arange(4 * 2**20, dtype=np.float32).reshape(1, -1)
    models = [
        _remote("grpc", f"grpc://{far.grpc}", remote_name="large"),
        _remote("rest", far.rest, remote_name="large"),
    ]
    with _near(tmp_path, *models) as near, _client(near) as client:
        for name in ("grpc", "rest"):
            result = client.infer(name, [_input(values)], client_timeout=60)
            assert np.array_equal(result.as_numpy("a"), values + 1)


class _Generic(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpcio has no types
    """KServe's service as another implementation of gRPC serves it."""

    def __init__(self) -> None:
        self.seconds_left = 0.0

    def service(self, details: Any) -> Any:
        """Answer what a remote model asks."""
        answers = {"ModelMetadata": self.describe, "ModelReady": self.be_ready, "ModelInfer": self.infer}
        return grpc.unary_unary_rpc_method_handler(answers[details.method.rpartition("/")[2]])

    def describe(self, data: bytes, context: Any) -> bytes:
        """Describe one input and one output."""
        answer = message_class("inference.ModelMetadataResponse")(name="x", platform="other")
        answer.inputs.add(name="i", datatype="INT32", shape=[-1])
        answer.outputs.add(name="o", datatype="INT32", shape=[-1])
        return bytes(answer.SerializeToString())

    def be_ready(self, data: bytes, context: Any) -> bytes:
        """Be ready."""
        return bytes(message_class("inference.ModelReadyResponse")(ready=True).SerializeToString())

    def infer(self, data: bytes, context: Any) -> bytes:
        """Answer with what came, or refuse what is empty."""
        request = message_class("inference.ModelInferRequest").FromString(data)
        self.seconds_left = context.time_remaining()
        if not request.raw_input_contents[0]:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "nichts: ä\n100 %")
        answer = message_class("inference.ModelInferResponse")(model_name="x", raw_output_contents=[])
        answer.outputs.add(name="o", datatype="INT32", shape=request.inputs[0].shape)
        answer.raw_output_contents.append(request.raw_input_contents[0])
        answer.parameters["told"].string_param = "yes"
        return bytes(answer.SerializeToString())


def test_a_server_of_another_make_is_called(tmp_path: Path) -> None:
    """Of grpcio's, with its windows, its frames and its way to write texts."""
    handler = _Generic()
    server = grpc.server(ThreadPoolExecutor(2), options=[("grpc.max_receive_message_length", -1)])
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        models = [_remote("m", f"grpc://127.0.0.1:{port}", timeout_seconds=30)]
        with _near(tmp_path, *models) as near, _client(near) as client:
            assert client.get_model_metadata("m").platform == "other"
            values = np.arange(3_000_000, dtype=np.int32)
            result = client.infer("m", [_input(values, "i", "INT32")], client_timeout=60)
            assert np.array_equal(result.as_numpy("o"), values)
            assert result.get_response().parameters["told"].string_param == "yes"
            assert 0 < handler.seconds_left <= 30.1
            with pytest.raises(triton.InferenceServerException) as caught:
                client.infer("m", [_input(np.zeros(0, np.int32), "i", "INT32")], client_timeout=60)
            assert caught.value.status() == "StatusCode.FAILED_PRECONDITION"
            assert "nichts: ä\n100 %" in caught.value.message()
    finally:
        server.stop(None).wait(30)


def _metric(server: OvmsProcess, beginning: str, *labels: str) -> float:
    lines = server.get("/metrics").text.splitlines()
    found = [line for line in lines if line.startswith(beginning) and all(label in line for label in labels)]
    return sum(float(line.split()[-1]) for line in found)
