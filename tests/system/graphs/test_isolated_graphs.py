from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import httpx
import psutil

from tests.support.graphs import LOOPBACK, graph_text, python_node
from tests.support.processes import OvmsProcess, serving
from tests.support.waits import WAIT_SECONDS, until

if TYPE_CHECKING:
    from pathlib import Path

CODE = """
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
STREAMING_CODE = """
import os
from pyovms import Tensor
class OvmsPythonModel:
    def execute(self, inputs):
        yield [Tensor('out', b'first')]
        os._exit(5)
"""


def _write(folder: Path, **entries: dict[str, Any]) -> Path:
    for name in entries:
        (folder / name).mkdir()
        (folder / name / "handler.py").write_text(CODE.format(version=1))
        (folder / name / "graph.pbtxt").write_text(graph_text(python_node("handler.py")))
    graphs = [{"name": name, **keys} for name, keys in entries.items()]
    path = folder / "config.json"
    path.write_text(json.dumps({"model_config_list": [], "mediapipe_config_list": graphs}))
    return path


def _call(server: OvmsProcess, name: str, text: str = "") -> httpx.Response:
    tensor = {"name": "in", "shape": [1], "datatype": "BYTES", "data": [text]}
    return httpx.post(f"{server.rest}/v2/models/{name}/infer", json={"inputs": [tensor]}, timeout=WAIT_SECONDS)


def _version_and_pid(server: OvmsProcess, name: str) -> tuple[int, int]:
    answer = _call(server, name).raise_for_status().json()["outputs"][0]["data"]
    version, pid = bytes(answer).decode().split()
    return int(version), int(pid)


def test_node_that_holds_the_interpreter_does_not_block_others_or_the_drain(tmp_path: Path) -> None:
    config = _write(tmp_path, locked={"python_isolation": "process"}, plain={})
    with (
        serving("--config_path", str(config), "--drain_seconds", "1") as server,
        ThreadPoolExecutor(1) as pool,
    ):
        _, pid = _version_and_pid(server, "locked")
        children = psutil.Process(server.process.pid).children(recursive=True)
        before = psutil.Process(pid).cpu_times().user
        call = pool.submit(_call, server, "locked", "lock")
        until(lambda: psutil.Process(pid).cpu_times().user > before + 0.3)
        for _ in range(50):
            assert _version_and_pid(server, "plain") == (1, server.process.pid)
        assert not call.done()
        code, _ = server.stop()
        assert code == 1
        # The call may be cut before it has its answer.
        with suppress(httpx.TransportError):
            assert call.result().status_code == 503
    assert not [child for child in children if child.is_running()]


def test_isolated_nodes_crash_alone_and_are_reloaded(tmp_path: Path) -> None:
    """The option isolates all nodes but those whose entry says otherwise; a crash fails one call or stream.

    A changed handler is served by new processes, and the old ones end. The test changes files of its server.
    """
    config = _write(tmp_path, own={"python_isolation": "none"}, other={}, several={"python_processes": 2}, streaming={})
    (tmp_path / "streaming" / "graph.pbtxt").write_text(graph_text(python_node("handler.py", more=LOOPBACK)))
    (tmp_path / "streaming" / "handler.py").write_text(STREAMING_CODE)
    options = ("--python_isolation", "process", "--file_system_poll_wait_seconds", "0.1")
    with serving("--config_path", str(config), *options) as server:
        assert _version_and_pid(server, "own")[1] == server.process.pid
        _, pid = _version_and_pid(server, "other")
        assert pid != server.process.pid
        answer = _call(server, "other", "crash")
        assert answer.status_code == 400
        assert "the worker process of the node was killed by SIGABRT" in answer.text
        assert _version_and_pid(server, "other")[1] != pid
        path = f"{server.rest}/v2/models/streaming/generate_stream"
        answer = httpx.post(path, json={"in": "x"}, timeout=WAIT_SECONDS)
        assert "first" in answer.text
        assert "the worker process of the node ended with status 5" in answer.text
        first = {_version_and_pid(server, "several")[1] for _ in range(4)}
        (tmp_path / "several" / "handler.py").write_text(CODE.format(version=2))
        until(lambda: _version_and_pid(server, "several")[0] == 2)
        until(lambda: not any(map(psutil.pid_exists, first)))
