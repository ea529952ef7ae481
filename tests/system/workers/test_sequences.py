"""Sequences of ``ovms serve --workers``: they are where they began, and found from everywhere."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support import ir
from tests.support.processes import OvmsProcess, serving
from tests.support.projects import write_project

pytestmark = pytest.mark.e2e

SECONDS = 60
MOST = 12
WHO = """
import os

class Handler:
    def handle_get(self):
        return {"pid": os.getpid()}
"""


def _configure(folder: Path) -> Path:
    ir.save(ir.accumulator(), folder, "acc")
    write_project(folder / "who", WHO, name="who")
    path = str(folder / "acc")
    model = {"config": {"name": "acc", "base_path": path, "stateful": True, "max_sequence_number": MOST}}
    file = folder / "config.json"
    handler = {"name": "who", "path": str(folder / "who")}
    file.write_text(json.dumps({"model_config_list": [model], "handler_config_list": [handler]}), encoding="utf-8")
    return file


@contextmanager
def _server(folder: Path) -> Iterator[tuple[OvmsProcess, list[httpx.Client]]]:
    """A server of two processes, and a client with a connection to each."""
    options = ("--config_path", str(_configure(folder)), "--workers", "2")
    with serving(*options, ready=True, log=folder / "log") as server, ExitStack() as stack:
        yield server, _clients(server, stack)


@pytest.fixture(scope="module")
def clients(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[httpx.Client]]:
    """Clients of a server that nobody hurts, one of each process; whoever uses them ends all sequences."""
    with _server(tmp_path_factory.mktemp("sequences")) as (_, found):
        yield found


def _clients(server: OvmsProcess, stack: ExitStack) -> list[httpx.Client]:
    """Open connections until each process has one; one that was started anew gets some when it is ready."""
    by_pid: dict[int, httpx.Client] = {}

    def have_both() -> bool:
        client = stack.enter_context(httpx.Client(base_url=server.rest, timeout=SECONDS))
        by_pid.setdefault(_pid(client), client)
        return len(by_pid) == 2

    _until(have_both)
    return list(by_pid.values())


def _pid(client: httpx.Client) -> int:
    return int(client.get("/who").raise_for_status().json()["pid"])


def _step(client: httpx.Client, identity: int | str = 0, **said: bool) -> httpx.Response:
    row = {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1.0, 2.0]}
    parameters = {"sequence_id": identity} | {f"sequence_{name}": value for name, value in said.items()}
    return client.post("/v2/models/acc/infer", json={"inputs": [row], "parameters": parameters})


def _sum(answer: httpx.Response) -> float:
    outputs = {each["name"]: each["data"] for each in answer.raise_for_status().json()["outputs"]}
    del outputs["sequence_id"]
    ((first, _),) = outputs.values()
    return float(first)


def _ids(client: httpx.Client) -> list[Any]:
    listed = client.get("/v2/models/acc/sequences").raise_for_status().json()["sequences"]
    return [each["id"] for each in listed]


def _until(holds: Callable[[], bool]) -> None:
    ends = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < ends
        threading.Event().wait(0.02)


def test_a_sequence_is_in_the_process_that_its_client_is_connected_to(tmp_path: Path) -> None:
    """So the end of another one is not its own; what was in that one is over, and its ids are free for others."""
    with _server(tmp_path) as (server, (here, there)):
        for identity in range(1, 7):
            assert _sum(_step(here, identity, start=True)) == 1.0
            assert _sum(_step(there, f"other {identity}", start=True)) == 1.0
            # By any connection, as before.
            assert _sum(_step(there, identity)) == 2.0
            assert _sum(_step(here, f"other {identity}")) == 2.0
        os.kill(_pid(there), signal.SIGKILL)
        _until(lambda: _ids(here) == [*range(1, 7)])
        for identity in range(1, 7):
            assert _sum(_step(here, identity)) == 3.0
            _until(lambda identity=identity: _step(here, f"other {identity}").status_code == 404)  # type: ignore[misc]  # the loop's own
            assert _sum(_step(here, f"other {identity}", start=True)) == 1.0
        with ExitStack() as stack:
            for client in _clients(server, stack):
                for identity in range(1, 7):
                    _sum(_step(client, f"other {identity}"))
                    assert _step(client, identity, start=True).status_code in {409, 503}
        assert _ids(here) == [*range(1, 7), *(f"other {identity}" for identity in range(1, 7))]


def test_an_id_that_has_ended_may_begin_anywhere(clients: list[httpx.Client]) -> None:
    """Whoever ends it, and whoever begins the next one: that has a state of its own."""
    for first in clients:
        for ender in clients:
            for second in clients:
                assert _sum(_step(first, 5, start=True)) == 1.0
                assert _sum(_step(ender, 5, end=True)) == 2.0
                assert [_step(client, 5).status_code for client in clients] == [404, 404]
                assert _sum(_step(second, 5, start=True)) == 1.0
                assert [_sum(_step(client, 5)) for client in clients] == [2.0, 3.0]
                assert _sum(_step(first, 5, end=True)) == 4.0
    assert _ids(clients[0]) == []


def test_of_two_starts_at_once_one_is_refused(clients: list[httpx.Client]) -> None:
    """Whichever process they come to; the refused one is told that there is such a sequence."""
    with ThreadPoolExecutor(2) as threads:
        for identity in range(1, 41):
            answers = list(threads.map(lambda client: _step(client, identity, start=True), clients))  # noqa: B023 - waited for
            assert sorted(each.status_code for each in answers) == [200, 409]
            assert [_sum(_step(client, identity)) for client in clients] == [2.0, 3.0]
            assert _sum(_step(clients[identity % 2], identity, end=True)) == 4.0


def test_as_many_sequences_are_alive_as_one_process_would_have(clients: list[httpx.Client]) -> None:
    """Wherever they began: one connection may have all of them, and what has ended makes room for anybody."""
    here, there = clients
    given = [int(_step(here, start=True).raise_for_status().json()["outputs"][1]["data"][0]) for _ in range(MOST)]
    assert sorted(set(given)) == sorted(given) == _ids(there)
    for client in (here, there):
        assert _step(client, 1000, start=True).status_code == 503
        assert _step(client, start=True).status_code == 503
    assert _sum(_step(there, given[0], end=True)) == 2.0
    assert _sum(_step(there, 1000, start=True)) == 1.0
    assert _step(here, 1001, start=True).status_code == 503
    for identity in _ids(here):
        _sum(_step(here, identity, end=True))
