from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import httpx
import pytest

from tests.support import ir
from tests.support.all_kinds import OPS
from tests.support.ports import free_ports
from tests.support.processes import OvmsProcess, running_service, serving, serving_project
from tests.support.projects import write_project
from tests.support.system_servers import PID_HANDLER, WAITING_HANDLER, write_config
from tests.support.waits import WAIT_SECONDS, until
from tests.support.worker_clients import ROW

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


# Tests may run under nohup, whose children ignore SIGHUP.
_WITH_TERMINAL = """
import fcntl, os, signal, sys, termios
signal.signal(signal.SIGHUP, signal.SIG_DFL)
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, "-m", "ovmstrio.cli", "serve", *sys.argv[1:]])
"""


def _infer(server: OvmsProcess, model: str) -> httpx.Response:
    return httpx.post(f"{server.rest}/v2/models/{model}/infer", json=ROW, timeout=WAIT_SECONDS)


@contextmanager
def _calling(server: OvmsProcess) -> Iterator[list[str]]:
    """Call a model over new connections in the background; yields the problems, and waits for calls at both ends."""
    problems: list[str] = []
    answered = 0
    is_over = threading.Event()

    def call() -> None:
        nonlocal answered
        while not is_over.is_set():
            try:
                answer = _infer(server, "dummy")
            except httpx.TransportError as error:
                problems.append(repr(error))
                continue
            if answer.status_code != 200 or answer.json()["outputs"][0]["data"] != [2.0] * 10:
                problems.append(answer.text)
            answered += 1

    threads = [threading.Thread(target=call) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        until(lambda: answered >= 4)
        yield problems
        goal = answered + 4
        until(lambda: answered >= goal)
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


def _restarts(server: OvmsProcess) -> int:
    return server.printed_so_far().count(" serving ")


def test_sighup_restarts_a_server_of_one_process_and_refuses_no_connection(tmp_path: Path) -> None:
    ir.save(ir.dummy(), tmp_path, "dummy")
    dummy = {"name": "dummy", "base_path": "dummy"}
    config = write_config(tmp_path, dummy)
    options = ("--config_path", str(config), "--file_system_poll_wait_seconds", "0")
    with serving(*options, log=tmp_path / "log") as server:
        with _calling(server) as problems:
            for count, added in enumerate(("first", "second"), 2):
                write_config(tmp_path, dummy, {**dummy, "name": added}, {"name": "typo", "base_path": "dumy"})
                server.process.send_signal(signal.SIGHUP)
                until(lambda count=count: _restarts(server) == count)  # type: ignore[misc]  # the loop's own
                until(lambda added=added: _infer(server, added).status_code == 200)  # type: ignore[misc]  # as above
        assert problems == []
        assert _infer(server, "first").status_code == 404
        # The entry that fails now was not there when the server was started.
        assert server.get("/v2/health/ready").status_code == 200
        assert server.process.poll() is None
        config.write_text("{")
        server.process.send_signal(signal.SIGHUP)
        until(lambda: "rolling restart aborted" in server.printed_so_far())
        assert _infer(server, "second").json()["outputs"][0]["data"] == [2.0] * 10
        assert server.stop()[0] == 0


def test_a_restart_waits_for_running_calls_and_a_stop_takes_it_back(tmp_path: Path) -> None:
    write_project(tmp_path / "waits", WAITING_HANDLER, name="waits")
    config = write_config(tmp_path, handler_config_list=[{"name": "waits", "path": "waits"}])
    begun, go = tmp_path / "begun", tmp_path / "go"
    answers: list[httpx.Response] = []
    with serving("--config_path", str(config), log=tmp_path / "log") as server:

        def ask() -> None:
            body = {"begun": str(begun), "go": str(go)}
            answers.append(httpx.post(f"{server.rest}/waits", json=body, timeout=WAIT_SECONDS))

        for has_stop in (False, True):
            begun.unlink(missing_ok=True)
            go.unlink(missing_ok=True)
            asking = threading.Thread(target=ask)
            asking.start()
            until(begun.exists)
            started = server.printed_so_far().count("rolling restart started")
            server.process.send_signal(signal.SIGHUP)
            until(lambda started=started: server.printed_so_far().count("rolling restart started") > started)  # type: ignore[misc]  # the loop's own
            if has_stop:
                server.process.send_signal(signal.SIGTERM)
                until(lambda: "signal=SIGTERM" in server.printed_so_far())
            go.touch()
            asking.join()
            assert answers.pop().json() == {"pid": server.process.pid}
            if has_stop:
                assert server.process.wait(WAIT_SECONDS) == 0
            else:
                until(lambda: _restarts(server) == 2)
                server.wait_ready()
    assert _restarts(server) == 2


def test_a_closed_terminal_drains_the_server(tmp_path: Path) -> None:
    config, (port,) = write_config(tmp_path), free_ports(1)
    options = ["--config_path", str(config), "--port", "0", "--rest_port", str(port), "--allow_empty"]
    terminal, other_end = os.openpty()
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", _WITH_TERMINAL, *options],
            stdin=other_end,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        os.close(other_end)
        try:
            until(lambda: b" serving " in (tmp_path / "log").read_bytes())
            os.close(terminal)
            assert process.wait(WAIT_SECONDS) == 0
        finally:
            process.kill()
            process.wait()
    assert b"rolling restart" not in (tmp_path / "log").read_bytes()


def test_a_unix_socket_survives_a_restart_and_is_removed_at_the_end(tmp_path: Path) -> None:
    ir.save(ir.dummy(), tmp_path, "dummy")
    config, path = write_config(tmp_path, {"name": "dummy", "base_path": "dummy"}), tmp_path / "rest"
    address = ("--rest_bind_address", f"unix:{path},127.0.0.1")
    with serving("--config_path", str(config), *address, log=tmp_path / "log") as server:
        server.process.send_signal(signal.SIGHUP)
        until(lambda: _restarts(server) == 2)
        transport = httpx.HTTPTransport(uds=str(path))
        with httpx.Client(transport=transport, base_url="http://h", timeout=WAIT_SECONDS) as client:
            until(lambda: client.get("/v2/health/ready").is_success)
        assert path.exists()
        assert server.stop()[0] == 0
    assert not path.exists()


def test_a_project_is_imported_again(tmp_path: Path) -> None:
    project = write_project(tmp_path / "project", PID_HANDLER, name="p")
    with serving_project(project) as server:
        assert server.ask().json() == {"pid": server.process.pid}
        code = PID_HANDLER.replace('"pid"', '"new"')
        write_project(tmp_path / "project", code, name="p")
        server.process.send_signal(signal.SIGHUP)
        server.wait_logged(lambda line: line["message"] == "serving", 2)
        until(lambda: server.ask().json() == {"new": server.process.pid})


def test_a_script_of_a_pipeline_runs_again(tmp_path: Path) -> None:
    (tmp_path / "web_service.py").write_text(OPS)
    (tmp_path / "config.yml").write_text("rpc_port: 0\nhttp_port: 0\n")
    with running_service(tmp_path, log=tmp_path / "log") as server:

        def predict() -> list[str]:
            body = {"key": ["x"], "value": ["1"]}
            answer = httpx.post(f"{server.rest}/ops/prediction", json=body, timeout=WAIT_SECONDS)
            value: list[str] = answer.json()["value"]
            return value

        assert predict() == ["first 1"]
        (tmp_path / "web_service.py").write_text(OPS.replace("first", "second"))
        server.process.send_signal(signal.SIGHUP)
        until(lambda: _restarts(server) == 2)
        assert predict() == ["second 1"]
        assert server.stop()[0] == 0


@pytest.mark.parametrize("workers", ["1", "2"])
def test_log_files_are_written_again_after_a_rotation(tmp_path: Path, workers: str) -> None:
    log, rotated = tmp_path / "server.log", tmp_path / "server.log.1"
    options = ("--allow_empty", "--workers", workers, "--log_path", str(log), "--log_format", "json")
    config = write_config(tmp_path)
    with serving("--config_path", str(config), *options, log=tmp_path / "printed") as server:
        log.rename(rotated)
        server.process.send_signal(signal.SIGUSR1)
        until(log.exists)
        until(lambda: '"log files reopened"' in log.read_text())
        # Without a signal, the next line finds that the file was renamed; of each worker, too.
        log.rename(tmp_path / "server.log.2")
        config.write_text("{")
        until(lambda: log.exists() and "config reload failed" in log.read_text())
        assert "reopened" not in rotated.read_text()
        assert all(json.loads(line) for line in log.read_text().splitlines())
        assert server.stop()[0] == 0
