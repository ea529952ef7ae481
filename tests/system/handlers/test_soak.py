"""A served project whose bucket changes all the time, while many clients ask for what is in it."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import httpx
import psutil
import pytest

from tests.support.project_processes import ProjectProcess, serving_project
from tests.support.projects import write_project
from tests.support.s3 import Bucket, s3_server
from tests.support.waits import WAIT_SECONDS, until

pytest.importorskip("s3fs")
pytest.importorskip("moto")
pytestmark = pytest.mark.slow

HANDLER = """
from pathlib import Path

class Handler:
    def __init__(self, model_client):
        self.client = model_client

    def load_model(self, model_path):
        return Path(model_path, "model.txt").read_text()

    def handle_get(self, query_params):
        text = self.client.get_model(query_params["name"])
        return {"kind": text.split()[0], "size": len(text)}
"""
CLIENTS = 50
ROUNDS = 24
SIZE = 300_000
STABLE = "abcd"
GUEST = "guest"
MORE_BYTES = 30e6


class _Clients:
    """Clients that ask all the time; the guest may be absent unless it has been there for a while."""

    def __init__(self, address: str) -> None:
        self.over = threading.Event()
        self.guest_is_here = threading.Event()
        self.calls = Counter[str]()
        self.failed: list[str] = []
        self._address = address

    def run(self, seed: int) -> None:
        """Ask until it is over."""
        choice = Random(seed)
        with httpx.Client(base_url=f"http://{self._address}", timeout=WAIT_SECONDS, trust_env=False) as client:
            while not self.over.wait(choice.random() / 20):
                self._ask(client, choice.choice([*STABLE, GUEST]))

    def _ask(self, client: httpx.Client, name: str) -> None:
        must_be_here = name != GUEST or self.guest_is_here.is_set()
        answer = client.get("/", params={"name": name})
        must_be_here = must_be_here and (name != GUEST or self.guest_is_here.is_set())
        self.calls[name] += 1
        if answer.status_code != 200 and must_be_here:
            self.failed.append(f"{name}: {answer.status_code} {answer.text}")
        if answer.status_code == 200 and answer.json()["kind"] != name:
            self.failed.append(f"{name}: got {answer.text}")


def _put(bucket: Bucket, name: str, version: int) -> None:
    bucket.put(f"up/{name}/{version}/model.txt", f"{name} ".ljust(SIZE, str(version % 10)))


def _change(bucket: Bucket, number: int) -> None:
    """Write a version anew, add one and remove one."""
    _put(bucket, STABLE[number % 4], 1)
    name = STABLE[(number + 1) % 4]
    _put(bucket, name, number + 2)
    if number >= 4:
        bucket.remove(f"up/{name}/{number - 2}/")


def _wait_known(server: ProjectProcess, name: str, *, known: bool) -> None:
    until(lambda: (name in server.ask(path="/info").json()["model_metadata"]) is known)


def _soak(server: ProjectProcess, bucket: Bucket, clients: _Clients) -> list[int]:
    """Change the bucket round by round, and give how much memory the server has after each."""
    process = psutil.Process(server.process.pid)
    resident = []
    for number in range(ROUNDS):
        _change(bucket, number)
        if number % 2:
            clients.guest_is_here.clear()
            bucket.remove(f"up/{GUEST}/")
        else:
            _put(bucket, GUEST, 1)
        _wait_known(server, GUEST, known=not number % 2)
        if not number % 2:
            clients.guest_is_here.set()
        clients.over.wait(0.2)
        resident.append(process.memory_info().rss)
    return resident


@pytest.mark.parametrize("sizes", [{}, {"cache_size": 2, "disk_cache_size": 3}], ids=["all", "cached"])
def test_no_request_fails_but_for_what_is_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: dict[str, Any]
) -> None:
    """Every client gets its own model's content, and the server's memory is no more in the end than half way."""
    with s3_server("models") as bucket:
        for key, value in bucket.environment.items():
            monkeypatch.setenv(key, value)
        for name in STABLE:
            _put(bucket, name, 1)
        models = {"dir": "s3://models/up", "reload_interval_seconds": 0.1, **sizes}
        file = write_project(tmp_path / "project", HANDLER, multi_model_reloading=models, threads_per_process=8)
        with serving_project(file) as server, ThreadPoolExecutor(CLIENTS) as pool:
            clients = _Clients(server.address)
            asking = [pool.submit(clients.run, seed) for seed in range(CLIENTS)]
            try:
                resident = _soak(server, bucket, clients)
            finally:
                clients.over.set()
            for each in asking:
                each.result()
            assert clients.failed == []
            assert min(clients.calls[name] for name in (*STABLE, GUEST)) > 100
            assert max(resident[-6:]) - max(resident[: ROUNDS // 2]) < MORE_BYTES
            assert server.stop() == 0
