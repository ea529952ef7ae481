"""The console and profiles of ``ovms serve --workers``: one answer for the server, whichever process gives it."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import httpx
import pytest

from tests.support import ir
from tests.support.processes import OvmsProcess, serving

pytestmark = pytest.mark.e2e

SECONDS = 60
ROW = {"inputs": [{"name": "b", "shape": [1, 10], "datatype": "FP32", "data": [1.0] * 10}]}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OvmsProcess]:
    """A server of two processes."""
    folder = tmp_path_factory.mktemp("workers")
    ir.save(ir.dummy(), folder, "dummy")
    file = folder / "config.json"
    file.write_text(
        json.dumps({"model_config_list": [{"config": {"name": "dummy", "base_path": str(folder / "dummy")}}]})
    )
    with serving("--config_path", str(file), "--workers", "2", ready=True, log=folder / "log") as started:
        yield started


@contextmanager
def _clients(server: OvmsProcess, count: int = 4) -> Iterator[list[httpx.Client]]:
    """Open connections that stay, of all processes."""
    with ExitStack() as stack:
        clients = [stack.enter_context(httpx.Client(base_url=server.rest, timeout=SECONDS)) for _ in range(count)]
        for client in clients:
            client.get("/v2/health/live").raise_for_status()
        yield clients


def _events(client: httpx.Client, query: str) -> Generator[tuple[str, Any]]:
    """Give the events of a live stream, which has no end, for a bounded time."""
    ends = time.monotonic() + 2 * SECONDS
    with client.stream("GET", f"/console/api/live{query}", timeout=SECONDS) as answer:
        name = ""
        for line in answer.iter_lines():
            key, _, text = line.partition(": ")
            if key == "event":
                name = text
            elif key == "data":
                yield name, json.loads(text)
            assert time.monotonic() < ends


def _next(events: Iterator[tuple[str, Any]], name: str) -> Any:
    return next(data for each, data in events if each == name)


def _read_until(events: Iterator[tuple[str, Any]], holds: Callable[[str, Any], bool]) -> None:
    """Read on until an event is as wanted."""
    assert any(holds(name, data) for name, data in events)


def _all_answer(name: str, data: Any) -> bool:
    return name == "frame" and data["totals"]["silent"] == [] and len(data["totals"]["workers"]) == 2


def test_the_console_is_one_answer_whoever_gives_it(server: OvmsProcess) -> None:
    """Calls and failures on connections of both processes are counted and listed once, by each of them."""
    with _clients(server) as clients, _clients(server) as others:
        streams = [_events(client, "?failures=1&traces=1") for client in clients[:2]]
        for stream in streams:
            _read_until(stream, _all_answer)
        for client in others:
            client.post("/v2/models/dummy/infer", json=ROW).raise_for_status()
            assert client.post("/v2/models/dummy/infer", json={"inputs": []}).status_code == 400
        for stream in streams:
            counted, failed = [0], list[Any]()

            def has_all(name: str, data: Any, counted: list[int] = counted, failed: list[Any] = failed) -> bool:
                if name == "frame" and "dummy" in data.get("services", {}):
                    counted.append(data["services"]["dummy"]["requests"])
                failed += data if name == "failures" else []
                return counted[-1] >= 8 and len(failed) >= 4

            _read_until(stream, has_all)
            assert (counted[-1], len(failed)) == (8, 4)
            assert {each["worker"] for each in failed} == {0, 1}
            stream.close()
        told = {path: _agreed(others, path) for path in ("services", "services/dummy", "failures", "log", "traces")}
        traced = told["traces"]["traces"][0]["trace_id"]
        assert _agreed(others, f"traces/{traced}")["spans"] >= 1
    lines = told["log"]["lines"]
    assert {line["worker"] for line in lines} == {0, 1}
    # What they print says so, too.
    assert all(line["facts"]["worker"] == str(line["worker"]) for line in lines)


def _agreed(clients: list[httpx.Client], path: str) -> Any:
    """Give what all clients are told; on a busy machine one process may be late to answer another."""
    ends = time.monotonic() + SECONDS
    while True:
        told = [client.get(f"/console/api/{path}").json() for client in clients]
        if all(each == told[0] for each in told) and "error" not in told[0]:
            return told[0]
        assert time.monotonic() < ends, told


def test_a_profile_has_the_threads_of_all_workers(server: OvmsProcess) -> None:
    """The same one, whoever takes it; what is called through one of them has its layers timed by another."""
    with _clients(server) as clients:
        by_worker = {each.get("/console/api/server").json()["worker"]: each for each in clients}
        asked: list[Any] = []

        def ask() -> None:
            body = {"seconds": 1, "rate": 50}
            asked.append(by_worker[1].post("/v2/profile", json=body).json())

        asking = threading.Thread(target=ask)
        asking.start()
        while asking.is_alive():
            by_worker[0].post("/v2/models/dummy/infer", json=ROW).raise_for_status()
        asking.join()
    (told,) = asked
    assert told["silent"] == []
    assert {each["worker"] for each in told["threads"] if each["name"] == "event loop"} == {0, 1}
    assert [each["worker"] for each in told["workers"]] == [0, 1]
    assert [(each["name"], each["calls"] > 0, "layers" in each) for each in told["models"]] == [("dummy", True, True)]


def test_a_worker_that_is_stuck_is_named_and_not_waited_for(server: OvmsProcess) -> None:
    """What the other one tells goes on; when the first can go on, it is there again."""
    with _clients(server) as clients:
        client = next(each for each in clients if each.get("/console/api/server").json()["worker"] == 0)
        events = _events(client, "")
        totals = next(data["totals"] for name, data in events if _all_answer(name, data))
        pids = {each["worker"]: each["pid"] for each in totals["workers"]}
        os.kill(pids[1], signal.SIGSTOP)
        try:
            totals = _next(events, "frame")["totals"]
            while totals["silent"] != [1]:
                totals = _next(events, "frame")["totals"]
            assert [each["worker"] for each in totals["workers"]] == [0]
            _connect_until_stuck(server)
            with _clients(server, 6) as others:
                assert {each.get("/console/api/server").json()["worker"] for each in others} == {0}
                assert b"ovmstrio_ready" in others[0].get("/metrics").content
        finally:
            os.kill(pids[1], signal.SIGCONT)
        while _next(events, "frame")["totals"]["silent"]:
            pass
        events.close()


def _connect_until_stuck(server: OvmsProcess) -> None:
    """Open connections until the parent has noticed that one of its workers takes none."""
    ends = time.monotonic() + SECONDS
    while "a worker process is stuck" not in server.printed_so_far():
        assert time.monotonic() < ends
        with suppress(httpx.TimeoutException):
            httpx.get(f"{server.rest}/v2/health/live", timeout=0.5)
