from __future__ import annotations

import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc

from ovmstrio.models.sequences.requests import owner_index
from tests.support.processes import OvmsProcess, serving
from tests.support.system_servers import MAX_SEQUENCES, worker_configuration
from tests.support.waits import WAIT_SECONDS, until
from tests.support.worker_clients import each_worker, end_sequences, kill_worker, pid_of, sample, step, sum_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.system_servers import SystemServers


@pytest.fixture
def server(servers: SystemServers) -> OvmsProcess:
    return servers.serving("workers")


@pytest.fixture
def clients(server: OvmsProcess) -> Iterator[list[httpx.Client]]:
    """Connect to each worker of the shared server, whose models have no sequences before and after the test."""
    with each_worker(server) as found:
        for model in ("acc", "few"):
            end_sequences(found[0], model)
        yield found


def _ids(client: httpx.Client, model: str = "acc") -> list[Any]:
    listed = client.get(f"/v2/models/{model}/sequences").raise_for_status().json()["sequences"]
    return [each["id"] for each in listed]


def test_steps_of_a_sequence_may_come_by_any_connection(server: OvmsProcess, clients: list[httpx.Client]) -> None:
    metric = {"name": "acc", "method": "ModelInfer", "code": "OK"}
    before = sample(server, "ovmstrio_requests_total", **metric)
    names = [*range(1, 9), "one", "two"]
    for identity in names:
        assert sum_of(step(clients[0], identity, start=True)) == (1.0, identity)
        for count, client in enumerate(clients * 2, 2):
            assert sum_of(step(client, identity)) == (count, identity)
    given = [sum_of(step(client, start=True))[1] for client in clients]
    assert len({*given, *names}) == len(given) + len(names)
    for client in clients:
        assert _ids(client) == [*sorted({*range(1, 9), *given}), "one", "two"]
        assert client.post("/v2/models/acc/infer", json={}).status_code == 400
        assert step(client, 3, start=True).status_code == 409
        assert step(client, 999).status_code == 404
        bad = {"inputs": [{"name": "x", "shape": [1, 3], "datatype": "FP32", "data": [1.0, 2.0, 3.0]}]}
        assert client.post("/v2/models/acc/infer", json=bad | {"parameters": {"sequence_id": 3}}).status_code == 400
    for identity, client in zip(names, clients * 5, strict=True):
        assert sum_of(step(client, identity, end=True)) == (6.0, identity)
        assert step(clients[1], identity).status_code == 404
    calls = sample(server, "ovmstrio_requests_total", **metric) - before
    assert calls == len(names) * 6 + len(given)


def test_steps_that_are_sent_ahead_keep_their_order(server: OvmsProcess) -> None:
    with each_worker(server) as starters, tritonclient.grpc.InferenceServerClient(server.grpc) as client:
        end_sequences(starters[0], "ordered")
        # Half of the sequences are in the worker that does not have the stream.
        for identity in range(1, 7):
            sum_of(step(starters[identity % 2], identity, model="ordered", start=True))
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
                client.async_stream_infer("ordered", [given], sequence_id=identity, sequence_end=number == 29)
        for _ in range(180):
            assert ended.acquire(timeout=WAIT_SECONDS)
        client.stop_stream()
    assert sums == {identity: [float(each) for each in range(2, 32)] for identity in range(1, 7)}


def test_of_two_starts_at_once_one_is_refused(clients: list[httpx.Client]) -> None:
    with ThreadPoolExecutor(2) as threads:
        for identity in range(1, 41):
            answers = list(threads.map(lambda client: step(client, identity, start=True), clients))  # noqa: B023 - waited for
            assert sorted(each.status_code for each in answers) == [200, 409]
            assert [sum_of(step(client, identity))[0] for client in clients] == [2.0, 3.0]
            assert sum_of(step(clients[identity % 2], identity, end=True))[0] == 4.0


def test_the_limit_of_sequences_is_one_for_all_workers(clients: list[httpx.Client]) -> None:
    here, there = clients
    given = [int(sum_of(step(here, model="few", start=True))[1]) for _ in range(MAX_SEQUENCES)]
    assert sorted(set(given)) == sorted(given) == _ids(there, "few")
    for client in (here, there):
        assert step(client, 1000, model="few", start=True).status_code == 503
        assert step(client, model="few", start=True).status_code == 503
    assert sum_of(step(there, given[0], model="few", end=True))[0] == 2.0
    assert sum_of(step(there, 1000, model="few", start=True))[0] == 1.0
    assert step(here, 1001, model="few", start=True).status_code == 503
    end_sequences(here, "few")


def test_sequences_end_with_the_worker_that_owns_their_ids(servers: SystemServers) -> None:
    server = servers.serving("recovering_workers")
    identities = [*range(1, 7), *(f"other {identity}" for identity in range(1, 7))]
    with each_worker(server) as (here, there):
        end_sequences(here)
        for identity in identities:
            assert sum_of(step(here, identity, start=True))[0] == 1.0
            assert sum_of(step(there, identity))[0] == 2.0
        kept = [identity for identity in identities if owner_index(f"acc\0{identity}", 2) == 0]
        lost = [identity for identity in identities if identity not in kept]
        assert kept
        assert lost
        kill_worker(server, pid_of(there))
        for identity in kept:
            assert sum_of(step(here, identity))[0] == 3.0
        for identity in lost:
            # Until the successor is ready, the step waits, and then it fails as retryable.
            until(lambda identity=identity: step(here, identity).status_code == 404)  # type: ignore[misc]  # the loop's own
            assert sum_of(step(here, identity, start=True))[0] == 1.0
        with each_worker(server) as again:
            for client in again:
                for identity in lost:
                    sum_of(step(client, identity))
                    assert step(client, identity, start=True).status_code == 409
        assert _ids(here) == identities


def test_call_to_an_owner_that_does_not_restart_in_time_may_be_repeated(tmp_path: Path) -> None:
    options = ["--config_path", str(worker_configuration(tmp_path)), "--worker_wait_seconds", "0.1"]
    with serving(*options, "--workers", "2", log=tmp_path / "log") as server, each_worker(server) as clients:
        here, there = clients
        identity = next(number for number in range(1, 100) if owner_index(f"acc\0{number}", 2) == 1)
        assert sum_of(step(here, identity, start=True))[0] == 1.0
        kill_worker(server, pid_of(there))
        refused = step(here, identity)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1"), refused.text
        assert "send the request again" in refused.text
        with tritonclient.grpc.InferenceServerClient(server.grpc) as grpc:
            given = tritonclient.grpc.InferInput("x", [1, 2], "FP32")
            given.set_data_from_numpy(np.ones((1, 2), np.float32))
            with pytest.raises(tritonclient.grpc.InferenceServerException) as caught:
                grpc.infer("acc", [given], sequence_id=identity)
        assert caught.value.status() in {"StatusCode.UNAVAILABLE", "StatusCode.NOT_FOUND"}
        assert here.get("/v2/health/live").status_code == 200


@pytest.mark.slow
def test_stored_sequences_come_back_with_their_workers(tmp_path: Path) -> None:
    store = tmp_path / "kept"
    options = ["--config_path", str(worker_configuration(tmp_path)), "--sequence_store", str(store)]
    options += ["--sequence_flush_seconds", "0.2", "--worker_wait_seconds", str(WAIT_SECONDS)]
    with serving(*options, "--workers", "2", log=tmp_path / "log") as server:
        with each_worker(server) as clients:
            for identity in range(1, 7):
                sum_of(step(clients[identity % 2], identity, start=True))
            until(lambda: sum(path.read_bytes().count(b'"id":') for path in store.glob("worker-*/sequences.bin")) == 6)
            kill_worker(server, pid_of(clients[1]))
            # Steps of its sequences wait for the process that takes its place, which refuses the first of each.
            for identity in range(1, 7):
                if owner_index(f"acc\0{identity}", 2) == 1:
                    refused = step(clients[0], identity)
                    assert (refused.status_code, refused.headers["ovmstrio_restored_steps"]) == (409, "1")
                assert sum_of(step(clients[0], identity))[0] == 2.0
            until(lambda: server.answers("/v2/health/ready"))
        assert server.stop()[0] == 0
    with serving(*options, ready=False, log=tmp_path / "one") as single:
        assert single.process.wait(WAIT_SECONDS) == 1
    assert "start with --workers 2" in (tmp_path / "one").read_text(encoding="utf-8")
    with serving(*options, "--workers", "2", log=tmp_path / "log") as server, ExitStack() as stack:
        clients = stack.enter_context(each_worker(server))
        for client in clients:
            listed = client.get("/v2/models/acc/sequences").json()["sequences"]
            assert [each["requests"] for each in listed] == [2] * 6
        for identity in range(1, 7):
            assert sum_of(step(clients[0], identity))[0] == 3.0


def test_no_stored_sequence_breaks_at_a_rolling_restart(tmp_path: Path) -> None:
    options = ["--config_path", str(worker_configuration(tmp_path)), "--sequence_store", str(tmp_path / "kept")]
    over = threading.Event()
    failures: list[str] = []
    counts = dict.fromkeys([*range(1, 7), "one", "two"], 0)

    def repeat(rest: str, identity: int | str) -> None:
        """Step a sequence, by a new connection now and then, and check each sum."""
        while not over.is_set():
            with httpx.Client(base_url=rest, timeout=WAIT_SECONDS) as client:
                for _ in range(5):
                    count = counts[identity]
                    answer = step(client, identity, start=not count)
                    if answer.status_code != 200 or sum_of(answer) != (count + 1.0, identity):
                        failures.append(f"{identity} after {count} steps: {answer.status_code} {answer.text}")
                        return
                    counts[identity] += 1
                    over.wait(0.02)

    with serving(*options, "--workers", "2", log=tmp_path / "log") as server:
        threads = [threading.Thread(target=repeat, args=(server.rest, identity)) for identity in counts]
        for thread in threads:
            thread.start()
        try:
            for renewals in (1, 2):
                until(lambda: min(counts.values()) > 2 or bool(failures))
                server.process.send_signal(signal.SIGHUP)
                until(lambda n=renewals: server.printed_so_far().count("rolling restart finished") == n, seconds=120)  # type: ignore[misc]  # the loop's own
            goals = {identity: count + 3 for identity, count in counts.items()}
            until(lambda: bool(failures) or all(counts[identity] >= goal for identity, goal in goals.items()))
        finally:
            over.set()
            for thread in threads:
                thread.join()
        assert not failures
        assert server.stop()[0] == 0
