"""Profiles of service processes, over the console's API."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.all_kinds import write_all_kinds
from tests.support.served_in_thread import ServedInThread, serving_in_thread


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedInThread]:
    """Serve a service of every kind."""
    config = write_all_kinds(tmp_path_factory.mktemp("kinds"))
    with serving_in_thread(config_path=config) as served:
        yield served


def _inside(server: ServedInThread, name: str) -> dict[str, Any]:
    answer = server.ask("GET", f"/console/api/services/{name}")
    assert answer.status_code == 200, answer.text
    document: dict[str, Any] = answer.json()
    return document


def _call(server: ServedInThread, name: str, document: Any, path: str = "infer") -> int:
    return server.ask("POST", f"/v2/models/{name}/{path}", json=document).status_code


def test_a_profile_names_processes_of_services_with_what_they_took(tmp_path: Path) -> None:
    """They are not sampled, and what one does is not among the threads of the server."""
    node = (
        "import time\nfrom pyovms import Tensor\nclass OvmsPythonModel:\n    def execute(self, inputs):\n"
        "        begun = time.process_time()\n        while time.process_time() - begun < 0.2:\n            pass\n"
        "        return [Tensor('out', b'')]\n"
    )
    texts = {"inputs": [{"name": "in", "shape": [1], "datatype": "BYTES", "data": ["a"]}]}
    with serving_in_thread(config_path=write_all_kinds(tmp_path, node=node), python_isolation="process") as server:
        pids = _inside(server, "graph")["facts"]["processes"]
        with ThreadPoolExecutor(1) as pool:
            profiling = pool.submit(lambda: server.ask("POST", "/v2/profile", json={"seconds": 2, "models": []}))
            while not profiling.done():
                assert _call(server, "graph", texts) == 200
        told = profiling.result().json()
    (process,) = [each for each in told["processes"] if each["service"] == "graph"]
    assert [process["pid"]] == pids
    assert process["cpu_seconds"] > 0
