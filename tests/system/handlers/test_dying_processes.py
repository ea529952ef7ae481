"""A project of two processes, one of which dies while calls of other clients wait in it."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

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
_CHUNKED = {"transfer-encoding": "chunked"}


class _Client:
    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), timeout=60)
        self.file = self.socket.makefile("rb")
        self.pid = int(self.ask("GET")[1]["pid"])

    def send(self, verb: str, payload: Any = None, **headers: str) -> None:
        body = b"" if payload is None else json.dumps(payload).encode()
        lines = [f"{verb} / HTTP/1.1", "host: here", "content-type: application/json"]
        if headers:
            lines += ["transfer-encoding: chunked"]
            body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
        else:
            lines += [f"content-length: {len(body)}"]
        self.socket.sendall("\r\n".join([*lines, "", ""]).encode() + body)

    def receive(self) -> tuple[int, Any]:
        status = self.file.readline()
        if not status:
            return 0, None
        headers = {}
        while line := self.file.readline().strip():
            name, _, value = line.decode().partition(":")
            headers[name.lower()] = value.strip()
        return int(status.split()[1]), json.loads(self.file.read(int(headers["content-length"])))

    def ask(self, verb: str, payload: Any = None) -> tuple[int, Any]:
        self.send(verb, payload)
        return self.receive()

    def rest(self) -> bytes:
        return self.file.read()

    def close(self) -> None:
        self.file.close()
        self.socket.close()


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProjectProcess]:
    """Serve a project whose processes the tests of this module kill; another process replaces each."""
    folder = tmp_path_factory.mktemp("dying")
    file = write_project(folder / "project", _CODE, processes=2, threads_per_process=1)
    with serving_project(file) as server:
        yield server


@contextmanager
def _clients(server: ProjectProcess, count: int) -> Iterator[tuple[list[_Client], list[_Client]]]:
    """Connect so many clients to one process, and as many to the other one, once both get connections."""
    until(lambda: server.ask(path="/v2/health/ready").status_code == 200)
    with ExitStack() as stack:
        by_pid: dict[int, list[_Client]] = {}

        def have_all() -> bool:
            client = _Client(server.address)
            stack.callback(client.close)
            by_pid.setdefault(client.pid, []).append(client)
            return sum(len(each) >= count for each in by_pid.values()) == 2

        until(have_all)
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
        chunked.send("POST", {"text": "piece "}, **_CHUNKED)
        large.send("POST", {"text": "x" * 100_000})
        # What was sent before has been read when this is answered.
        assert watching.ask("GET")[1]["pid"] == mine[0].pid
        go.touch()
        assert killer.receive() == (500, {"error": f"the process that ran this call ended by {cause}"})
        answers = [killer.receive(), pipelining.receive(), pipelining.receive(), chunked.receive()]
        assert [(status, body["twice"]) for status, body in answers] == [
            (200, text * 2) for text in ("behind ", "one ", "two ", "piece ")
        ]
        assert mine[0].pid not in {body["pid"] for _, body in answers}
        status, body = large.receive()
        if status == 503:
            assert ("send it again" in body["error"], large.rest()) == (True, b"")
        else:
            # Nobody had begun to read it.
            assert (status, body["twice"]) == (200, "x" * 200_000)
        for client in (idle, watching, killer, pipelining):
            assert client.ask("POST", {"text": "more "})[1]["twice"] == "more more "
        pid = mine[0].pid
        line = project.wait_logged(
            lambda line: (line["message"], line.get("pid")) == ("a worker process has ended", pid)
        )
        assert line["cause"] == cause
        # A connection whose requests nobody had read yet goes on without being counted.
        assert line["requests_passed_on"] in {0, 1, 2}
        # The large one may not have come as a whole, or not have been read.
        assert line["requests_lost"] in {1, 2}


def test_a_stream_ends_with_its_process(project: ProjectProcess, tmp_path: Path) -> None:
    """The answer ends without its last part; another process answers the call that waited for the thread."""
    go = tmp_path / "go"
    with _clients(project, 2) as (mine, _):
        streaming, waiting = mine
        streaming.send("PUT", {"go": str(go)})
        while streaming.file.readline().strip() != b"first":
            pass
        waiting.send("POST", {"text": "waits "})
        go.touch()
        assert b"last" not in streaming.rest()
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


def test_a_process_that_still_starts_ends_with_its_parent(tmp_path: Path) -> None:
    """No process keeps the output of the killed server open. The test kills its server, so the server is its own."""
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


def test_the_parent_keeps_no_connections_open(project: ProjectProcess) -> None:
    """A client sees the end of a connection that its process closes, though the parent has accepted it."""
    parent = Path(f"/proc/{project.process.pid}/fd")
    for _ in range(5):
        client = _Client(project.address)
        client.socket.sendall(b"GET / HTTP/1.1\r\nhost: here\r\nconnection: close\r\n\r\n")
        assert b"pid" in client.rest()
        client.close()
    before = len(list(parent.iterdir()))
    for _ in range(50):
        client = _Client(project.address)
        client.close()
    until(lambda: len(list(parent.iterdir())) <= before + 3)
