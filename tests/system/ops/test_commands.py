"""Pipelines of Ops by ``ovms serve``, ``ovms run`` and Python. The tests stop their servers."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from ovmstrio.runtimes.ops.process_info import list_processes
from paddle_serving_server.pipeline import PipelineClient
from tests.support.ports import free_ports
from tests.support.processes import OvmsProcess, end_of_output, run_ovms, running, serving
from tests.support.waits import WAIT_SECONDS

SCRIPT = """
import os
import numpy as np
from paddle_serving_server.web_service import WebService, Op


class DetOp(Op):
    def init_op(self):
        self.factor = 2.0

    def preprocess(self, input_dicts, data_id, log_id):
        (_, input_dict), = input_dicts.items()
        if "gate" in input_dict:
            open(input_dict["gate"]).read()
        values = np.array(input_dict["x"], np.float32) if not isinstance(input_dict["x"], str) else np.float32(
            input_dict["x"].split(","))
        return {"x": values * self.factor, "pid": os.getpid()}, False, None, ""


class RecOp(Op):
    def preprocess(self, input_dicts):
        (_, input_dict), = input_dicts.items()
        return input_dict

    def postprocess(self, input_dicts, fetch_dict):
        return {"y": str((fetch_dict["x"] + 1).tolist()), "pid": str(fetch_dict["pid"])}


class OcrService(WebService):
    def get_pipeline_response(self, read_op):
        det_op = DetOp(name="det", input_ops=[read_op])
        rec_op = RecOp(name="rec", input_ops=[det_op])
        return rec_op


ocr_service = OcrService(name="ocr")
ocr_service.prepare_pipeline_config("config.yml")
ocr_service.run_service()
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a script into a folder, which is the working folder of the servers."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "web_service.py").write_text(SCRIPT)
    return tmp_path


def _write_config(folder: Path, *lines: str) -> tuple[int, int]:
    rpc, http = free_ports(2)
    (folder / "config.yml").write_text("\n".join([f"rpc_port: {rpc}", f"http_port: {http}", "worker_num: 4", *lines]))
    return rpc, http


def _post(server: OvmsProcess, x: str, **fields: Any) -> Any:
    body = {"key": ["x", *fields], "value": [x, *fields.values()]}
    answer = httpx.post(f"{server.rest}/ocr/prediction", json=body, timeout=WAIT_SECONDS, trust_env=False)
    assert answer.status_code == 200
    return answer.json()


def _values(response: Any) -> str:
    assert response.err_no == 0, response.err_msg
    return str(response.value[list(response.key).index("y")])


def test_every_way_in(project: Path) -> None:
    """JSON and the client of Paddle Serving give the same values; then ``serve stop`` ends the server."""
    _write_config(project)
    with serving("config.yml", "--service", "web_service.py") as server:
        assert _post(server, "1,2")["value"][0] == "[3.0, 5.0]"
        _check_client(server)
        assert server.get("/health").json() == {"status": "ok"}
        assert "pd_query_request_success_total" in server.get("/metrics").text
        assert set(server.get("/trace").json()["ops"]) == {"det", "rec"}
        (entry,) = list_processes(project)
        assert entry.pid == server.process.pid
        assert [f"127.0.0.1:{entry.port[0]}", f"http://127.0.0.1:{entry.port[1]}"] == [server.grpc, server.rest]
        stop = [sys.executable, "-m", "paddle_serving_server.serve", "stop", "--port", str(entry.port[0])]
        subprocess.run(stop, check=True, stdout=subprocess.DEVNULL, timeout=WAIT_SECONDS)
        assert server.process.wait(WAIT_SECONDS) == 0
        for port in entry.port:
            socket.create_server(("127.0.0.1", port or 0)).close()
    assert list_processes(project) == []
    logs = {file.name for file in (project / "PipelineServingLogs").iterdir()}
    assert logs == {"pipeline.log", "pipeline.log.wf", "pipeline.tracer"}


def _check_client(server: OvmsProcess) -> None:
    client = PipelineClient()
    client.connect([server.grpc])
    assert _values(client.predict({"x": "1,2"}, fetch=["y"], timeout=WAIT_SECONDS)) == "[3.0, 5.0]"
    array = {"x": np.array([3, 4], np.int64)}
    for as_bytes in (False, True):
        assert _values(client.predict(array, pack_tensor_format=True, use_tensor_bytes=as_bytes)) == "[7.0, 9.0]"
    futures = [client.predict({"x": str(number)}, asyn=True) for number in range(100)]
    answers = [_values(future.result(WAIT_SECONDS)) for future in futures]
    assert answers == [f"[{2.0 * number + 1}]" for number in range(100)]
    assert "pipeline.profile" in client.predict({"x": "1"}, profile=True).key
    client.release()


def test_a_script_runs_unchanged(project: Path) -> None:
    """``ovms run`` takes ports and Ops from what the script names, with Ops in processes, and Ctrl-C ends it."""
    rpc, http = _write_config(project, "dag:", "  is_thread_op: false")
    with running("run", "--bind_address", "127.0.0.1", "web_service.py", grpc=rpc, rest=http) as server:
        answer = _post(server, "1,2")
        assert answer["value"][0] == "[3.0, 5.0]"
        worker = int(answer["value"][1])
        assert worker != server.process.pid
        code, output = server.stop(signal.SIGINT)
    assert code == 0, output
    assert not Path(f"/proc/{worker}").exists()


def test_a_script_runs_by_python_itself(project: Path) -> None:
    """With the folder of our packages on its path, a script needs no command."""
    rpc, http = _write_config(project)
    compat = Path(sys.modules["paddle_serving_server"].__path__[0]).parent
    path = os.pathsep.join([str(compat), *filter(None, sys.path)])
    command = [sys.executable, "web_service.py"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    server = OvmsProcess(process, rpc, http)
    try:
        server.wait_ready()
        assert _post(server, "1")["err_no"] == 0
        assert server.stop()[0] == 0
    finally:
        process.kill()
        end_of_output(process)


@pytest.mark.parametrize("is_thread_op", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_hook_that_never_returns_does_not_keep_the_server(project: Path, *, is_thread_op: bool) -> None:
    """After ``--drain_seconds`` the server exits with 1, whatever user code does."""
    _write_config(project, "dag:", f"  is_thread_op: {is_thread_op}")
    gate = project / "gate"
    os.mkfifo(gate)
    with serving("config.yml", "--service", "web_service.py", "--drain_seconds", "0.2") as server:
        asking = threading.Thread(target=_ask_in_vain, args=(server, gate))
        asking.start()
        with gate.open("w"):  # the Op reads until it is closed
            code, output = server.stop()
        asking.join(WAIT_SECONDS)
        assert code == 1, output
        assert "requests cut" in output
        assert not asking.is_alive()


def _ask_in_vain(server: OvmsProcess, gate: Path) -> None:
    try:
        assert _post(server, "1", gate=str(gate))["err_no"] == 3001
    except httpx.TransportError:
        return


def _read_pipe(pipe: Path) -> str:
    """Read from a named pipe, to which no process may ever write."""
    with os.fdopen(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)) as reader:
        assert select.select([reader], [], [], WAIT_SECONDS)[0], f"nobody has written to {pipe}"
        return reader.read()


@pytest.mark.parametrize("is_thread_op", [True, False])
def test_a_start_that_takes_long_can_be_ended(project: Path, *, is_thread_op: bool) -> None:
    """SIGTERM while an Op prepares itself ends the server and its workers, without waiting for the Op."""
    rpc, http = _write_config(project, "dag:", f"  is_thread_op: {is_thread_op}")
    gate = project / "gate"
    os.mkfifo(gate)
    noting = 'self.factor = open("gate", "w").write(str(os.getpid())) or open("gate").read()'
    (project / "web_service.py").write_text(SCRIPT.replace("self.factor = 2.0", noting))
    with running("run", "web_service.py", grpc=rpc, rest=http, ready=False) as server:
        worker = int(_read_pipe(gate))
        assert (worker == server.process.pid) is is_thread_op
        code, output = server.stop()
    assert code == 0, output
    assert not Path(f"/proc/{worker}").exists()


def test_an_op_that_cannot_be_prepared_ends_the_command(project: Path) -> None:
    """The command prints the error and the names of hook and Op, and exits with 1."""
    (project / "config.yml").write_text("rpc_port: 0\n")
    (project / "web_service.py").write_text(SCRIPT.replace("2.0", "no_such_name"))
    done = run_ovms("serve", "config.yml", "--service", "web_service.py")
    assert done.returncode == 1, done.stderr
    for part in ("NameError", "no_such_name", "init_op", "det"):
        assert part in done.stderr


def test_the_original_package_is_not_shadowed(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the original package is installed, too, the script is not run, and the error names both remedies."""
    _write_config(project)
    original = project / "site" / "paddle_serving_server"
    original.mkdir(parents=True)
    (original / "__init__.py").write_text('"""The original."""\n')
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*filter(None, sys.path), str(original.parent)]))
    done = run_ovms("run", "web_service.py")
    assert done.returncode == 1
    assert "pip uninstall paddle-serving-server" in done.stderr
    assert json.dumps(str(original))[1:-1] in done.stderr.replace("\n", "")
