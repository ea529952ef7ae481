"""``ovms serve PROJECT`` as a user runs it: environment, readiness, logs, processes, limits and the end."""

from __future__ import annotations

import concurrent.futures
import json
import os
import signal
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

import httpx
import pytest

from tests.support.project_processes import ProjectProcess, serving_project
from tests.support.system_servers import PROJECT_HANDLER, write_handler_project
from tests.support.waits import until

if TYPE_CHECKING:
    from tests.support.system_servers import SystemServers

ONE_AND_MORE = pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
"""For tests of the same code in projects of one process and of several."""

BROKEN = """
class Handler:
    def __init__(self):
        raise ValueError("no luck")

    def handle_get(self):
        return 1
"""


def _beginning_with(line: str) -> str:
    """Return the code of the handler with another first line of its constructor."""
    return PROJECT_HANDLER.replace("        self.thread =", f"        {line}\n        self.thread =")


def _has_files(folder: Path, count: int) -> bool:
    return folder.is_dir() and len(list(folder.iterdir())) >= count


def _both_pids(server: ProjectProcess) -> set[int]:
    """Return the ids of both processes of a project."""
    pids: set[int] = set()

    def both_answer() -> bool:
        pids.add(server.ask().json()["pid"])
        return len(pids) == 2

    until(both_answer)
    return pids


# Shared servers


def test_a_handler_finds_its_environment(servers: SystemServers) -> None:
    """Variables of ``env`` and ``.env`` are set at its import, its folder is the working one, and modules are found."""
    server = servers.project("project")
    answer = server.ask().json()
    assert answer.pop("pid") == server.process.pid
    assert answer == {
        "seen": {"A": "1", "B": "changed", "C": "see", "CORTEX_PROCESSES": "1"},
        "cwd": str(servers.folder("project") / "files" / "project"),
        "sibling": "sibling",
        "elsewhere": "elsewhere",
        "same_thread": True,
    }


def test_the_log_is_json_with_a_line_for_each_answer(servers: SystemServers) -> None:
    """Every line has the four keys and extra fields; an error is one line with its traceback."""
    server = servers.project("project")
    # Lines of earlier calls come before the line of this one.
    mark = f"/{uuid4().hex}"
    server.ask(path=mark)
    server.wait_logged(lambda line: line.get("path") == mark)
    known = len(server.log())
    assert server.ask(path="/?a=1").status_code == 200
    answer = server.ask("POST", json=1)
    assert (answer.status_code, answer.text) == (500, "internal server error")
    assert server.ask(path="/elsewhere").status_code == 404

    def answered() -> list[tuple[str, str, str]]:
        lines = (line for line in server.log()[known:] if "status_code" in line)
        return [(line["method"], line["path"], line["status_code"]) for line in lines]

    until(lambda: len(answered()) == 3)
    assert answered() == [
        ("GET", "/", "200 OK"),
        ("POST", "/", "500 Internal Server Error"),
        ("GET", "/elsewhere", "404 Not Found"),
    ]
    lines = server.log()
    assert all(list(line)[:4] == ["asctime", "levelname", "message", "process"] for line in lines)
    assert all(line.startswith("{") for line in server.lines)
    made = next(line for line in lines if line["message"] == "made")
    assert made["config"] == {}
    assert made["object"].startswith("<object object")
    (error,) = [line for line in lines[known:] if line["levelname"] == "ERROR"]
    assert "ValueError: a secret" in error["exc_info"]
    access = next(line for line in lines[known:] if line.get("status_code", "").startswith("500"))
    assert error["request_id"] == access["request_id"] == answer.headers["x-request-id"]


@pytest.mark.parametrize("processes", [1, 2])
def test_a_port_in_use_is_named(servers: SystemServers, tmp_path: Path, processes: int) -> None:
    """The error has the address and the option for another one."""
    port = servers.project("project").address.rpartition(":")[2]
    file = write_handler_project(tmp_path, processes=processes)
    with serving_project(file, "--port", port, ready=False) as second:
        assert second.wait_end() == 1
        (line,) = [line for line in second.log() if line["levelname"] == "ERROR"]
    assert f"127.0.0.1:{port}" in line["reason"]
    assert "--port" in line["reason"]


def test_processes_and_threads_are_what_runs_at_once(servers: SystemServers, tmp_path: Path) -> None:
    """Of five requests to two processes with two threads, four begin, and the fifth when one has ended."""
    server = servers.project("project_processes")
    waiting, go = tmp_path / "waiting", tmp_path / "go"
    with concurrent.futures.ThreadPoolExecutor() as pool:
        try:
            calls = [pool.submit(server.ask, path=f"/?wait={waiting}&until={go}") for _ in range(5)]
            until(lambda: _has_files(waiting, 4))
            assert server.ask(path="/info").status_code == 200
            assert len(list(waiting.iterdir())) == 4
        finally:
            go.touch()
        pids = {each.result().json()["pid"] for each in calls}
    assert len(pids) == 2
    assert server.process.pid not in pids
    assert len(list(waiting.iterdir())) == 5


def test_a_log_level_changes_in_every_process(servers: SystemServers) -> None:
    """The other process logs its next call accordingly, with lines of the handler's logger."""
    server = servers.project("project_processes")
    known = len(server.log())

    def has_logged(pid: int, message: str) -> bool:
        return any((line["process"], line["message"]) == (pid, message) for line in server.log()[known:])

    try:
        assert server.ask("POST", "/v2/logging", json={"log_verbose_level": 1}).json()["log_verbose_level"] == 1
        for pid in _both_pids(server):
            for message in ("request", "called"):
                until(partial(has_logged, pid, message))
    finally:
        server.ask("POST", "/v2/logging", json={"log_verbose_level": 0})


# Servers that do not start


@pytest.mark.parametrize("processes", [1, 2])
def test_a_constructor_that_fails_ends_the_server(tmp_path: Path, processes: int) -> None:
    """The exit code is 1, the log has the reason, and the server was never ready."""
    file = write_handler_project(tmp_path, BROKEN, processes=processes)
    with serving_project(file, ready=False) as server:
        assert server.wait_end() == 1
        assert not server.readiness_file.exists()
        if processes > 1:
            assert any("no luck" in str(line) for line in server.log())
            return
        errors = {line["message"]: line for line in server.log() if line["levelname"] == "ERROR"}
    assert "ValueError: no luck" in errors["a handler raised"]["exc_info"]
    assert "handler.py:4: the constructor of the handler failed" in errors["failed to start api"]["reason"]


def test_options_that_do_not_fit_are_a_usage_error(tmp_path: Path) -> None:
    """Options of models are refused for projects with exit code 64."""
    with serving_project(write_handler_project(tmp_path), "--nireq", "4", ready=False) as server:
        assert server.wait_end() == 64
        assert "--nireq: cannot be used with a project" in "".join(server.lines)


# Servers that tests stop, kill or start with other options: each test has its own


@ONE_AND_MORE
def test_readiness_begins_after_the_constructor_and_ends_before_the_listener(tmp_path: Path, processes: int) -> None:
    """The readiness file is removed before the listener closes, and requests in flight are answered."""
    started, go = tmp_path / "started", tmp_path / "go"
    waiting, release = tmp_path / "waiting", tmp_path / "release"
    code = _beginning_with(
        f"Path({str(started)!r}).touch()\n        while not Path({str(go)!r}).exists(): time.sleep(0.01)"
    )
    file = write_handler_project(tmp_path, code, processes=processes)
    with serving_project(file, "--drain_delay", "1", ready=False) as server:
        until(started.exists)
        assert not server.readiness_file.exists()
        go.touch()
        server.wait_serving()
        assert server.readiness_file.exists()
        assert server.ask(path="/v2/health/ready").status_code == 200
        with concurrent.futures.ThreadPoolExecutor() as pool:
            call = pool.submit(server.ask, path=f"/?wait={waiting}&until={release}")
            until(lambda: _has_files(waiting, 1))
            server.process.send_signal(signal.SIGTERM)
            server.wait_file(exists=False)
            # Within the delay the listener is still open, and the health says what the file says.
            assert server.ask(path="/v2/health/ready").status_code == 503
            server.wait_logged(lambda line: line["message"] == "draining")
            release.touch()
            assert call.result().status_code == 200
        assert server.wait_end() == 0


@ONE_AND_MORE
def test_an_end_that_cuts_calls_is_an_exit_code(tmp_path: Path, processes: int) -> None:
    """After ``--drain_seconds`` the exit code is 1; the log counts the cut calls, and is of the requested form."""
    waiting, go, log = tmp_path / "waiting", tmp_path / "go", tmp_path / "server.log"
    file = write_handler_project(tmp_path, processes=processes)
    options = ("--log_level", "DEBUG", "--log_format", "json", "--log_path", str(log), "--debug")
    with (
        serving_project(file, "--drain_seconds", "0.2", *options, ready=False) as server,
        concurrent.futures.ThreadPoolExecutor() as pool,
    ):
        server.wait_file(exists=True)
        assert server.ask().status_code == 200
        # With ``--debug`` callers see the errors of handlers.
        assert "ValueError: a secret" in server.ask("POST", json=1).text
        call = pool.submit(server.ask, path=f"/?wait={waiting}&until={go}")
        until(lambda: _has_files(waiting, 1))
        server.process.send_signal(signal.SIGTERM)
        with pytest.raises(httpx.TransportError):
            call.result()
        go.touch()
        assert server.wait_end() == 1
    lines = list(map(json.loads, log.read_text().splitlines()))
    (cut,) = [line for line in lines if line["event"] == "requests cut"]
    assert (cut["count"], cut["level"]) == (1, "warning")
    assert [line["event"] for line in lines if line["event"] in {"serving", "drained"}] == ["serving"]
    requests = [line for line in lines if line["event"] == "request"]
    assert ("handler", "REST", "debug") in {(each["kind"], each["interface"], each["level"]) for each in requests}


@ONE_AND_MORE
def test_a_server_that_is_not_ready_ends_without_delay(tmp_path: Path, processes: int) -> None:
    """A constructor that never returns does not keep the server, and the log has no errors."""
    started = tmp_path / "started"
    code = _beginning_with(f"Path({str(started)!r}).touch()\n        while True: time.sleep(0.01)")
    with serving_project(write_handler_project(tmp_path, code, processes=processes), ready=False) as server:
        until(started.exists)
        server.process.send_signal(signal.SIGTERM)
        server.wait_end()
        assert [line["levelname"] for line in server.log() if line["levelname"] == "ERROR"] == []
        assert not any(line["message"] == "serving" for line in server.log())


def _expect_killed(server: ProjectProcess) -> None:
    with pytest.raises((httpx.NetworkError, httpx.RemoteProtocolError)):
        server.ask(path="/?die=1")


@pytest.mark.slow
def test_a_process_that_keeps_dying_is_started_at_growing_intervals(tmp_path: Path) -> None:
    """The server is not ready meanwhile, but the other process serves; the readiness file stays.

    The log names the signals. Once the process starts, the server is ready again with both processes.
    """
    broken = tmp_path / "broken"
    code = _beginning_with(f"if Path({str(broken)!r}).exists(): os.kill(os.getpid(), 11)")
    with serving_project(write_handler_project(tmp_path, code, processes=2)) as server:
        broken.touch()
        _expect_killed(server)
        line = server.wait_logged(lambda line: line["message"] == "a worker process has ended")
        assert (line["signal"], line["requests_lost"], line["levelname"]) == ("SIGKILL", 1, "ERROR")
        server.wait_logged(lambda line: line["message"] == "starting another worker process", count=3)
        ends = [line for line in server.log() if line["message"] == "a worker process has ended"]
        pauses = [line["seconds"] for line in server.log() if line["message"] == "starting another worker process"]
        assert [line["signal"] for line in ends[:3]] == ["SIGKILL", "SIGSEGV", "SIGSEGV"]
        assert pauses[:3] == [0.25, 0.5, 1.0]
        assert server.readiness_file.exists()
        assert server.ask(path="/v2/health/ready").status_code == 503
        assert server.ask().status_code == 200
        broken.unlink()
        until(lambda: server.ask(path="/v2/health/ready").status_code == 200)
        assert line["pid"] not in _both_pids(server)
        assert server.stop() == 0


@pytest.mark.slow
def test_a_server_without_living_processes_ends(tmp_path: Path) -> None:
    """Connections that wait for a process end; a change of the project's file meanwhile has no effect."""
    broken = tmp_path / "broken"
    code = _beginning_with(f"assert not Path({str(broken)!r}).exists()")
    file = write_handler_project(tmp_path, code, processes=2)
    with serving_project(file) as server, concurrent.futures.ThreadPoolExecutor() as pool:
        file.write_text(file.read_text().replace("processes: 2", "processes: 3"))
        _expect_killed(server)
        server.wait_logged(lambda line: line["message"] == "made", count=3)
        until(lambda: server.ask(path="/v2/health/ready").status_code == 200)
        broken.touch()
        for _ in range(2):
            _expect_killed(server)
        call = pool.submit(server.ask)
        server.wait_logged(lambda line: line.get("exit_code") == 1, count=2)
        assert server.stop() == 0
        with pytest.raises(httpx.TransportError):
            call.result()


def test_processes_end_with_their_killed_parent(tmp_path: Path) -> None:
    """A parent that is killed cannot stop its processes, which notice that it has ended."""
    with serving_project(write_handler_project(tmp_path, processes=2)) as server:
        server.wait_logged(lambda line: line["message"] == "made", count=2)
        pids = [line["process"] for line in server.log() if line["message"] == "made"]
        server.process.kill()
        server.wait_end()
        until(lambda: not any(_is_alive(pid) for pid in pids))


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        # A process that has ended stays in the table until its new parent looks.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
