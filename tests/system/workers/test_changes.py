from __future__ import annotations

import base64
import json
import re
import signal
from multiprocessing.shared_memory import SharedMemory
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np

from tests.support.processes import OvmsProcess, serving
from tests.support.projects import write_project
from tests.support.system_servers import worker_configuration
from tests.support.waits import until
from tests.support.worker_clients import ROW, each_worker, kill_worker, pid_of

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.system_servers import SystemServers

LOADS_ONCE = """
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


def _statuses(clients: list[httpx.Client], *names: str) -> list[list[int]]:
    return [[client.post(f"/v2/models/{name}/infer", json=ROW).status_code for name in names] for client in clients]


def _kill_worker_of(client: httpx.Client, server: OvmsProcess) -> None:
    kill_worker(server, pid_of(client))
    until(lambda: server.answers("/v2/health/ready"))


def test_a_reload_takes_effect_in_all_workers_or_in_none(tmp_path: Path) -> None:
    file = worker_configuration(tmp_path, "old")
    options = ("--config_path", str(file), "--workers", "2", "--file_system_poll_wait_seconds", "0")
    with serving(*options, log=tmp_path / "log") as server, each_worker(server) as clients:
        write_project(tmp_path / "odd", LOADS_ONCE.format(folder=str(tmp_path)), name="odd")
        for client in clients:
            (tmp_path / "first").unlink(missing_ok=True)
            worker_configuration(tmp_path, "new", handlers=("who", "odd"))
            answer = client.post("/v1/config/reload")
            assert answer.status_code >= 400
            assert "only one process can load this" in answer.text
            assert _statuses(clients, "old", "new") == [[200, 404]] * 2
            assert all(each.get("/odd").status_code >= 400 for each in clients)
        worker_configuration(tmp_path, "new")
        assert clients[1].post("/v1/config/reload").status_code in {200, 201}
        assert _statuses(clients, "old", "new") == [[404, 200]] * 2
        file.write_text("{", encoding="utf-8")
        assert clients[0].post("/v1/config/reload").status_code >= 400
        assert _statuses(clients, "old", "new") == [[404, 200]] * 2


def test_models_are_loaded_and_unloaded_by_name_in_all_workers(tmp_path: Path) -> None:
    file = worker_configuration(tmp_path, "a", "b")
    options = ("--config_path", str(file), "--workers", "2", "--model_control", "explicit", "--load_model", "a,who")
    with serving(*options, log=tmp_path / "log") as server:
        with each_worker(server) as clients:
            # The server is ready once one worker is, and the other one may still load.
            until(lambda: _statuses(clients, "a", "b") == [[200, 404]] * 2)
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
        with each_worker(server) as clients:
            assert _statuses(clients, "a", "b", "mine") == [[404, 200, 200]] * 2


def test_regions_of_shared_memory_are_known_to_all_workers(servers: SystemServers) -> None:
    server = servers.serving("recovering_workers")
    memory = SharedMemory(create=True, size=80)
    path = "/v2/systemsharedmemory/region/r"
    try:
        np.ndarray(10, np.float32, memory.buf)[:] = 3
        region = {"key": memory.name, "offset": 0, "byte_size": 80}
        with each_worker(server) as clients:
            clients[0].post(f"{path}/unregister")
            wrong = clients[0].post(f"{path}/register", json={**region, "byte_size": 800})
            assert wrong.status_code == 400
            assert [client.get(f"{path}/status").status_code for client in clients] == [404, 404]
            clients[0].post(f"{path}/register", json=region).raise_for_status()
            assert clients[1].post(f"{path}/register", json=region).status_code == 409
            assert [_infer_in_region(client) for client in clients] == [[4.0] * 10] * 2
            _kill_worker_of(clients[0], server)
        with each_worker(server) as clients:
            assert [_infer_in_region(client) for client in clients] == [[4.0] * 10] * 2
            clients[1].post(f"{path}/unregister").raise_for_status()
            assert [client.get(f"{path}/status").status_code for client in clients] == [404, 404]
    finally:
        memory.close()
        memory.unlink()


def _infer_in_region(client: httpx.Client) -> Any:
    placed = {"shared_memory_region": "r", "shared_memory_offset": 0, "shared_memory_byte_size": 40}
    row = {"name": "b", "shape": [1, 10], "datatype": "FP32", "parameters": placed}
    return client.post("/v2/models/dummy/infer", json={"inputs": [row]}).raise_for_status().json()["outputs"][0]["data"]


def test_counters_stay_when_a_worker_has_died_or_been_renewed(servers: SystemServers) -> None:
    server = servers.serving("recovering_workers")
    renewals = server.printed_so_far().count("rolling restart finished")
    with each_worker(server) as clients:
        before = _requests(clients[0])
        assert _statuses(clients, "counted") == [[200]] * 2
        assert [_requests(client) for client in clients] == [before + 2] * 2
        _kill_worker_of(clients[0], server)
    with each_worker(server) as clients:
        assert [_requests(client) for client in clients] == [before + 2] * 2
        assert _statuses(clients, "counted") == [[200]] * 2
    server.process.send_signal(signal.SIGHUP)
    until(lambda: server.printed_so_far().count("rolling restart finished") > renewals)
    with each_worker(server) as clients:
        assert [_requests(client) for client in clients] == [before + 4] * 2
        some = clients[0].get("/metrics", params={"name[]": "ovms_requests_success"}).text
        assert f'interface="REST",method="ModelInfer",name="counted",version="1"}} {before + 4}' in some
        assert "ovms_requests_fail" not in some


def _requests(client: httpx.Client) -> float:
    accepts = ("text/plain", "application/openmetrics-text")
    texts = [client.get("/metrics", headers={"accept": each}).text for each in accepts]
    pattern = (
        r'^ovms_requests_success(?:_total)?\{[^}]*interface="REST",method="ModelInfer",name="counted"[^}]*\} ([0-9.]+)'
    )
    plain, open_metrics = (re.search(pattern, text, re.MULTILINE) for text in texts)
    assert (plain is None) == (open_metrics is None)
    if plain is None or open_metrics is None:
        return 0.0
    assert plain[1] == open_metrics[1]
    return float(plain[1])
