from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from ovmstrio.extras import COMPAT_FOLDER
from ovmstrio.ops.process_info import FILE_NAME, list_processes, record_process, serving_home, signal_processes
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


def test_http_and_the_original_client_are_served_until_serve_stop(project: Path) -> None:
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
        variables = {**os.environ, "PYTHONPATH": os.pathsep.join([str(COMPAT_FOLDER), *filter(None, sys.path)])}
        subprocess.run(stop, check=True, stdout=subprocess.DEVNULL, timeout=WAIT_SECONDS, env=variables)
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
    rpc, http = _write_config(project, "dag:", "  is_thread_op: false")
    with running("paddle", "run", "--bind_address", "127.0.0.1", "web_service.py", grpc=rpc, rest=http) as server:
        answer = _post(server, "1,2")
        assert answer["value"][0] == "[3.0, 5.0]"
        worker = int(answer["value"][1])
        assert worker != server.process.pid
        code, output = server.stop(signal.SIGINT)
    assert code == 0, output
    assert not Path(f"/proc/{worker}").exists()


def test_a_script_runs_by_python_itself(project: Path) -> None:
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
    _write_config(project, "dag:", f"  is_thread_op: {is_thread_op}")
    gate = project / "gate"
    os.mkfifo(gate)
    with serving("config.yml", "--service", "web_service.py", "--drain_seconds", "0.2") as server:
        caller = threading.Thread(target=_expect_cut, args=(server, gate))
        caller.start()
        with gate.open("w"):  # the Op reads until it is closed
            code, output = server.stop()
        caller.join(WAIT_SECONDS)
        assert code == 1, output
        assert "requests cut" in output
        assert not caller.is_alive()


def _expect_cut(server: OvmsProcess, gate: Path) -> None:
    try:
        assert _post(server, "1", gate=str(gate))["err_no"] == 3001
    except httpx.TransportError:
        return


def _read_pipe(pipe: Path) -> str:
    with os.fdopen(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)) as reader:
        assert select.select([reader], [], [], WAIT_SECONDS)[0], f"no process has written to {pipe}"
        return reader.read()


@pytest.mark.parametrize("is_thread_op", [True, False])
def test_a_start_that_takes_long_can_be_ended(project: Path, *, is_thread_op: bool) -> None:
    rpc, http = _write_config(project, "dag:", f"  is_thread_op: {is_thread_op}")
    gate = project / "gate"
    os.mkfifo(gate)
    noting = 'self.factor = open("gate", "w").write(str(os.getpid())) or open("gate").read()'
    (project / "web_service.py").write_text(SCRIPT.replace("self.factor = 2.0", noting))
    with running("paddle", "run", "web_service.py", grpc=rpc, rest=http, ready=False) as server:
        worker = int(_read_pipe(gate))
        assert (worker == server.process.pid) is is_thread_op
        code, output = server.stop()
    assert code == 0, output
    assert not Path(f"/proc/{worker}").exists()


def test_an_op_that_cannot_be_prepared_ends_the_command(project: Path) -> None:
    (project / "config.yml").write_text("rpc_port: 0\n")
    (project / "web_service.py").write_text(SCRIPT.replace("2.0", "no_such_name"))
    done = run_ovms("serve", "config.yml", "--service", "web_service.py")
    assert done.returncode == 1, done.stderr
    for part in ("NameError", "no_such_name", "init_op", "det"):
        assert part in done.stderr


@pytest.mark.parametrize("package", ["paddle_serving_server", "paddle_serving_server_gpu"])
def test_the_original_package_is_not_shadowed(project: Path, monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    _write_config(project)
    (project / "web_service.py").write_text(SCRIPT.replace("paddle_serving_server", package))
    original = project / "site" / package
    original.mkdir(parents=True)
    (original / "__init__.py").write_text('"""The original."""\n')
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*filter(None, sys.path), str(original.parent)]))
    done = run_ovms("paddle", "run", "web_service.py")
    assert done.returncode == 1
    assert f"pip uninstall {package.replace('_', '-')}`" in done.stderr
    assert json.dumps(str(original))[1:-1] in done.stderr.replace("\n", "")


# The file of running servers


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def test_a_server_is_in_the_file_while_it_runs(tmp_path: Path) -> None:
    with record_process([9998, 18082], tmp_path) as file:
        (entry,) = json.loads(file.read_text())
        assert (entry["pid"], entry["port"], entry["model"]) == (os.getpid(), [9998, 18082], "pipline")
        assert entry["start_time"] > 0
        assert [each.is_ours for each in list_processes(tmp_path)] == [True]
    assert list_processes(tmp_path) == []


def test_servers_share_the_file(tmp_path: Path) -> None:
    dead = {"pid": 2**22, "port": [1], "model": "pipline", "start_time": 1.0}
    (tmp_path / FILE_NAME).write_text(json.dumps([dead, "rubbish", {"pid": "x"}]))
    with record_process([1001], tmp_path), record_process([1002], tmp_path):
        assert [each.port for each in list_processes(tmp_path)] == [[1001], [1002]]
        with record_process([1001], tmp_path):
            assert [each.port for each in list_processes(tmp_path)] == [[1002], [1001]]


def test_a_process_with_another_start_time_is_not_signalled(tmp_path: Path, other: subprocess.Popen[bytes]) -> None:
    with record_process([1001], tmp_path) as file:
        (entry,) = json.loads(file.read_text())
    stat = {"pid": other.pid, "model": "pipline"}
    began_earlier = {**stat, "port": [1002], "start_time": entry["start_time"] - 1000}
    file.write_text(json.dumps([began_earlier, {**stat, "port": [1003], "start_time": entry["start_time"] + 5}]))
    sent, stale = signal_processes(signal.SIGINT, 1002, tmp_path)
    assert (sent, [each.pid for each in stale]) == ([], [other.pid])
    sent, stale = signal_processes(signal.SIGKILL, 1003, tmp_path)
    assert ([each.pid for each in sent], stale) == ([other.pid], [])
    assert other.wait(10) == -signal.SIGKILL
    assert signal_processes(signal.SIGINT, 1004, tmp_path) == ([], [])


@pytest.mark.parametrize("text", [None, "", "rubbish", "{}"], ids=["missing", "empty", "no JSON", "no list"])
def test_a_file_without_entries_names_no_process(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / FILE_NAME).write_text(text)
    assert list_processes(tmp_path) == []


def test_serving_home_names_the_folder_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SERVING_HOME", raising=False)
    assert serving_home() == tmp_path
    monkeypatch.setenv("SERVING_HOME", str(tmp_path / "there"))
    with record_process([1001]) as file:
        assert file == tmp_path / "there" / FILE_NAME
