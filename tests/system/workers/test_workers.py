"""``ovms serve --workers``: any configuration, served by several processes as by one."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc
from prometheus_client.parser import text_string_to_metric_families

from tests.support import ir
from tests.support.graphs import graph_text, python_node
from tests.support.processes import OvmsProcess, serving
from tests.support.projects import write_project

pytestmark = pytest.mark.e2e

SECONDS = 60
WHO = """
import os

class Handler:
    def handle_get(self):
        return {"pid": os.getpid()}
"""
FATAL = """
import os, signal

class OvmsPythonModel:
    def execute(self, inputs):
        with open({runs!r}, "a") as file:
            file.write("x")
        os.kill(os.getpid(), signal.SIGKILL)
"""
ROW = {"inputs": [{"name": "b", "shape": [1, 10], "datatype": "FP32", "data": [1.0] * 10}]}


def _configure(folder: Path) -> Path:
    ir.save(ir.dummy(), folder, "dummy")
    write_project(folder / "who", WHO, name="who")
    model = {"config": {"name": "dummy", "base_path": str(folder / "dummy")}}
    file = folder / "config.json"
    handler = {"name": "who", "path": str(folder / "who")}
    file.write_text(json.dumps({"model_config_list": [model], "handler_config_list": [handler]}), encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OvmsProcess]:
    """A server of two processes that nobody hurts."""
    folder = tmp_path_factory.mktemp("workers")
    with serving("--config_path", str(_configure(folder)), "--workers", "2", ready=True, log=folder / "log") as started:
        yield started


def _until(holds: Callable[[], bool]) -> None:
    ends = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < ends
        threading.Event().wait(0.02)


def _connections(server: OvmsProcess, stack: ExitStack, count: int) -> list[httpx.Client]:
    """Open connections that stay, and give their clients."""
    clients = [stack.enter_context(httpx.Client(base_url=server.rest, timeout=SECONDS)) for _ in range(count)]
    for client in clients:
        client.get("/v2/health/live").raise_for_status()
    return clients


def _pid(client: httpx.Client) -> int:
    return int(client.get("/who").json()["pid"])


def _pids(server: OvmsProcess) -> set[int]:
    with ExitStack() as stack:
        return {_pid(client) for client in _connections(server, stack, 4)}


def _both_pids(server: OvmsProcess) -> set[int]:
    """Return the ids of the two processes; a process that is still starting gets no connections."""
    found = set[int]()

    def both_answer() -> bool:
        found.clear()
        found.update(_pids(server))
        return len(found) == 2

    _until(both_answer)
    return found


def _sample(server: OvmsProcess, family_name: str, **labels: str) -> float:
    text = server.get("/metrics").text
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == family_name and labels.items() <= sample.labels.items()
    )


def test_connections_are_spread_over_the_processes(server: OvmsProcess) -> None:
    """Each has as many as the other, and a connection stays where it is."""
    with ExitStack() as stack:
        clients = _connections(server, stack, 6)
        pids = [_pid(client) for client in clients]
        assert sorted(pids.count(pid) for pid in set(pids)) == [3, 3]
        assert server.process.pid not in pids
        assert [_pid(client) for client in clients] == pids


def test_metrics_and_statistics_are_sums_whoever_is_asked(server: OvmsProcess) -> None:
    """After a known number of calls on connections of all processes, over both protocols."""
    metric = {"name": "dummy", "method": "ModelInfer", "code": "OK"}
    before = _sample(server, "ovmstrio_requests_total", **metric)
    counted = _counted(server.get("/v2/models/dummy/stats").json())
    with ExitStack() as stack:
        for client in _connections(server, stack, 4):
            for _ in range(5):
                assert client.post("/v2/models/dummy/infer", json=ROW).json()["outputs"][0]["data"] == [2.0] * 10
    for _ in range(3):
        with tritonclient.grpc.InferenceServerClient(server.grpc) as grpc:
            given = tritonclient.grpc.InferInput("b", [1, 10], "FP32")
            given.set_data_from_numpy(np.ones((1, 10), np.float32))
            assert grpc.infer("dummy", [given]).as_numpy("a").tolist() == [[2.0] * 10]
    # Each question goes to the process that has the fewest connections, so that both are asked.
    for _ in range(4):
        assert _sample(server, "ovmstrio_requests_total", **metric) - before == 23
        assert _counted(server.get("/v2/models/dummy/stats").json()) - counted == 23
    with tritonclient.grpc.InferenceServerClient(server.grpc) as grpc:
        assert _counted(grpc.get_inference_statistics("dummy", as_json=True)) - counted == 23
    assert _sample(server, "ovmstrio_ready") == 1


def _counted(document: Any) -> int:
    return int(document["model_stats"][0]["inference_count"])


def test_a_reload_is_done_by_all(tmp_path: Path) -> None:
    """When it is answered, every process serves what is configured now; a file that cannot be used changes nothing."""
    file = _configure(tmp_path)
    options = ("--workers", "2", "--file_system_poll_wait_seconds", "0")
    with serving("--config_path", str(file), *options, log=tmp_path / "log") as server, ExitStack() as stack:
        clients = _connections(server, stack, 4)
        before = file.read_text(encoding="utf-8")
        file.write_text(before.replace('"name": "dummy"', '"name": "other"'), encoding="utf-8")
        assert clients[0].post("/v1/config/reload").status_code == 201
        for client in clients:
            assert client.post("/v2/models/other/infer", json=ROW).status_code == 200
            assert client.post("/v2/models/dummy/infer", json=ROW).status_code == 404
        file.write_text("{", encoding="utf-8")
        assert clients[1].post("/v1/config/reload").status_code >= 400
        for client in clients:
            assert client.post("/v2/models/other/infer", json=ROW).status_code == 200


def test_the_server_is_ready_only_while_all_its_processes_are(tmp_path: Path) -> None:
    """One that is killed ends its connections and no other's, and another one takes its place."""
    ready = tmp_path / "ready"
    options = ("--workers", "2", "--readiness_file", str(ready))
    with serving("--config_path", str(_configure(tmp_path)), *options, log=tmp_path / "log") as server:
        _until(ready.exists)
        with ExitStack() as stack:
            clients = _connections(server, stack, 4)
            pids = [_pid(client) for client in clients]
            os.kill(pids[0], signal.SIGKILL)
            _until(lambda: not server.answers("/v2/health/ready"))
            assert not ready.exists()
            left = [client for client, pid in zip(clients, pids, strict=True) if pid != pids[0]]
            assert [_pid(client) for client in left] == [pids[1]] * 2
            _until(lambda: server.answers("/v2/health/ready"))
            _until(ready.exists)
            # What they had open has ended; they connect again, and are answered.
            assert all(_pid(client) != pids[0] for client in clients)
        now = _pids(server)
        assert len(now) == 2
        assert pids[0] not in now
        assert pids[1] in now


@pytest.mark.slow
def test_calls_before_any_code_of_users_outlive_their_process(tmp_path: Path) -> None:
    """Processes are killed again and again under load; whatever was asked is answered, and right."""
    failures: list[str] = []
    answered = 0
    over = threading.Event()
    with serving("--config_path", str(_configure(tmp_path)), "--workers", "2", log=tmp_path / "log") as server:

        def call() -> None:
            nonlocal answered
            with httpx.Client(base_url=server.rest, timeout=SECONDS) as client:
                while not over.is_set():
                    try:
                        answer = client.post("/v2/models/dummy/infer", json=ROW)
                    except httpx.TransportError:
                        continue  # The model runs without code of users; only the end of an answer can be cut off.
                    if answer.status_code != 200 or answer.json()["outputs"][0]["data"] != [2.0] * 10:
                        failures.append(answer.text)
                    answered += 1
                    over.wait(0.01)

        threads = [threading.Thread(target=call) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(2):
                goal = answered + 30
                _until(lambda goal=goal: answered > goal)  # type: ignore[misc]  # the loop's own
                os.kill(min(_pids(server)), signal.SIGKILL)
                _until(lambda: len(_pids(server)) == 2 and server.answers("/v2/health/ready"))
        finally:
            over.set()
            for thread in threads:
                thread.join()
    assert not failures
    assert answered > 60


def test_code_of_users_that_ends_its_process_runs_once(tmp_path: Path) -> None:
    """The call is not made again by another process; whoever called is told."""
    runs = tmp_path / "runs"
    folder = tmp_path / "fatal"
    folder.mkdir()
    (folder / "handler.py").write_text(FATAL.format(runs=str(runs)), encoding="utf-8")
    (folder / "graph.pbtxt").write_text(graph_text(python_node("handler.py")), encoding="utf-8")
    file = tmp_path / "config.json"
    document = {"model_config_list": [], "mediapipe_config_list": [{"name": "fatal", "base_path": str(folder)}]}
    file.write_text(json.dumps(document), encoding="utf-8")
    with serving("--config_path", str(file), "--workers", "2", ready=True, log=tmp_path / "log") as server:
        tensor = {"name": "in", "shape": [1], "datatype": "BYTES", "data": ["x"]}
        with httpx.Client(base_url=server.rest, timeout=SECONDS) as client:
            answer = client.post("/v2/models/fatal/infer", json={"inputs": [tensor]})
        assert (answer.status_code, answer.json()["error"]) == (500, "the process that ran this call ended by SIGKILL")
    assert runs.read_text(encoding="utf-8") == "x"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_all_processes(tmp_path: Path, number: signal.Signals) -> None:
    """The exit code is 0, and no process is left."""
    with serving("--config_path", str(_configure(tmp_path)), "--workers", "2", log=tmp_path / "log") as server:
        pids = _pids(server)
        assert len(pids) == 2
        code, printed = server.stop(number)
    assert code == 0, printed
    assert "drained" in printed
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_unix_sockets_and_ports_for_probes_are_the_servers_too(tmp_path: Path) -> None:
    """Connections to them reach the processes as all others do."""
    path = tmp_path / "rest"
    options = ("--workers", "2", "--rest_bind_address", f"127.0.0.1,unix:{path}")
    with serving("--config_path", str(_configure(tmp_path)), *options, log=tmp_path / "log"):
        pids = set()
        transports = [httpx.HTTPTransport(uds=str(path)) for _ in range(4)]
        with ExitStack() as stack:
            for transport in transports:
                client = stack.enter_context(httpx.Client(base_url="http://here", transport=transport, timeout=SECONDS))
                pids.add(_pid(client))
                assert client.post("/v2/models/dummy/infer", json=ROW).json()["outputs"][0]["data"] == [2.0] * 10
        assert len(pids) == 2


# Sequences


def _configure_stateful(folder: Path) -> Path:
    ir.save(ir.accumulator(), folder, "acc")
    write_project(folder / "who", WHO, name="who")
    model = {"config": {"name": "acc", "base_path": str(folder / "acc"), "stateful": True}}
    file = folder / "config.json"
    handler = {"name": "who", "path": str(folder / "who")}
    file.write_text(json.dumps({"model_config_list": [model], "handler_config_list": [handler]}), encoding="utf-8")
    return file


def _step(client: httpx.Client, **parameters: Any) -> httpx.Response:
    row = {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1.0, 2.0]}
    return client.post("/v2/models/acc/infer", json={"inputs": [row], "parameters": parameters})


def _sums(answer: httpx.Response) -> tuple[list[float], Any]:
    outputs = {each["name"]: each["data"] for each in answer.raise_for_status().json()["outputs"]}
    (identity,) = outputs.pop("sequence_id")
    ((_, data),) = outputs.items()
    return data, identity


def test_the_steps_of_a_sequence_may_come_by_any_connection(tmp_path: Path) -> None:
    """Each has one state, whoever gets the step; lists have all, and errors are those of one process."""
    with (
        serving("--config_path", str(_configure_stateful(tmp_path)), "--workers", "2", log=tmp_path / "log") as server,
        ExitStack() as stack,
    ):
        clients = _connections(server, stack, 4)
        assert len({_pid(client) for client in clients}) == 2
        names = [*range(1, 9), "one", "two"]
        for identity in names:
            assert _sums(_step(clients[0], sequence_id=identity, sequence_start=True)) == ([1.0, 2.0], identity)
            for count, client in enumerate(clients, 2):
                assert _sums(_step(client, sequence_id=identity)) == ([count * 1.0, count * 2.0], identity)
        given = [_sums(_step(client, sequence_start=True))[1] for client in clients]
        assert len({*given, *names}) == len(given) + len(names)
        for client in clients:
            listed = client.get("/v2/models/acc/sequences").json()["sequences"]
            assert [each["id"] for each in listed] == [*sorted({*range(1, 9), *given}), "one", "two"]
            assert client.post("/v2/models/acc/infer", json={}).status_code == 400
            assert _step(client, sequence_id=3, sequence_start=True).status_code == 409
            assert _step(client, sequence_id=999).status_code == 404
            bad = {"inputs": [{"name": "x", "shape": [1, 3], "datatype": "FP32", "data": [1.0, 2.0, 3.0]}]}
            assert client.post("/v2/models/acc/infer", json=bad | {"parameters": {"sequence_id": 3}}).status_code == 400
        for identity, client in zip(names, clients * 3, strict=False):
            assert _sums(_step(client, sequence_id=identity, sequence_end=True)) == ([6.0, 12.0], identity)
            assert _step(clients[1], sequence_id=identity).status_code == 404
        calls = _sample(server, "ovmstrio_requests_total", name="acc", method="ModelInfer", code="OK")
        assert calls == len(names) * 6 + len(given)


def test_steps_that_are_sent_ahead_keep_their_order(tmp_path: Path) -> None:
    """Whoever has the sequence: of many steps on one connection each sees what came before it."""
    with (
        serving("--config_path", str(_configure_stateful(tmp_path)), "--workers", "2", log=tmp_path / "log") as server,
        tritonclient.grpc.InferenceServerClient(server.grpc) as client,
        ExitStack() as stack,
    ):
        # Half of them are another process's than the one that has the stream.
        starters = list({_pid(each): each for each in _connections(server, stack, 4)}.values())
        assert len(starters) == 2
        for identity in range(1, 7):
            _sums(_step(starters[identity % 2], sequence_id=identity, sequence_start=True))
        sums: dict[int, list[float]] = {}
        ended = threading.Semaphore(0)

        def note(result: Any, error: Any) -> None:
            if error is None:
                identity = int(result.as_numpy("sequence_id")[0])
                (name,) = [each.name for each in result.get_response().outputs if each.name != "sequence_id"]
                sums.setdefault(identity, []).append(float(result.as_numpy(name)[0, 0]))
            ended.release()

        given = tritonclient.grpc.InferInput("x", [1, 2], "FP32")
        given.set_data_from_numpy(np.ones((1, 2), np.float32))
        client.start_stream(callback=note)
        for number in range(30):
            for identity in range(1, 7):
                client.async_stream_infer("acc", [given], sequence_id=identity, sequence_end=number == 29)
        for _ in range(180):
            assert ended.acquire(timeout=SECONDS)
        client.stop_stream()
    assert sums == {identity: [float(each) for each in range(2, 32)] for identity in range(1, 7)}


@pytest.mark.slow
def test_sequences_come_back_with_their_processes(tmp_path: Path) -> None:
    """From the store, after the kill of one and the end of all; a server with another number of them does not start."""
    file = _configure_stateful(tmp_path)
    store = tmp_path / "kept"
    options = ("--config_path", str(file), "--sequence_store", str(store), "--sequence_store_seconds", "0.2")
    with serving(*options, "--workers", "2", log=tmp_path / "log") as server:
        with ExitStack() as stack:
            by_pid = {_pid(client): client for client in _connections(server, stack, 4)}
            pids, clients = list(by_pid), list(by_pid.values())
            assert len(pids) == 2
            for identity in range(1, 7):
                _sums(_step(clients[identity % 2], sequence_id=identity, sequence_start=True))
            _until(lambda: all(path.stat().st_size > 100 for path in store.glob("worker-*/sequences.bin")))
            threading.Event().wait(0.5)
            os.kill(pids[1], signal.SIGKILL)
            _until(lambda: not server.answers("/v2/health/ready"))
            # What belongs to it waits for its successor.
            for identity in range(1, 7):
                assert _sums(_step(clients[0], sequence_id=identity))[0] == [2.0, 4.0]
            _until(lambda: server.answers("/v2/health/ready"))
        assert server.stop()[0] == 0
    with serving(*options, ready=False, log=tmp_path / "one") as single:
        assert single.process.wait(SECONDS) == 1
    assert "start with --workers 2" in (tmp_path / "one").read_text(encoding="utf-8")
    with serving(*options, "--workers", "2", log=tmp_path / "log") as server, ExitStack() as stack:
        for client in _connections(server, stack, 2):
            listed = client.get("/v2/models/acc/sequences").json()["sequences"]
            assert [each["requests"] for each in listed] == [2] * 6
        for identity in range(1, 7):
            assert _sums(_step(client, sequence_id=identity))[0] == [3.0, 6.0]


# Renewal


def test_processes_are_renewed_one_after_the_other_and_nothing_is_lost(tmp_path: Path) -> None:
    """By SIGHUP, with what is configured then, while clients are busy; a file that cannot be used changes nothing."""
    file = _configure(tmp_path)
    log = tmp_path / "log"
    options = ("--workers", "2", "--file_system_poll_wait_seconds", "0")
    with (
        serving("--config_path", str(file), *options, log=log) as server,
        _busy_clients(server) as (answered, failures),
    ):
        before = _both_pids(server)
        text = file.read_text(encoding="utf-8")
        file.write_text("{", encoding="utf-8")
        server.process.send_signal(signal.SIGHUP)
        _until(lambda: "processes not renewed" in server.printed_so_far())
        assert _both_pids(server) == before
        entry = '{"config": {"name": "other", "base_path": "' + str(tmp_path / "dummy") + '"}}, '
        place = text.index("[") + 1
        file.write_text(text[:place] + entry + text[place:], encoding="utf-8")
        server.process.send_signal(signal.SIGHUP)
        _until(lambda: "processes renewed" in server.printed_so_far())
        assert _both_pids(server).isdisjoint(before)
        with ExitStack() as stack:
            for client in _connections(server, stack, 4):
                assert client.get("/v2/models/other/ready").status_code == 200
        goals = [count + 3 for count in answered]
        _until(lambda: all(count >= goal for count, goal in zip(answered, goals, strict=True)))
        assert server.get("/v2/health/ready").status_code == 200
    assert not failures


def test_a_stop_amid_a_renewal_is_a_stop_like_any_other(tmp_path: Path) -> None:
    """With all that the renewal has begun."""
    options = ("--workers", "2", "--config_path", str(_configure(tmp_path)))
    with serving(*options, log=tmp_path / "log") as server:
        before = _both_pids(server)
        server.process.send_signal(signal.SIGHUP)
        _until(lambda: _pids(server) != before)
        code, printed = server.stop()
    assert code == 0
    assert "Traceback" not in printed
    assert "drained" in printed


@pytest.mark.slow
def test_a_process_that_is_stuck_is_renewed_too(tmp_path: Path) -> None:
    """It is killed when it has not ended in its time, and the others follow."""
    options = ("--workers", "2", "--drain_seconds", "0")
    with serving("--config_path", str(_configure(tmp_path)), *options, log=tmp_path / "log") as server:
        before = _both_pids(server)
        for pid in before:
            os.kill(pid, signal.SIGSTOP)
        server.process.send_signal(signal.SIGHUP)
        _until(lambda: "does not end, and is killed" in server.printed_so_far())
        for pid in before:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        _until(lambda: "processes renewed" in server.printed_so_far())
        assert _both_pids(server).isdisjoint(before)
        assert server.stop()[0] == 0


@contextmanager
def _busy_clients(server: OvmsProcess) -> Iterator[tuple[list[int], list[str]]]:
    """Call again and again over both protocols until the block ends; gives what was answered, and what failed."""
    answered, failures, over = [0, 0], list[str](), threading.Event()

    def call_rest() -> None:
        with httpx.Client(base_url=server.rest, timeout=SECONDS) as client:
            while not over.wait(0.005):
                try:
                    answer = client.post("/v2/models/dummy/infer", json=ROW)
                except httpx.TransportError as error:
                    failures.append(repr(error))
                    continue
                if answer.status_code != 200:
                    failures.append(answer.text)
                answered[0] += 1

    def call_grpc() -> None:
        given = tritonclient.grpc.InferInput("b", [1, 10], "FP32")
        given.set_data_from_numpy(np.ones((1, 10), np.float32))
        with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
            while not over.wait(0.005):
                try:
                    assert client.infer("dummy", [given]).as_numpy("a").tolist() == [[2.0] * 10]
                except tritonclient.grpc.InferenceServerException as error:
                    failures.append(repr(error))
                    continue
                answered[1] += 1

    threads = [threading.Thread(target=each) for each in (call_rest, call_rest, call_grpc)]
    for thread in threads:
        thread.start()
    try:
        yield answered, failures
    finally:
        over.set()
        for thread in threads:
            thread.join()
