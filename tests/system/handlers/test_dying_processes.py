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

from ovmstrio.server.workers.board import Board
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

    def send(self, verb: str, payload: Any = None, *, is_chunked: bool = False) -> None:
        body = b"" if payload is None else json.dumps(payload).encode()
        length = "transfer-encoding: chunked" if is_chunked else f"content-length: {len(body)}"
        if is_chunked:
            body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
        lines = [f"{verb} / HTTP/1.1", "host: here", "content-type: application/json", length, "", ""]
        self.socket.sendall("\r\n".join(lines).encode() + body)

    def receive(self) -> tuple[int, Any]:
        status = self.file.readline()
        if not status:
            return 0, None
        headers = {}
        while line := self.file.readline().strip():
            name, _, value = line.decode().partition(":")
            headers[name.lower()] = value.strip()
        return int(status.split()[1]), json.loads(self.file.read(int(headers["content-length"])))

    def call(self, verb: str, payload: Any = None) -> tuple[int, Any]:
        self.send(verb, payload)
        return self.receive()

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
def test_calls_after_the_one_that_kills_are_answered(
    project: ProjectProcess, tmp_path: Path, way: str, cause: str
) -> None:
    """Another process answers waiting calls of the same connection and of others, whether they were read or not.

    The call that kills gets an error that names how the process ended, and all connections go on.
    """
    begun, go = tmp_path / "begun", tmp_path / "go"
    with _clients(project, 6) as (mine, _):
        killer, pipelining, chunked, large, watching, idle = mine
        killer.send("POST", {"die": way, "begun": str(begun), "go": str(go)})
        until(begun.exists)
        killer.send("POST", {"text": "behind "})
        for text in ("one ", "two "):
            pipelining.send("POST", {"text": text})
        chunked.send("POST", {"text": "piece "}, is_chunked=True)
        large.send("POST", {"text": "x" * 100_000})
        # What was sent before has been read when this is answered.
        assert watching.call("GET")[1]["pid"] == mine[0].pid
        go.touch()
        assert killer.receive() == (500, {"error": f"the process that ran this call ended by {cause}"})
        answers = [killer.receive(), pipelining.receive(), pipelining.receive(), chunked.receive()]
        assert [(status, body["twice"]) for status, body in answers] == [
            (200, text * 2) for text in ("behind ", "one ", "two ", "piece ")
        ]
        assert mine[0].pid not in {body["pid"] for _, body in answers}
        status, body = large.receive()
        if status == 503:
            assert ("send it again" in body["error"], large.file.read()) == (True, b"")
        else:
            # No process had begun to read it.
            assert (status, body["twice"]) == (200, "x" * 200_000)
        for client in (idle, watching, killer, pipelining):
            assert client.call("POST", {"text": "more "})[1]["twice"] == "more more "
        pid = mine[0].pid
        line = project.wait_logged(
            lambda line: (line["message"], line.get("pid")) == ("a worker process has ended", pid)
        )
        assert line["cause"] == cause
        # A connection with unread requests continues without being counted.
        assert line["requests_passed_on"] in {0, 1, 2}
        # The large request may be incomplete or unread.
        assert line["requests_lost"] in {1, 2}


def test_a_stream_ends_with_its_process(project: ProjectProcess, tmp_path: Path) -> None:
    go = tmp_path / "go"
    with _clients(project, 2) as (mine, _):
        streaming, waiting = mine
        streaming.send("PUT", {"go": str(go)})
        while streaming.file.readline().strip() != b"first":
            pass
        waiting.send("POST", {"text": "waits "})
        go.touch()
        assert b"last" not in streaming.file.read()
        status, body = waiting.receive()
        assert (status, body["twice"]) == (200, "waits waits ")
        assert body["pid"] != mine[0].pid


def test_a_call_may_be_passed_on_twice(project: ProjectProcess, tmp_path: Path) -> None:
    """The call waits again in the second process, which another call kills, too."""
    begun, go = tmp_path / "begun", tmp_path / "go"
    with _clients(project, 3) as (mine, others):
        for number, client in enumerate((mine[0], others[0])):
            client.send("POST", {"die": "kill", "begun": f"{begun}{number}", "go": f"{go}{number}"})
            until(Path(f"{begun}{number}").exists)
        mine[1].send("POST", {"text": "waits "})
        Path(f"{go}0").touch()
        assert mine[0].receive()[0] == 500
        Path(f"{go}1").touch()
        assert others[0].receive()[0] == 500
        status, body = mine[1].receive()
        assert (status, body["twice"]) == (200, "waits waits ")
        assert body["pid"] not in {mine[0].pid, others[0].pid}


def test_a_starting_process_ends_with_its_killed_parent(tmp_path: Path) -> None:
    file = write_project(tmp_path / "project", _CODE, processes=2, threads_per_process=1)
    with serving_project(file) as server:
        known = psutil.Process(server.process.pid).children()
        known[0].kill()
        (started,) = until(lambda: set(psutil.Process(server.process.pid).children()) - {*known})
        until(lambda: any("board" in each for each in _open_files(started)))
        server.process.kill()
        assert server.wait_end() == -signal.SIGKILL


def _open_files(process: psutil.Process) -> list[str]:
    files = []
    for each in Path(f"/proc/{process.pid}/fd").iterdir():
        with suppress(OSError):
            files.append(str(each.readlink()))
    return files


def test_the_parent_closes_its_copies_of_connections(project: ProjectProcess) -> None:
    parent = Path(f"/proc/{project.process.pid}/fd")
    for _ in range(5):
        client = _Client(project.address)
        client.socket.sendall(b"GET / HTTP/1.1\r\nhost: here\r\nconnection: close\r\n\r\n")
        assert b"pid" in client.file.read()
        client.close()
    before = len(list(parent.iterdir()))
    for _ in range(50):
        client = _Client(project.address)
        client.close()
    until(lambda: len(list(parent.iterdir())) <= before + 3)


# A limit that processes share


CHILD = """
import sys
from ovmstrio.core.errors import TooManyRequests
from ovmstrio.server.workers.board import Board, SharedLimit

board = Board(int(sys.argv[1]), 3)
limit = SharedLimit(board, int(sys.argv[2]), 2)
sys.stdin.readline()
most = taken = 0
for _ in range(20_000):
    try:
        limit.take()
    except TooManyRequests:
        continue
    taken += 1
    with board.locked():
        most = max(most, board.total_in_flight())
    limit.give_back()
print(most, taken)
"""


def test_a_shared_limit_holds_while_processes_race() -> None:
    board = Board.create(3)
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
    assert board.total_in_flight() == 0
    board.close()
