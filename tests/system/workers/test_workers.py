"""``ovms serve --workers``: two processes serve a configuration as one process does."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import tritonclient.grpc

from tests.support.processes import OvmsProcess, serving
from tests.support.system_servers import worker_configuration
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

if TYPE_CHECKING:
    from tests.support.system_servers import SystemServers


@pytest.fixture
def server(servers: SystemServers) -> OvmsProcess:
    """Return the shared server of two workers."""
    return servers.serving("workers")


@pytest.fixture
def recovering(servers: SystemServers) -> OvmsProcess:
    """Return the shared server whose workers tests may kill."""
    return servers.serving("recovering_workers")


def test_connections_are_spread_over_the_workers(server: OvmsProcess) -> None:
    """Each worker gets as many connections as the other, and a connection stays with its worker."""

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
    """Each worker reports the calls of both, over both protocols."""
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
    """Connections of a Unix socket are spread as those of a port are."""
    with each_worker(server, uds=str(servers.folder("workers") / "rest")) as clients:
        for client in clients:
            assert client.post("/v2/models/dummy/infer", json=ROW).json()["outputs"][0]["data"] == [2.0] * 10


# Killed workers


def test_the_server_is_ready_only_while_all_workers_are(recovering: OvmsProcess, servers: SystemServers) -> None:
    """A killed worker ends its own connections only, and another process takes its place."""
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


def test_user_code_that_ends_its_process_runs_once(recovering: OvmsProcess, tmp_path: Path) -> None:
    """The caller gets a connection error, no other worker repeats the call, and the next call is answered."""
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
    """While workers are killed under load, calls are answered with the right values or lose their connections."""
    with _busy_clients(recovering, ignores_cuts=True) as (answered, failures):
        for _ in range(2):
            goal = sum(answered) + 30
            until(lambda goal=goal: sum(answered) > goal)  # type: ignore[misc]  # the loop's own
            kill_worker(recovering, min(worker_pids(recovering)))
            until(lambda: recovering.answers("/v2/health/ready"))
    assert not failures


# Renewal and end


def test_workers_are_renewed_one_after_the_other_and_no_call_fails(tmp_path: Path) -> None:
    """SIGHUP renews workers with the present configuration under load; an unusable file changes nothing.

    The test changes the configuration of its server and stops it, so the server is its own.
    """
    file = worker_configuration(tmp_path)
    options = ("--workers", "2", "--file_system_poll_wait_seconds", "0")
    with serving("--config_path", str(file), *options, log=tmp_path / "log") as server:
        with _busy_clients(server) as (answered, failures):
            before = worker_pids(server)
            file.write_text("{", encoding="utf-8")
            server.process.send_signal(signal.SIGHUP)
            until(lambda: "processes not renewed" in server.printed_so_far())
            assert worker_pids(server) == before
            worker_configuration(tmp_path, "other", "dummy")
            server.process.send_signal(signal.SIGHUP)
            until(lambda: "processes renewed" in server.printed_so_far())
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
    """The workers that the renewal has started drain, too. The test stops its server, so the server is its own."""
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
    """A worker that does not end in its time is killed. The workers have no time to drain: the server is its own."""
    options = ("--workers", "2", "--drain_seconds", "0")
    file = worker_configuration(tmp_path)
    with serving("--config_path", str(file), *options, log=tmp_path / "log") as server:
        before = worker_pids(server)
        for pid in before:
            os.kill(pid, signal.SIGSTOP)
        server.process.send_signal(signal.SIGHUP)
        until(lambda: "does not end, and is killed" in server.printed_so_far())
        for pid in before:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        until(lambda: "processes renewed" in server.printed_so_far())
        assert worker_pids(server).isdisjoint(before)
        assert server.stop()[0] == 0


@contextmanager
def _busy_clients(server: OvmsProcess, *, ignores_cuts: bool = False) -> Iterator[tuple[list[int], list[str]]]:
    """Call a model over both protocols until the block ends; returns counts of answers, and failures.

    Args:
        server: the server.
        ignores_cuts: connections that end are no failures.
    """
    answered, failures, over = [0, 0], list[str](), threading.Event()

    def repeat(number: int, connect: Callable[[], Any], call: Callable[[Any], list[float]]) -> None:
        with connect() as client:
            while not over.wait(0.005):
                try:
                    found = call(client)
                except (httpx.TransportError, tritonclient.grpc.InferenceServerException) as error:
                    if not (ignores_cuts and _is_cut(error)):
                        failures.append(repr(error))
                    continue
                if found != [2.0] * 10:
                    failures.append(f"{found}")
                answered[number] += 1

    def rest() -> httpx.Client:
        return httpx.Client(base_url=server.rest, timeout=WAIT_SECONDS)

    def grpc() -> Any:
        return tritonclient.grpc.InferenceServerClient(server.grpc)

    callers = [(0, rest, _infer_by_rest), (0, rest, _infer_by_rest), (1, grpc, partial(infer_by_grpc, model="dummy"))]
    threads = [threading.Thread(target=repeat, args=caller) for caller in callers]
    for thread in threads:
        thread.start()
    try:
        yield answered, failures
    finally:
        over.set()
        for thread in threads:
            thread.join()


def _infer_by_rest(client: httpx.Client) -> list[float]:
    answer = client.post("/v2/models/dummy/infer", json=ROW).json()
    found: list[float] = answer["outputs"][0]["data"] if "outputs" in answer else answer
    return found


def _is_cut(error: Exception) -> bool:
    return isinstance(error, httpx.TransportError) or "UNAVAILABLE" in str(error)
