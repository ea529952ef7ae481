from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import tritonclient.grpc

from tests.support.processes import OvmsProcess, run_ovms, serving
from tests.support.projects import write_project
from tests.support.system_servers import WAITING_HANDLER, SystemServers, worker_configuration, write_config
from tests.support.waits import WAIT_SECONDS, until
from tests.support.worker_clients import (
    ROW,
    each_worker,
    ending_worker,
    infer_by_grpc,
    kill_worker,
    pid_of,
    sample,
    worker_pids,
)


@pytest.fixture
def server(servers: SystemServers) -> OvmsProcess:
    return servers.serving("workers")


@pytest.fixture
def recovering(servers: SystemServers) -> OvmsProcess:
    return servers.serving("recovering_workers")


def test_connections_are_spread_over_the_workers(server: OvmsProcess) -> None:
    def is_even() -> bool:
        with ExitStack() as stack:
            clients = [stack.enter_context(httpx.Client(base_url=server.rest, timeout=WAIT_SECONDS)) for _ in range(6)]
            pids = [pid_of(client) for client in clients]
            assert server.process.pid not in pids
            assert [pid_of(client) for client in clients] == pids
            return sorted(pids.count(pid) for pid in set(pids)) == [3, 3]

    # The parent may not know yet that connections of earlier tests have ended.
    until(is_even)


def _inferences(document: Any) -> int:
    return int(document["model_stats"][0]["inference_count"])


def test_metrics_and_statistics_are_sums_over_workers(server: OvmsProcess) -> None:
    metric = {"name": "counted", "method": "ModelInfer", "code": "OK"}
    path = "/v2/models/counted/stats"
    before, inferences = sample(server, "ovmstrio_requests_total", **metric), _inferences(server.get(path).json())
    with each_worker(server) as clients, tritonclient.grpc.InferenceServerClient(server.grpc) as grpc:
        for client in clients:
            for _ in range(5):
                answer = client.post("/v2/models/counted/infer", json=ROW).json()
                assert answer["outputs"][0]["data"] == [2.0] * 10
        for _ in range(3):
            assert infer_by_grpc(grpc, "counted") == [2.0] * 10
        # Each question opens a connection, and connections alternate between the workers.
        for _ in range(4):
            assert sample(server, "ovmstrio_requests_total", **metric) - before == 13
        for client in clients:
            assert _inferences(client.get(path).json()) - inferences == 13
        assert _inferences(grpc.get_inference_statistics("counted", as_json=True)) - inferences == 13
    assert sample(server, "ovmstrio_ready") == 1


def test_unix_sockets_reach_all_workers(server: OvmsProcess, servers: SystemServers) -> None:
    with each_worker(server, uds=str(servers.folder("workers") / "rest")) as clients:
        for client in clients:
            assert client.post("/v2/models/dummy/infer", json=ROW).json()["outputs"][0]["data"] == [2.0] * 10


# Killed workers


def test_the_server_is_ready_only_while_all_workers_are(recovering: OvmsProcess, servers: SystemServers) -> None:
    ready = servers.folder("recovering_workers") / "ready"
    until(ready.exists)
    with each_worker(recovering) as (victim, other):
        pids = [pid_of(victim), pid_of(other)]
        kill_worker(recovering, pids[0])
        assert recovering.get("/v2/health/ready").status_code == 503
        assert not ready.exists()
        assert pid_of(other) == pids[1]
        until(lambda: recovering.answers("/v2/health/ready"))
        until(ready.exists)
        # The connection has ended: the client connects again, and is answered.
        assert pid_of(victim) != pids[0]
    now = worker_pids(recovering)
    assert pids[0] not in now
    assert pids[1] in now


def test_a_worker_that_cannot_be_started_is_started_later(recovering: OvmsProcess) -> None:
    parent = recovering.process.pid
    with each_worker(recovering) as (victim, other):
        pids = [pid_of(victim), pid_of(other)]
        limits = resource.prlimit(parent, resource.RLIMIT_NOFILE)
        try:
            resource.prlimit(parent, resource.RLIMIT_NOFILE, (3, limits[1]))
            os.kill(pids[0], signal.SIGKILL)
            until(lambda: "worker not started" in recovering.printed_so_far())
            assert pid_of(other) == pids[1]
        finally:
            resource.prlimit(parent, resource.RLIMIT_NOFILE, limits)
        until(lambda: recovering.answers("/v2/health/ready"))
        assert pid_of(other) == pids[1]
    assert pids[1] in (now := worker_pids(recovering))
    assert pids[0] not in now


def test_user_code_that_ends_its_process_runs_once(recovering: OvmsProcess, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    tensor = {"name": "in", "shape": [1], "datatype": "BYTES", "data": [str(runs)]}
    with ending_worker(recovering), pytest.raises((httpx.NetworkError, httpx.RemoteProtocolError)):
        httpx.post(f"{recovering.rest}/v2/models/fatal/infer", json={"inputs": [tensor]}, timeout=WAIT_SECONDS)
    with httpx.Client(base_url=recovering.rest, timeout=WAIT_SECONDS) as client:
        assert _infer_by_rest(client) == [2.0] * 10
    until(lambda: recovering.answers("/v2/health/ready"))
    assert runs.read_text(encoding="utf-8") == "x"


@pytest.mark.slow
def test_calls_fail_only_with_their_connection_while_workers_are_killed(recovering: OvmsProcess) -> None:
    with _busy_clients(recovering, ignores_cuts=True) as (answered, failures):
        for _ in range(2):
            goal = sum(answered) + 30
            until(lambda goal=goal: sum(answered) > goal)  # type: ignore[misc]  # the loop's own
            kill_worker(recovering, min(worker_pids(recovering)))
            until(lambda: recovering.answers("/v2/health/ready"))
    assert not failures


def test_log_of_a_killed_worker_counts_its_calls(recovering: OvmsProcess, tmp_path: Path) -> None:
    begun, go = tmp_path / "begun", tmp_path / "go"
    with each_worker(recovering) as (victim, _):
        before = recovering.printed_so_far().count("requests_lost=1")
        pid = pid_of(victim)
        # Queries are no calls.
        assert victim.get("/v2/models/dummy").status_code == victim.get("/v2/models/dummy/ready").status_code == 200
        assert _infer_by_rest(victim) == [2.0] * 10

        def hold() -> None:
            with suppress(httpx.TransportError):
                victim.post("/waits", json={"begun": str(begun), "go": str(go)})

        thread = threading.Thread(target=hold)
        thread.start()
        until(begun.exists)
        kill_worker(recovering, pid)
        thread.join(WAIT_SECONDS)
        go.touch()
    assert recovering.printed_so_far().count("requests_lost=1") == before + 1
    until(lambda: recovering.answers("/v2/health/ready"))


def test_log_of_a_killed_worker_counts_its_queued_calls(tmp_path: Path) -> None:
    file = worker_configuration(tmp_path)
    write_project(tmp_path / "waits", WAITING_HANDLER, name="waits")
    document = json.loads(file.read_text(encoding="utf-8"))
    limits = {"max_concurrency": 1, "max_queue": 5}
    document["handler_config_list"].append({"name": "waits", "path": str(tmp_path / "waits"), **limits})
    file.write_text(json.dumps(document), encoding="utf-8")
    begun, go = tmp_path / "begun", tmp_path / "go"
    body = {"begun": str(begun), "go": str(go)}

    def ask(client: httpx.Client) -> None:
        with suppress(httpx.TransportError):
            client.post("/waits", json=body)

    with serving("--config_path", str(file), "--workers", "2", log=tmp_path / "log") as server, ExitStack() as stack:
        by_worker: dict[int, list[httpx.Client]] = {}
        while not any(len(clients) == 3 for clients in by_worker.values()):
            client = stack.enter_context(httpx.Client(base_url=server.rest, timeout=WAIT_SECONDS))
            by_worker.setdefault(pid_of(client), []).append(client)
        pid, clients = next(found for found in by_worker.items() if len(found[1]) == 3)
        threads = [threading.Thread(target=ask, args=(client,)) for client in clients]
        threads[0].start()
        until(begun.exists)
        for thread in threads[1:]:
            thread.start()
        until(lambda: sample(server, "ovmstrio_queued_requests", name="waits") == 2)
        kill_worker(server, pid)
        go.touch()
        for thread in threads:
            thread.join()
        assert server.printed_so_far().count("requests_lost=3") == 1


# A stopped process that holds the lock of the shared counts

_HOLDER = """
import os, signal, sys
from ovmstrio.workers.shared_state import SharedState

state = SharedState(os.open(sys.argv[1], os.O_RDWR), 2)
with state.locked():
    os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_calls_are_answered_while_a_stopped_process_holds_the_lock(servers: SystemServers) -> None:
    server = servers.serving("workers")
    shared, *_ = server.descriptors("memfd:ovmstrio-state")
    holder = subprocess.Popen([sys.executable, "-c", _HOLDER, str(shared)])
    try:
        until(lambda: psutil.Process(holder.pid).status() == psutil.STATUS_STOPPED)
        with each_worker(server) as clients:
            for client in clients:
                for _ in range(10):
                    assert client.get("/waits").status_code == 200
        assert psutil.Process(holder.pid).status() == psutil.STATUS_STOPPED
        holder.send_signal(signal.SIGCONT)
        assert holder.wait(WAIT_SECONDS) == 0
    finally:
        holder.kill()
        holder.wait()
    with each_worker(server) as clients:
        assert [client.get("/waits").status_code for client in clients] == [200, 200]


# Renewal and end


def test_workers_are_renewed_one_after_the_other_and_no_call_fails(tmp_path: Path) -> None:
    file = worker_configuration(tmp_path)
    options = ("--workers", "2", "--file_system_poll_wait_seconds", "0")
    with serving("--config_path", str(file), *options, log=tmp_path / "log") as server:
        with _busy_clients(server) as (answered, failures):
            before = worker_pids(server)
            file.write_text("{", encoding="utf-8")
            server.process.send_signal(signal.SIGHUP)
            until(lambda: "rolling restart aborted" in server.printed_so_far())
            assert worker_pids(server) == before
            worker_configuration(tmp_path, "other", "dummy")
            server.process.send_signal(signal.SIGHUP)
            until(lambda: "rolling restart finished" in server.printed_so_far())
            now = worker_pids(server)
            assert now.isdisjoint(before)
            with each_worker(server) as clients:
                assert [client.get("/v2/models/other/ready").status_code for client in clients] == [200, 200]
            goals = [count + 3 for count in answered]
            until(lambda: all(count >= goal for count, goal in zip(answered, goals, strict=True)))
            assert server.get("/v2/health/ready").status_code == 200
        assert not failures
        _expect_drain(server, signal.SIGINT, now)


def test_a_stop_amid_a_renewal_drains_all_workers(tmp_path: Path) -> None:
    options = ("--workers", "2", "--config_path", str(worker_configuration(tmp_path)))
    with serving(*options, log=tmp_path / "log") as server:
        before = worker_pids(server)
        server.process.send_signal(signal.SIGHUP)
        until(lambda: worker_pids(server) != before)
        _expect_drain(server, signal.SIGTERM, before)


def _expect_drain(server: OvmsProcess, number: signal.Signals, pids: set[int]) -> None:
    code, printed = server.stop(number)
    assert code == 0, printed
    assert "drained" in printed
    assert "Traceback" not in printed
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.slow
def test_a_stuck_worker_is_killed_and_renewed(tmp_path: Path) -> None:
    options = ("--workers", "2", "--drain_seconds", "0")
    file = worker_configuration(tmp_path)
    with serving("--config_path", str(file), *options, log=tmp_path / "log") as server:
        before = worker_pids(server)
        for pid in before:
            os.kill(pid, signal.SIGSTOP)
        server.process.send_signal(signal.SIGHUP)
        until(lambda: "worker killed: drain timeout" in server.printed_so_far())
        for pid in before:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        until(lambda: "rolling restart finished" in server.printed_so_far())
        assert worker_pids(server).isdisjoint(before)
        assert server.stop()[0] == 0


@contextmanager
def _busy_clients(server: OvmsProcess, *, ignores_cuts: bool = False) -> Iterator[tuple[list[int], list[str]]]:
    """Call a model over both protocols until the block ends; returns counts of answers, and failures.

    Args:
        server: the server.
        ignores_cuts: connections that end are no failures; a server that is not ready is none either.
    """
    answered, failures, over = [0, 0], list[str](), threading.Event()

    def repeat(number: int, connect: Callable[[], Any], call: Callable[[Any], list[float]]) -> None:
        with connect() as client:
            while not over.wait(0.005):
                try:
                    found = call(client)
                except (httpx.TransportError, tritonclient.grpc.InferenceServerException) as error:
                    if not (ignores_cuts and (isinstance(error, httpx.TransportError) or "UNAVAILABLE" in str(error))):
                        failures.append(repr(error))
                    continue
                if found != [2.0] * 10:
                    failures.append(f"{found}")
                answered[number] += 1

    def rest() -> httpx.Client:
        return httpx.Client(base_url=server.rest, timeout=WAIT_SECONDS)

    def grpc() -> Any:
        return tritonclient.grpc.InferenceServerClient(server.grpc)

    by_rest = [_infer_by_rest, _infer_by_rest, *([] if ignores_cuts else [_find_model])]
    callers = [*((0, rest, each) for each in by_rest), (1, grpc, partial(infer_by_grpc, model="dummy"))]
    threads = [threading.Thread(target=repeat, args=caller) for caller in callers]
    for thread in threads:
        thread.start()
    try:
        yield answered, failures
    finally:
        over.set()
        for thread in threads:
            thread.join()


def _find_model(client: httpx.Client) -> list[float]:
    """Ask by a new connection whether a model is ready."""
    with httpx.Client(base_url=client.base_url, timeout=WAIT_SECONDS) as new:
        answers = [new.get(path).status_code for path in ("/v2/models/dummy/ready", "/v2/health/ready")]
        if answers != [200, 200]:
            return [float(each) for each in answers]
        return _infer_by_rest(new)


def _infer_by_rest(client: httpx.Client) -> list[float]:
    answer = client.post("/v2/models/dummy/infer", json=ROW).json()
    found: list[float] = answer["outputs"][0]["data"] if "outputs" in answer else answer
    return found


# Limits


def _options(folder: Path) -> tuple[str, ...]:
    write_project(folder / "waits", WAITING_HANDLER, name="waits")
    handlers = [{"name": "waits", "path": str(folder / "waits")}]
    return "--config_path", str(write_config(folder, handler_config_list=handlers)), "--workers", "2"


def _expect_one_at_a_time(folder: Path, one: httpx.Client, other: httpx.Client, why: str) -> None:
    """Expect refusals by the second worker while the first has a call under way, and an answer afterwards."""
    begun, go = folder / "begun", folder / "go"
    held: list[int] = []
    body = {"begun": str(begun), "go": str(go)}
    thread = threading.Thread(target=lambda: held.append(one.post("/waits", json=body).json()["pid"]))
    thread.start()
    try:
        until(begun.exists)
        refused = [other.post("/waits", json=body) for _ in range(2)]
    finally:
        go.touch()
        thread.join(WAIT_SECONDS)
    assert [answer.status_code for answer in refused] == [429, 429]
    assert why in refused[0].text
    assert other.post("/waits", json=body).json()["pid"] != held[0]


def test_calls_at_once_of_an_entry_are_counted_over_all_workers(servers: SystemServers, tmp_path: Path) -> None:
    with each_worker(servers.serving("workers")) as (one, other):
        _expect_one_at_a_time(tmp_path, one, other, "1 calls under way")


def test_requests_of_a_caller_are_counted_over_all_workers(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    new = ("--scope", "infer:*", "--scope", "admin", "--file", str(keys))
    busy = run_ovms("keys", "new", "busy", "--concurrency", "1", *new).stdout.split()[-1]
    rare = run_ovms("keys", "new", "rare", "--requests_per_second", "0.001", *new).stdout.split()[-1]
    with serving(*_options(tmp_path), "--keys_file", str(keys), log=tmp_path / "log") as server:
        with each_worker(server, **{"x-api-key": busy}) as (one, other):
            _expect_one_at_a_time(tmp_path, one, other, "caller 'busy': limit of 1 concurrent requests")
        with each_worker(server, **{"x-api-key": busy}) as clients:
            for client in clients:
                client.headers["x-api-key"] = rare
            answers = [client.get("/waits").status_code for client in (*clients, *clients)]
    assert answers == [200, 429, 429, 429]
