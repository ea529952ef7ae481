from __future__ import annotations

import concurrent.futures
import json
import shutil
import signal
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import grpc
import httpx
import psutil
import pytest
from google.protobuf.wrappers_pb2 import StringValue

import ovmstrio.samples
from ovmstrio.samples.handler_primes import client as primes
from tests.support.processes import ProjectProcess, serving_project
from tests.support.projects import write_project
from tests.support.system_servers import PROJECT_HANDLER, write_handler_project
from tests.support.waits import WAIT_SECONDS, until

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
    pids: set[int] = set()

    def both_answer() -> bool:
        pids.add(server.ask().json()["pid"])
        return len(pids) == 2

    until(both_answer)
    return pids


# Shared servers


def test_a_handler_finds_its_environment(servers: SystemServers) -> None:
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


def test_every_answer_has_a_line_in_the_json_log(servers: SystemServers) -> None:
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
    port = servers.project("project").address.rpartition(":")[2]
    file = write_handler_project(tmp_path, processes=processes)
    with serving_project(file, "--port", port, ready=False) as second:
        assert second.wait_end() == 1
        (line,) = [line for line in second.log() if line["levelname"] == "ERROR"]
    assert f"127.0.0.1:{port}" in line["reason"]
    assert "--port" in line["reason"]


def test_processes_and_threads_limit_concurrent_calls(servers: SystemServers, tmp_path: Path) -> None:
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
    file = write_handler_project(tmp_path, BROKEN, processes=processes)
    with serving_project(file, ready=False) as server:
        assert server.wait_end() == 1
        assert not server.readiness_file.exists()
        if processes > 1:
            assert any("no luck" in str(line) for line in server.log())
            return
        errors = {line["message"]: line for line in server.log() if line["levelname"] == "ERROR"}
    assert "ValueError: no luck" in errors["handler raised"]["exc_info"]
    assert "handler.py:4: the constructor of the handler failed" in errors["failed to start api"]["reason"]


def test_options_that_do_not_fit_are_a_usage_error(tmp_path: Path) -> None:
    with serving_project(write_handler_project(tmp_path), "--nireq", "4", ready=False) as server:
        assert server.wait_end() == 64
        assert "--nireq: cannot be used with a project" in "".join(server.lines)


# Servers that tests stop, kill or start with other options: each test has its own


@ONE_AND_MORE
def test_readiness_begins_after_the_constructor_and_ends_before_the_listener(tmp_path: Path, processes: int) -> None:
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
def test_cut_calls_are_counted_and_set_the_exit_code(tmp_path: Path, processes: int) -> None:
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
    broken = tmp_path / "broken"
    code = _beginning_with(f"if Path({str(broken)!r}).exists(): os.kill(os.getpid(), 11)")
    with serving_project(write_handler_project(tmp_path, code, processes=2)) as server:
        broken.touch()
        _expect_killed(server)
        line = server.wait_logged(lambda line: line["message"] == "worker exited")
        assert (line["signal"], line["requests_lost"], line["levelname"]) == ("SIGKILL", 1, "ERROR")
        server.wait_logged(lambda line: line["message"] == "worker process restarting", count=3)
        ends = [line for line in server.log() if line["message"] == "worker exited"]
        pauses = [line["seconds"] for line in server.log() if line["message"] == "worker process restarting"]
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
    with serving_project(write_handler_project(tmp_path, processes=2)) as server:
        server.wait_logged(lambda line: line["message"] == "made", count=2)
        processes = [psutil.Process(line["process"]) for line in server.log() if line["message"] == "made"]
        server.process.kill()
        server.wait_end()
        until(lambda: not any(map(_is_alive, processes)))


def _is_alive(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        # A process that has ended stays in the table until its new parent waits for it.
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


# Projects with a gRPC service


PROTO = """
syntax = "proto3";
package talk;
message Text { string value = 1; }
service Talk {
  rpc Say (Text) returns (Text);
  rpc Spell (Text) returns (stream Text);
}
"""
HANDLER = """
import os

class Handler:
    def __init__(self, module_proto_pb2):
        self.pb = module_proto_pb2

    def Say(self, payload):
        return self.pb.Text(value=f"{payload.value} {os.getpid()}")

    def Spell(self, payload):
        for letter in payload.value:
            yield self.pb.Text(value=letter)
"""


def _project(folder: Path, **keys: Any) -> Path:
    file = write_project(folder, HANDLER, protobuf_path="talk.proto", **keys)
    (folder / "talk.proto").write_text(PROTO)
    return file


def _method(channel: Any, kind: str, name: str) -> Any:
    make = getattr(channel, kind)
    coding = {"request_serializer": StringValue.SerializeToString, "response_deserializer": StringValue.FromString}
    return make(f"/talk.Talk/{name}", **coding)


def _say(address: str) -> str:
    # Otherwise all channels of a process share one connection.
    with grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        reply = _method(channel, "unary_unary", "Say")(StringValue(value="I am"), timeout=WAIT_SECONDS)
        return str(reply.value)


@pytest.mark.parametrize(
    ("processes", "isolation", "count"), [(1, "none", 1), (2, "none", 2), (1, "process", 1)], ids=["1", "2", "isolated"]
)
def test_each_connection_belongs_to_one_process(tmp_path: Path, processes: int, isolation: str, count: int) -> None:
    file = _project(tmp_path / "project", processes=processes, threads_per_process=2)
    options = ("--grpc_bind_address", "127.0.0.1", "--python_isolation", isolation)
    with serving_project(file, options=options) as server:
        pids: set[int] = set()

        def all_answer() -> bool:
            pids.add(int(_say(server.address).split()[-1]))
            return len(pids) == count

        until(all_answer)
        assert (server.process.pid in pids) == ((processes, isolation) == (1, "none"))
        with grpc.insecure_channel(server.address) as channel:
            spelled = _method(channel, "unary_stream", "Spell")(StringValue(value="abc"), timeout=WAIT_SECONDS)
            assert [each.value for each in spelled] == ["a", "b", "c"]
        assert server.stop() == 0


def test_primes_are_streamed(tmp_path: Path) -> None:
    project = shutil.copytree(
        Path(ovmstrio.samples.__file__).parent / "handler_primes", tmp_path / "samples" / "primes"
    )
    with serving_project(project, options=("--grpc_bind_address", "127.0.0.1")) as server:
        assert list(primes.primes(server.address, count=5)) == [2, 3, 5, 7, 11]
        endless = primes.primes(server.address, 1000)
        assert list(islice(endless, 3)) == [1009, 1013, 1019]
        endless.close()  # type: ignore[attr-defined]
        assert [primes.check(server.address, number) for number in (91, 97)] == [7, 97]
        with pytest.raises(grpc.RpcError) as refused:
            primes.check(server.address, 1)
        assert refused.value.code() is grpc.StatusCode.OUT_OF_RANGE
        # A stream without an end does not keep the server.
        assert server.stop() == 0
