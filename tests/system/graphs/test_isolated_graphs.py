"""``ovms serve`` with Python nodes in processes of their own."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.support.graphs import LOOPBACK, graph_text, python_node
from tests.support.processes import OvmsProcess, serving

pytestmark = pytest.mark.e2e

SOURCE = """
import os, re
from pyovms import Tensor
VERSION = {version}
class OvmsPythonModel:
    def execute(self, inputs):
        if b"lock" in bytes(inputs[0]):
            re.match("(a+)+$", "a" * 40 + "b")
        if b"crash" in bytes(inputs[0]):
            os.abort()
        return [Tensor("out", b"%d %d" % (VERSION, os.getpid()))]
"""


def write(root: Path, *names: str, **settings: Any) -> Path:
    """Write graphs of one node each; the settings are those of the first."""
    for name in names:
        (root / name).mkdir()
        (root / name / "handler.py").write_text(SOURCE.format(version=1))
        (root / name / "graph.pbtxt").write_text(graph_text(python_node("handler.py")))
    entries: list[dict[str, Any]] = [{"name": name} for name in names]
    entries[0] |= settings
    path = root / "config.json"
    path.write_text(json.dumps({"model_config_list": [], "mediapipe_config_list": entries}))
    return path


def ask(server: OvmsProcess, name: str, text: str = "") -> httpx.Response:
    """Call a graph."""
    tensor = {"name": "in", "shape": [1], "datatype": "BYTES", "data": [text]}
    return httpx.post(f"{server.rest}/v2/models/{name}/infer", json={"inputs": [tensor]}, timeout=30)


def said(server: OvmsProcess, name: str) -> tuple[int, int]:
    """Give the version and the process of a node."""
    answer = ask(server, name).raise_for_status().json()["outputs"][0]["data"]
    version, pid = bytes(answer).decode().split()
    return int(version), int(pid)


def wait_for(true: Any) -> None:
    """Return once something holds; fails after some seconds."""
    ends = time.monotonic() + 20
    while not true():
        assert time.monotonic() < ends
        threading.Event().wait(0.02)


def test_a_node_that_holds_the_lock_neither_stops_others_nor_the_end(tmp_path: Path) -> None:
    """Neighbours are answered meanwhile, SIGTERM drains in time, and no process is left."""
    config = write(tmp_path, "locked", "plain", python_isolation="process")
    with (
        serving("--config_path", str(config), "--drain_seconds", "1") as server,
        ThreadPoolExecutor(1) as pool,
    ):
        _, pid = said(server, "locked")
        children = psutil.Process(server.process.pid).children(recursive=True)
        assert said(server, "plain")[1] == server.process.pid
        before = psutil.Process(pid).cpu_times().user
        call = pool.submit(ask, server, "locked", "lock")
        wait_for(lambda: psutil.Process(pid).cpu_times().user > before + 0.3)
        times = []
        for _ in range(50):
            start = time.monotonic()
            said(server, "plain")
            times.append(time.monotonic() - start)
        assert sorted(times)[48] < 3
        start = time.monotonic()
        code, _ = server.stop()
        assert (code, time.monotonic() - start < 15) == (1, True)
        # It may be cut before it has its answer.
        with suppress(httpx.TransportError):
            assert call.result().status_code == 503
    assert not [child for child in children if child.is_running()]


def test_a_changed_handler_is_served_by_other_processes(tmp_path: Path) -> None:
    """No call fails meanwhile, and the old processes end."""
    config = write(tmp_path, "g", python_processes=2)
    with serving("--config_path", str(config), "--file_system_poll_wait_seconds", "0.1") as server:
        first = {said(server, "g")[1] for _ in range(4)}
        (tmp_path / "g" / "handler.py").write_text(SOURCE.format(version=2))
        wait_for(lambda: said(server, "g")[0] == 2)
        wait_for(lambda: not any(map(psutil.pid_exists, first)))


def test_the_server_may_isolate_all_nodes(tmp_path: Path) -> None:
    """Except where an entry says otherwise; a crash is one failed call."""
    config = write(tmp_path, "own", "other", python_isolation="none")
    with serving("--config_path", str(config), "--python_isolation", "process") as server:
        assert said(server, "own")[1] == server.process.pid
        _, pid = said(server, "other")
        assert pid != server.process.pid
        answer = ask(server, "other", "crash")
        assert answer.status_code == 400
        assert "the worker process of the node was killed by SIGABRT" in answer.text
        assert said(server, "other")[1] != pid


def test_a_crash_ends_a_stream_with_an_event(tmp_path: Path) -> None:
    """What was sent before it has arrived."""
    config = write(tmp_path, "g", python_isolation="process")
    (tmp_path / "g" / "graph.pbtxt").write_text(graph_text(python_node("handler.py", more=LOOPBACK)))
    (tmp_path / "g" / "handler.py").write_text(
        "import os\nfrom pyovms import Tensor\nclass OvmsPythonModel:\n    def execute(self, inputs):\n"
        "        yield [Tensor('out', b'first')]\n        os._exit(5)\n"
    )
    with serving("--config_path", str(config)) as server:
        body = {"in": "x"}
        answer = httpx.post(f"{server.rest}/v2/models/g/generate_stream", json=body, timeout=30)
        assert "first" in answer.text
        assert "the worker process of the node ended with status 5" in answer.text
