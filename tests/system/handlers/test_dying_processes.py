"""A project of several processes, one of which dies while others' calls wait in it."""

from __future__ import annotations

import json
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.project_processes import ProjectProcess, serving_project
from tests.support.projects import write_project

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
    """A connection that stays."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=60)
        self._file = self._socket.makefile("rb")
        self.pid = int(self.ask("GET")[1]["pid"])

    def send(self, verb: str, payload: Any = None, **headers: str) -> None:
        """Send a request."""
        body = b"" if payload is None else json.dumps(payload).encode()
        lines = [f"{verb} / HTTP/1.1", "host: here", "content-type: application/json"]
        if headers:
            lines += ["transfer-encoding: chunked"]
            body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
        else:
            lines += [f"content-length: {len(body)}"]
        self._socket.sendall("\r\n".join([*lines, "", ""]).encode() + body)

    def receive(self) -> tuple[int, Any]:
        """Receive an answer; 0 if the connection has ended instead."""
        status = self._file.readline()
        if not status:
            return 0, None
        headers = {}
        while line := self._file.readline().strip():
            name, _, value = line.decode().partition(":")
            headers[name.lower()] = value.strip()
        return int(status.split()[1]), json.loads(self._file.read(int(headers["content-length"])))

    def ask(self, verb: str, payload: Any = None) -> tuple[int, Any]:
        """Send, and receive."""
        self.send(verb, payload)
        return self.receive()

    def rest(self) -> bytes:
        """Receive everything up to the end."""
        return self._file.read()

    def close(self) -> None:
        """Close the connection."""
        self._file.close()
        self._socket.close()


@contextmanager
def _clients(server: ProjectProcess, count: int) -> Iterator[tuple[list[_Client], list[_Client]]]:
    """Give connections to one process, and others to the other one."""
    with ExitStack() as stack:
        made = [_Client(server.address) for _ in range(2 * count)]
        for each in made:
            stack.callback(each.close)
        first = made[0].pid
        mine, others = [each for each in made if each.pid == first], [each for each in made if each.pid != first]
        assert len(mine) == len(others) == count
        yield mine, others


def _project(tmp_path: Path) -> Path:
    return write_project(tmp_path / "project", _CODE, processes=2, threads_per_process=1)


def _wait_for(file: Path) -> None:
    _wait_until(file.exists)


def _wait_until(done: Callable[[], bool]) -> None:
    ends = time.monotonic() + 20
    while not done():
        assert time.monotonic() < ends
        time.sleep(0.005)


@pytest.mark.parametrize(("way", "cause"), [("kill", "SIGKILL"), ("exit", "exit code 7"), ("segfault", "SIGSEGV")])
def test_calls_behind_the_one_that_kills_are_answered(tmp_path: Path, way: str, cause: str) -> None:
    """By another process, with the right values: whether they were read or not, on the same connection or on others.

    The call that killed gets an error at once that says how the process ended, and all connections go on.
    """
    begun, go = tmp_path / "begun", tmp_path / "go"
    with serving_project(_project(tmp_path)) as server, _clients(server, 6) as (mine, _):
        killer, pipelining, chunked, large, watching, idle = mine
        killer.send("POST", {"die": way, "begun": str(begun), "go": str(go)})
        _wait_for(begun)
        killer.send("POST", {"text": "behind "})
        for text in ("one ", "two "):
            pipelining.send("POST", {"text": text})
        chunked.send("POST", {"text": "piece "}, **_CHUNKED)
        large.send("POST", {"text": "x" * 100_000})
        # What was sent before has been read when this is answered.
        assert watching.ask("GET")[1]["pid"] == mine[0].pid
        started = time.monotonic()
        go.touch()
        assert killer.receive() == (500, {"error": f"the process that ran this call ended by {cause}"})
        assert time.monotonic() - started < 10
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
        line = server.wait_logged(lambda line: line["message"] == "a worker process has ended")
        assert line["cause"] == cause
        # A connection whose requests nobody had read yet goes on without being counted.
        assert line["requests_passed_on"] in {0, 1, 2}
        # The large one may not have come as a whole, or not have been read.
        assert line["requests_lost"] in {1, 2}


def test_an_answer_that_had_begun_breaks_off(tmp_path: Path) -> None:
    """The client sees that it is not whole; a call that waited for the thread of the stream is answered elsewhere."""
    go = tmp_path / "go"
    with serving_project(_project(tmp_path)) as server, _clients(server, 2) as (mine, _):
        streaming, waiting = mine
        streaming.send("PUT", {"go": str(go)})
        while streaming._file.readline().strip() != b"first":
            pass
        waiting.send("POST", {"text": "waits "})
        go.touch()
        assert b"last" not in streaming.rest()
        status, body = waiting.receive()
        assert (status, body["twice"]) == (200, "waits waits ")
        assert body["pid"] != mine[0].pid


def test_a_call_may_be_passed_on_twice(tmp_path: Path) -> None:
    """It waits behind another call where it came to, which kills that process, too."""
    begun, go = tmp_path / "begun", tmp_path / "go"
    with serving_project(_project(tmp_path)) as server, _clients(server, 3) as (mine, others):
        for number, client in enumerate((mine[0], others[0])):
            client.send("POST", {"die": "kill", "begun": f"{begun}{number}", "go": f"{go}{number}"})
            _wait_for(Path(f"{begun}{number}"))
        mine[1].send("POST", {"text": "waits "})
        Path(f"{go}0").touch()
        assert mine[0].receive()[0] == 500
        Path(f"{go}1").touch()
        assert others[0].receive()[0] == 500
        status, body = mine[1].receive()
        assert (status, body["twice"]) == (200, "waits waits ")
        assert body["pid"] not in {mine[0].pid, others[0].pid}


def test_a_process_that_is_being_started_ends_with_its_parent(tmp_path: Path) -> None:
    """Though it is told so before it serves: nothing is left behind that has the server's output."""
    with serving_project(_project(tmp_path)) as server:
        victim, other = psutil.Process(server.process.pid).children()
        victim.kill()
        started = _started_beside({victim, other}, server)
        _wait_until(lambda: any("board" in each for each in _open_files(started)))
        server.process.kill()
        assert server.wait_end() == -signal.SIGKILL


def _started_beside(known: set[psutil.Process], server: ProjectProcess) -> psutil.Process:
    """Wait for a process to have started another one."""
    found: list[psutil.Process] = []

    def look() -> bool:
        found[:] = set(psutil.Process(server.process.pid).children()) - known
        return bool(found)

    _wait_until(look)
    return found[0]


def _open_files(process: psutil.Process) -> list[str]:
    files = []
    for each in Path(f"/proc/{process.pid}/fd").iterdir():
        with suppress(OSError):
            files.append(str(each.readlink()))
    return files


def test_connections_end_where_they_did(tmp_path: Path) -> None:
    """A client sees the end at once that its process makes, though the parent has the connection, too."""
    with serving_project(_project(tmp_path)) as server:
        parent = Path(f"/proc/{server.process.pid}/fd")
        for _ in range(5):
            client = _Client(server.address)
            client._socket.sendall(b"GET / HTTP/1.1\r\nhost: here\r\nconnection: close\r\n\r\n")
            assert b"pid" in client.rest()
            client.close()
        before = len(list(parent.iterdir()))
        for _ in range(50):
            client = _Client(server.address)
            client.close()
        assert len(list(parent.iterdir())) <= before + 3
        assert server.stop() == 0
