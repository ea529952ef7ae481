"""``ovms serve --workers``: limits of callers and of calls are those of the whole server."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.support.processes import OvmsProcess, run_ovms, serving
from tests.support.projects import write_project

pytestmark = pytest.mark.e2e

SECONDS = 60
WAITS = """
import os, pathlib, time

class Handler:
    def handle_get(self):
        return {{"pid": os.getpid()}}

    def handle_post(self, payload):
        pathlib.Path({folder!r}, "begun").touch()
        for _ in range(6000):
            if pathlib.Path({folder!r}, "go").exists():
                break
            time.sleep(0.01)
        return {{"pid": os.getpid()}}
"""


def _options(folder: Path, **entry: int) -> tuple[str, ...]:
    write_project(folder / "waits", WAITS.format(folder=str(folder)), name="waits")
    handler = {"name": "waits", "path": str(folder / "waits"), **entry}
    (folder / "config.json").write_text(json.dumps({"model_config_list": [], "handler_config_list": [handler]}))
    return "--config_path", str(folder / "config.json"), "--workers", "2"


@contextmanager
def _two_processes(server: OvmsProcess, **headers: str) -> Iterator[list[httpx.Client]]:
    """Give a client of each process."""
    with (
        httpx.Client(base_url=server.rest, timeout=SECONDS, headers=headers) as one,
        httpx.Client(base_url=server.rest, timeout=SECONDS, headers=headers) as other,
    ):
        for client in (one, other):
            client.get("/v2/health/live").raise_for_status()
        yield [one, other]


def _post_while_held(folder: Path, one: httpx.Client, other: httpx.Client) -> tuple[list[httpx.Response], int]:
    """Call a second process, and the first by another connection, while a call of the first is under way."""
    held: list[int] = []
    thread = threading.Thread(target=lambda: held.append(one.post("/waits", json={}).json()["pid"]))
    thread.start()
    for _ in range(SECONDS * 50):
        if (folder / "begun").exists():
            break
        threading.Event().wait(0.02)
    try:
        answers = [other.post("/waits", json={}) for _ in range(2)]
    finally:
        (folder / "go").touch()
        thread.join(SECONDS)
    return answers, held[0]


@pytest.mark.parametrize("whose", ["server", "entry"])
def test_calls_at_once_are_counted_over_all_processes(tmp_path: Path, whose: str) -> None:
    """A call is one too many whichever process gets it, and welcome there once the other one's has ended."""
    limit = {"max_concurrency": 1, "max_queue": 0} if whose == "entry" else {}
    options = () if limit else ("--max_concurrency", "1", "--max_queue", "0")
    with (
        serving(*_options(tmp_path, **limit), *options, log=tmp_path / "log") as server,
        _two_processes(server) as (one, other),
    ):
        refused, holder = _post_while_held(tmp_path, one, other)
        assert [answer.status_code for answer in refused] == [429, 429]
        assert "1 calls under way" in refused[0].text
        assert other.post("/waits", json={}).json()["pid"] != holder


def test_requests_of_a_caller_are_counted_over_all_processes(tmp_path: Path) -> None:
    """At once and a second; a process that is started anew knows what was used."""
    keys = tmp_path / "keys.json"
    new = ("--scope", "infer:*", "--file", str(keys))
    busy = run_ovms("keys", "new", "busy", "--concurrency", "1", *new).stdout.split()[-1]
    rare = run_ovms("keys", "new", "rare", "--requests_per_second", "0.001", *new).stdout.split()[-1]
    with serving(*_options(tmp_path), "--keys_file", str(keys), log=tmp_path / "log") as server:
        with _two_processes(server, **{"x-api-key": busy}) as (one, other):
            refused, holder = _post_while_held(tmp_path, one, other)
            assert [answer.status_code for answer in refused] == [429, 429]
            assert "'busy' has 1 requests under way" in refused[0].text
            assert other.post("/waits", json={}).json()["pid"] != holder
        with _two_processes(server, **{"x-api-key": rare}) as (one, other):
            answers = [client.get("/waits").status_code for client in (one, other, one, other)]
            assert answers == [200, 429, 429, 429]
