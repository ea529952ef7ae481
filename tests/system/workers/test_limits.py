"""``ovms serve --workers``: limits of callers and of calls hold for all workers together."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from tests.support.processes import run_ovms, serving
from tests.support.projects import write_project
from tests.support.system_servers import WAITING_HANDLER, write_config
from tests.support.waits import WAIT_SECONDS, until
from tests.support.worker_clients import each_worker

if TYPE_CHECKING:
    from pathlib import Path

    import httpx

    from tests.support.system_servers import SystemServers


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
    """The limit of an entry of the configuration holds for both workers together."""
    with each_worker(servers.serving("workers")) as (one, other):
        _expect_one_at_a_time(tmp_path, one, other, "1 calls under way")


def test_requests_of_a_caller_are_counted_over_all_workers(tmp_path: Path) -> None:
    """Limits of requests at once and per second hold for both workers. The server is its own, as it has keys."""
    keys = tmp_path / "keys.json"
    new = ("--scope", "infer:*", "--scope", "admin", "--file", str(keys))
    busy = run_ovms("keys", "new", "busy", "--concurrency", "1", *new).stdout.split()[-1]
    rare = run_ovms("keys", "new", "rare", "--requests_per_second", "0.001", *new).stdout.split()[-1]
    with serving(*_options(tmp_path), "--keys_file", str(keys), log=tmp_path / "log") as server:
        with each_worker(server, **{"x-api-key": busy}) as (one, other):
            _expect_one_at_a_time(tmp_path, one, other, "'busy' has 1 requests under way")
        with each_worker(server, **{"x-api-key": busy}) as clients:
            for client in clients:
                client.headers["x-api-key"] = rare
            answers = [client.get("/waits").status_code for client in (*clients, *clients)]
    assert answers == [200, 429, 429, 429]
