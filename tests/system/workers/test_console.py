from __future__ import annotations

import json
import os
import signal
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import httpx

from tests.support.processes import OvmsProcess
from tests.support.waits import WAIT_SECONDS, until
from tests.support.worker_clients import ROW, each_worker, sample

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from tests.support.system_servers import SystemServers


def _events(client: httpx.Client, query: str) -> Generator[tuple[str, Any]]:
    """Yield the events of a live stream, which has no end, for a bounded time."""
    ends = time.monotonic() + 2 * WAIT_SECONDS
    with client.stream("GET", f"/console/api/live{query}", timeout=WAIT_SECONDS) as answer:
        name = ""
        for line in answer.iter_lines():
            key, _, text = line.partition(": ")
            if key == "event":
                name = text
            elif key == "data":
                yield name, json.loads(text)
            assert time.monotonic() < ends


def _read_until(events: Iterator[tuple[str, Any]], holds: Callable[[str, Any], bool]) -> Any:
    return next(data for name, data in events if holds(name, data))


def _all_answer(name: str, data: Any) -> bool:
    return name == "frame" and data["totals"]["silent"] == [] and len(data["totals"]["workers"]) == 2


def _agreed(clients: list[httpx.Client], path: str) -> Any:
    """Return the answer once it is the same for all clients: a busy worker may be late to answer the other."""
    found: list[Any] = []

    def is_same() -> bool:
        found[:] = [client.get(f"/console/api/{path}").json() for client in clients]
        return all(each == found[0] for each in found) and "error" not in found[0]

    until(is_same, why=lambda: found)
    return found[0]


def test_each_worker_shows_the_calls_of_both(servers: SystemServers) -> None:
    server = servers.serving("workers")
    before, since = int(sample(server, "ovmstrio_requests_total", name="shown")), time.time()
    with each_worker(server) as clients, each_worker(server) as others:
        streams = [_events(client, "?failures=1&traces=1") for client in clients]
        for stream in streams:
            _read_until(stream, _all_answer)
        for client in others:
            for _ in range(2):
                client.post("/v2/models/shown/infer", json=ROW).raise_for_status()
                assert client.post("/v2/models/shown/infer", json={"inputs": []}).status_code == 400
        for stream in streams:
            counted, failed = [0], list[Any]()

            def has_all(name: str, data: Any, counted: list[int] = counted, failed: list[Any] = failed) -> bool:
                if name == "frame" and "shown" in data.get("services", {}):
                    counted.append(data["services"]["shown"]["requests"] - before)
                if name == "failures":
                    failed += [each for each in data if each["name"] == "shown" and each["at"] >= since]
                return counted[-1] >= 8 and len(failed) >= 4

            _read_until(stream, has_all)
            assert (counted[-1], len(failed)) == (8, 4)
            assert {each["worker"] for each in failed} == {0, 1}
            stream.close()
        shown = {path: _agreed(others, path) for path in ("services", "services/shown", "failures", "log", "traces")}
        trace_id = shown["traces"]["traces"][0]["trace_id"]
        assert _agreed(others, f"traces/{trace_id}")["spans"] >= 1
    lines = shown["log"]["lines"]
    assert {line["worker"] for line in lines} == {0, 1}
    # The printed lines name the worker, too.
    assert all(line["facts"]["worker"] == str(line["worker"]) for line in lines)


def test_a_stuck_worker_is_named_and_not_waited_for(servers: SystemServers) -> None:
    server = servers.serving("recovering_workers")
    with each_worker(server) as (client, _):
        events = _events(client, "")
        totals = _read_until(events, _all_answer)["totals"]
        pids = {each["worker"]: each["pid"] for each in totals["workers"]}
        os.kill(pids[1], signal.SIGSTOP)
        try:
            totals = _read_until(events, lambda name, data: name == "frame" and data["totals"]["silent"] == [1])[
                "totals"
            ]
            assert [each["worker"] for each in totals["workers"]] == [0]
            _connect_until_stuck(server)
            for _ in range(6):
                with httpx.Client(base_url=server.rest, timeout=WAIT_SECONDS) as other:
                    assert other.get("/console/api/server").json()["worker"] == 0
                    assert b"ovmstrio_ready" in other.get("/metrics").content
        finally:
            os.kill(pids[1], signal.SIGCONT)
        _read_until(events, _all_answer)
        events.close()


def _connect_until_stuck(server: OvmsProcess) -> None:
    """Open connections until the parent process notices that a worker accepts none."""
    known = server.printed_so_far().count("worker stuck")

    def is_noticed() -> bool:
        with suppress(httpx.TimeoutException):
            httpx.get(f"{server.rest}/v2/health/live", timeout=0.5)
        return server.printed_so_far().count("worker stuck") > known

    until(is_noticed)
