"""``ovms serve --workers``: what clients change is changed in all workers, or in none."""

from __future__ import annotations

import base64
import json
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest

from tests.support import ir
from tests.support.processes import OvmsProcess, serving
from tests.support.projects import write_project

pytestmark = pytest.mark.e2e

SECONDS = 60
PID = """
import os

class Handler:
    def handle_get(self):
        return {"pid": os.getpid()}
"""
ONE_FAILS = """
import os, pathlib

marks = pathlib.Path({folder!r})
try:
    (marks / "first").touch(exist_ok=False)
except FileExistsError:
    raise RuntimeError("only one process can load this") from None

class Handler:
    def handle_get(self):
        return {{}}
"""
ROW = {"inputs": [{"name": "b", "shape": [1, 10], "datatype": "FP32", "data": [1.0] * 10}]}


def _configure(folder: Path, *names: str, handlers: tuple[str, ...] = ("who",)) -> Path:
    if not (folder / "dummy").exists():
        ir.save(ir.dummy(), folder, "dummy")
        write_project(folder / "who", PID, name="who")
    models = [{"config": {"name": name, "base_path": str(folder / "dummy")}} for name in names]
    entries = [{"name": name, "path": str(folder / name)} for name in handlers]
    file = folder / "config.json"
    file.write_text(json.dumps({"model_config_list": models, "handler_config_list": entries}), encoding="utf-8")
    return file


def _until(holds: Callable[[], bool]) -> None:
    ends = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < ends
        threading.Event().wait(0.02)


@contextmanager
def _each_worker(server: OvmsProcess) -> Iterator[list[httpx.Client]]:
    """Give a client of each of two workers."""
    with ExitStack() as stack:
        clients = [stack.enter_context(httpx.Client(base_url=server.rest, timeout=SECONDS)) for _ in range(2)]
        for client in clients:
            client.get("/v2/health/live").raise_for_status()
        yield clients


def _statuses(clients: list[httpx.Client], *names: str) -> list[list[int]]:
    return [[client.post(f"/v2/models/{name}/infer", json=ROW).status_code for name in names] for client in clients]


def _kill_worker_of(client: httpx.Client, server: OvmsProcess) -> None:
    psutil.Process(client.get("/who").json()["pid"]).kill()
    _until(lambda: "a worker process has ended" in server.printed_so_far())
    _until(lambda: server.get("/v2/health/ready").status_code == 200)


def test_a_reload_that_fails_in_one_worker_is_taken_back_by_all(tmp_path: Path) -> None:
    """Be it the one that was asked or another one; a later one that all can do is done by all."""
    file = _configure(tmp_path, "old")
    options = ("--config_path", str(file), "--workers", "2", "--file_system_poll_wait_seconds", "0")
    with serving(*options, log=tmp_path / "log") as server, _each_worker(server) as clients:
        _until(lambda: server.get("/v2/health/ready").status_code == 200)
        write_project(tmp_path / "odd", ONE_FAILS.format(folder=str(tmp_path)), name="odd")
        for asked in clients:
            (tmp_path / "first").unlink(missing_ok=True)
            _configure(tmp_path, "new", handlers=("who", "odd"))
            answer = asked.post("/v1/config/reload")
            assert answer.status_code >= 400
            assert "only one process can load this" in answer.text
            assert _statuses(clients, "old", "new") == [[200, 404]] * 2
            assert all(client.get("/odd").status_code >= 400 for client in clients)
        _configure(tmp_path, "new")
        assert clients[1].post("/v1/config/reload").status_code in {200, 201}
        assert _statuses(clients, "old", "new") == [[404, 200]] * 2


def test_models_are_loaded_and_unloaded_by_name_in_all_workers(tmp_path: Path) -> None:
    """With files of a request, too; a load that fails is nobody's, and a new worker has what others have."""
    options = ("--config_path", str(_configure(tmp_path, "a", "b")), "--workers", "2", "--model_control", "explicit")
    with serving(*options, "--load_model", "a,who", log=tmp_path / "log") as server:
        with _each_worker(server) as clients:
            # The server is ready once one worker is, and the other one may still load.
            _until(lambda: _statuses(clients, "a", "b") == [[200, 404]] * 2)
            clients[0].post("/v2/repository/models/b/load").raise_for_status()
            clients[1].post("/v2/repository/models/a/unload").raise_for_status()
            assert _statuses(clients, "a", "b") == [[404, 200]] * 2
            files = {
                f"file:1/{each.name}": base64.b64encode(each.read_bytes()).decode()
                for each in (tmp_path / "dummy" / "1").iterdir()
            }
            sent = {"parameters": {"config": "{}", **files}}
            clients[1].post("/v2/repository/models/mine/load", json=sent).raise_for_status()
            assert _statuses(clients, "mine") == [[200]] * 2
            bad = {"parameters": {"config": json.dumps({"batch_size": -7, "shape": "(3,"})}}
            assert clients[0].post("/v2/repository/models/b/load", json=bad).status_code >= 400
            assert _statuses(clients, "b") == [[200]] * 2
            _kill_worker_of(clients[0], server)
        with _each_worker(server) as clients:
            assert _statuses(clients, "a", "b", "mine") == [[404, 200, 200]] * 2


def test_regions_of_shared_memory_are_known_to_all_workers(tmp_path: Path) -> None:
    """One that cannot be registered is nobody's, one that is can be used by any connection, and so by a new worker."""
    options = ("--config_path", str(_configure(tmp_path, "a")), "--workers", "2", "--allow_shared_memory")
    memory = SharedMemory(create=True, size=80)
    try:
        np.ndarray(10, np.float32, memory.buf)[:] = 3
        region = {"key": memory.name, "offset": 0, "byte_size": 80}
        with serving(*options, log=tmp_path / "log") as server:
            with _each_worker(server) as clients:
                _until(lambda: server.get("/v2/health/ready").status_code == 200)
                path = "/v2/systemsharedmemory/region/r"
                wrong = clients[0].post(f"{path}/register", json={**region, "byte_size": 800})
                assert wrong.status_code == 400
                assert [client.get(f"{path}/status").status_code for client in clients] == [404, 404]
                clients[0].post(f"{path}/register", json=region).raise_for_status()
                assert clients[1].post(f"{path}/register", json=region).status_code == 409
                assert [_placed(client) for client in clients] == [[4.0] * 10] * 2
                _kill_worker_of(clients[0], server)
            with _each_worker(server) as clients:
                assert [_placed(client) for client in clients] == [[4.0] * 10] * 2
                clients[1].post(f"{path}/unregister").raise_for_status()
                assert [client.get(f"{path}/status").status_code for client in clients] == [404, 404]
    finally:
        memory.close()
        memory.unlink()


def _placed(client: httpx.Client) -> Any:
    placed = {"shared_memory_region": "r", "shared_memory_offset": 0, "shared_memory_byte_size": 40}
    row = {"name": "b", "shape": [1, 10], "datatype": "FP32", "parameters": placed}
    return client.post("/v2/models/a/infer", json={"inputs": [row]}).raise_for_status().json()["outputs"][0]["data"]


def test_counters_stay_when_a_worker_has_died_or_been_renewed(tmp_path: Path) -> None:
    """Whichever worker is asked, in either format; gauges are those of the workers that there are."""
    options = ("--config_path", str(_configure(tmp_path, "a")), "--workers", "2")
    with serving(*options, log=tmp_path / "log") as server:
        _until(lambda: server.get("/v2/health/ready").status_code == 200)
        with _each_worker(server) as clients:
            assert _statuses(clients, "a") == [[200]] * 2
            assert [_requests(client) for client in clients] == [(2.0, 2.0)] * 2
            _kill_worker_of(clients[0], server)
        with _each_worker(server) as clients:
            assert [_requests(client) for client in clients] == [(2.0, 2.0)] * 2
            assert _statuses(clients, "a") == [[200]] * 2
        server.process.send_signal(signal.SIGHUP)
        _until(lambda: "processes renewed" in server.printed_so_far())
        with _each_worker(server) as clients:
            assert [_requests(client) for client in clients] == [(4.0, 4.0)] * 2
            some = clients[0].get("/metrics", params={"name[]": "ovms_requests_success"}).text
            assert 'interface="REST",method="ModelInfer",name="a",version="1"} 4.0' in some
            assert "ovms_requests_fail" not in some


def _requests(client: httpx.Client) -> tuple[float, float]:
    """Give the count of calls in both formats."""
    accepts = ("text/plain", "application/openmetrics-text")
    texts = [client.get("/metrics", headers={"accept": each}).text for each in accepts]
    found = [
        re.search(
            r'^ovms_requests_success\{[^}]*interface="REST",method="ModelInfer"[^}]*\} ([0-9.]+)', text, re.MULTILINE
        )
        for text in texts
    ]
    first, second = (0.0 if each is None else float(each[1]) for each in found)
    return first, second
