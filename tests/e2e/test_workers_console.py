"""The console and profiles of ``ovms serve --workers``: one answer for the server, whichever process gives it."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
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
    """Give the events of a live stream, without end."""
    with client.stream("GET", f"/console/api/live{query}", timeout=SECONDS) as answer:
        name = ""
        for line in answer.iter_lines():
            key, _, text = line.partition(": ")
            if key == "event":
                name = text
            elif key == "data":
                yield name, json.loads(text)


def _next(events: Iterator[tuple[str, Any]], name: str) -> Any:
    return next(data for each, data in events if each == name)


def test_the_console_is_one_answer_whoever_gives_it(server: OvmsProcess) -> None:
    """Calls and failures on connections of both processes are counted and listed once, by each of them."""
    with _clients(server) as clients:
        streams = [_events(client, "?failures=1&traces=1") for client in clients[:2]]
        for stream in streams:
            assert _next(stream, "whole")["totals"]["silent"] == []
        with _clients(server) as others:
            for client in others:
                client.post("/v2/models/dummy/infer", json=ROW).raise_for_status()
                assert client.post("/v2/models/dummy/infer", json={"inputs": []}).status_code == 400
            for stream in streams:
                counted, failed, traces = 0, list[Any](), list[Any]()
                while counted < 8 or len(failed) < 4 or len(traces) < 8:
                    name, data = next(stream)
                    if name == "frame":
                        counted = data.get("services", {}).get("dummy", {}).get("requests", counted)
                        assert len(data["totals"]["workers"]) == 2
                    failed += data if name == "failures" else []
                    traces = data if name == "traces" else traces
                assert (counted, len(failed), len(traces)) == (8, 4, 8)
                assert {each["worker"] for each in failed} == {0, 1}
                assert [each["at"] for each in failed] == sorted(each["at"] for each in failed)
                stream.close()
            answers = {
                path: [client.get(f"/console/api/{path}").json() for client in others]
                for path in ("services", "services/dummy", "failures", "log", "traces")
            }
            traced = answers["traces"][0]["traces"][0]["trace_id"]
            for client in others:
                assert client.get(f"/console/api/traces/{traced}").json()["spans"] >= 1
    for path, told in answers.items():
        assert told == [told[0]] * len(told), path
    lines = answers["log"][0]["lines"]
    assert {line["worker"] for line in lines} == {0, 1}
    # What they print says so, too.
    assert all(line["facts"]["worker"] == str(line["worker"]) for line in lines)


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
    with _clients(server, 2) as clients:
        (client,) = (each for each in clients if each.get("/console/api/server").json()["worker"] == 0)
        events = _events(client, "")
        pids = {each["worker"]: each["pid"] for each in _next(events, "whole")["totals"]["workers"]}
        os.kill(pids[1], signal.SIGSTOP)
        try:
            totals = _next(events, "frame")["totals"]
            while totals["silent"] != [1]:
                totals = _next(events, "frame")["totals"]
            assert [each["worker"] for each in totals["workers"]] == [0]
        finally:
            os.kill(pids[1], signal.SIGCONT)
        while _next(events, "frame")["totals"]["silent"]:
            pass
        events.close()
