from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from ovmstrio.workers.shared_state import SharedCounters, SharedState, WorkerWakeups
from tests.support.processes import ProjectProcess, serving_project
from tests.support.projects import write_project
from tests.support.waits import until

_CODE = """
import ctypes, os, signal, time
from pathlib import Path

WAYS = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "exit": lambda: os._exit(7),
    "segfault": lambda: ctypes.string_at(0),
}

class Handler:
    async def handle_get(self):
        return {"pid": os.getpid()}

    def handle_post(self, payload):
        way = payload.get("die")
        if way:
            Path(payload["begun"]).touch()
            while not Path(payload["go"]).exists():
                time.sleep(0.005)
            WAYS[way]()
        return {"twice": payload["text"] * 2, "pid": os.getpid()}

    def handle_put(self, payload):
        yield "first "
        while not Path(payload["go"]).exists():
            time.sleep(0.005)
        WAYS["kill"]()
        yield "last"
"""


class _Client:
    """A connection that stays open."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), timeout=60)
        self.file = self.socket.makefile("rb")
        self.pid = int(self.call("GET")[1]["pid"])

    def send(self, verb: str, payload: Any = None) -> None:
        body = b"" if payload is None else json.dumps(payload).encode()
        lines = [f"{verb} / HTTP/1.1", "host: here", "content-type: application/json", f"content-length: {len(body)}"]
        self.socket.sendall("\r\n".join([*lines, "", ""]).encode() + body)

    def receive(self) -> tuple[int, Any]:
        status = self.file.readline()
        headers = {}
        while line := self.file.readline().strip():
            name, _, value = line.decode().partition(":")
            headers[name.lower()] = value.strip()
        return int(status.split()[1]), json.loads(self.file.read(int(headers["content-length"])))

    def call(self, verb: str, payload: Any = None) -> tuple[int, Any]:
        self.send(verb, payload)
        return self.receive()

    def rest(self) -> bytes:
        """Return what comes until the connection ends; a reset is an end, and a timeout is an error."""
        with suppress(ConnectionResetError):
            return self.file.read()
        return b""

    def close(self) -> None:
        self.file.close()
        self.socket.close()


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProjectProcess]:
    """Serve a project whose processes the tests of this module kill; another process replaces each."""
    file = write_project(tmp_path_factory.mktemp("dying") / "project", _CODE, processes=2, threads_per_process=1)
    with serving_project(file) as server:
        yield server


@contextmanager
def _clients(server: ProjectProcess, count: int) -> Iterator[tuple[list[_Client], list[_Client]]]:
    """Connect ``count`` clients to each of the two processes."""
    until(lambda: server.ask(path="/v2/health/ready").status_code == 200)
    with ExitStack() as stack:
        by_pid: dict[int, list[_Client]] = {}

        def has_all() -> bool:
            client = _Client(server.address)
            stack.callback(client.close)
            by_pid.setdefault(client.pid, []).append(client)
            return sum(len(each) >= count for each in by_pid.values()) == 2

        until(has_all)
        mine, others = (each[:count] for each in by_pid.values() if len(each) >= count)
        yield mine, others


@pytest.mark.parametrize(("way", "cause"), [("kill", "SIGKILL"), ("exit", "exit code 7"), ("segfault", "SIGSEGV")])
def test_connections_of_a_dead_process_end(project: ProjectProcess, tmp_path: Path, way: str, cause: str) -> None:
    begun, go = tmp_path / "begun", tmp_path / "go"
    with _clients(project, 3) as (mine, others):
        killer, waiting, idle = mine
        killer.send("POST", {"die": way, "begun": str(begun), "go": str(go)})
        until(begun.exists)
        waiting.send("POST", {"text": "waits "})
        go.touch()
        assert [client.rest() for client in mine] == [b"", b"", b""]
        line = _wait_end(project, idle.pid)
        assert line["cause"] == cause
        # The process may have ended before it read the second call.
        assert line["requests_lost"] in {1, 2}
        assert line["connections_lost"] >= len(mine)
        assert [client.call("GET") for client in others] == [(200, {"pid": others[0].pid})] * 3
        assert project.ask("POST", json={"text": "next "}).json()["twice"] == "next next "


def _wait_end(project: ProjectProcess, pid: int) -> dict[str, Any]:
    """Wait until the parent has noticed the end of a process, and return its line of the log."""
    return project.wait_logged(lambda line: (line["message"], line.get("pid")) == ("worker exited", pid))


def test_a_stream_ends_with_its_process(project: ProjectProcess, tmp_path: Path) -> None:
    go = tmp_path / "go"
    with _clients(project, 1) as ((streaming,), _):
        streaming.send("PUT", {"go": str(go)})
        while streaming.file.readline().strip() != b"first":
            pass
        go.touch()
        assert b"last" not in streaming.rest()
        _wait_end(project, streaming.pid)


def test_a_starting_process_ends_with_its_killed_parent(tmp_path: Path) -> None:
    file = write_project(tmp_path / "project", _CODE, processes=2, threads_per_process=1)
    with serving_project(file) as server:
        known = psutil.Process(server.process.pid).children()
        known[0].kill()
        (started,) = until(lambda: set(psutil.Process(server.process.pid).children()) - {*known})
        until(lambda: any("ovmstrio-state" in each for each in _open_files(started)))
        server.process.kill()
        assert server.wait_end() == -signal.SIGKILL


def _open_files(process: psutil.Process) -> list[str]:
    files = []
    for each in Path(f"/proc/{process.pid}/fd").iterdir():
        with suppress(OSError):
            files.append(str(each.readlink()))
    return files


def test_the_parent_keeps_no_connections_open(project: ProjectProcess) -> None:
    parent = Path(f"/proc/{project.process.pid}/fd")
    with _clients(project, 1), ExitStack() as stack:
        before = len(list(parent.iterdir()))
        for _ in range(20):
            stack.callback(_Client(project.address).close)
        until(lambda: len(list(parent.iterdir())) <= before)
        client = _Client(project.address)
        client.socket.sendall(b"GET / HTTP/1.1\r\nhost: here\r\nconnection: close\r\n\r\n")
        assert b"pid" in client.file.read()
        client.close()


# A limit that processes share


CHILD = """
import sys
from ovmstrio.core.errors import TooManyRequests
from ovmstrio.workers.shared_state import ServiceLimit, SharedCounters, SharedState, WorkerWakeups

board = SharedState(int(sys.argv[1]), 3)
row = int(sys.argv[2])
counters = SharedCounters(board, row, WorkerWakeups("secret", row))
limit, counted = ServiceLimit(counters, "p", 2), counters.row("project p")
sys.stdin.readline()
most = taken = 0
for _ in range(20_000):
    try:
        limit.acquire()
    except TooManyRequests:
        continue
    taken += 1
    with board.locked():
        most = max(most, counted.in_flight + counted.elsewhere().in_flight)
    limit.release()
print(most, taken)
"""


def test_a_shared_limit_holds_while_processes_race() -> None:
    board = SharedState.create(3)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", CHILD, str(board.descriptor), str(row)],
            pass_fds=[board.descriptor],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for row in range(3)
    ]
    try:
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        reported = [process.communicate(timeout=60)[0].split() for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert all(int(most) <= 2 for most, _ in reported)
    assert sum(int(taken) for _, taken in reported) > 0
    left = SharedCounters(board, 0, WorkerWakeups("secret", 0)).row("project p")
    assert left.in_flight + left.elsewhere().in_flight == 0
    board.close()
