"""``ovms serve PROJECT`` in a subprocess, on a free port, ended with the test."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx

from tests.support.ports import free_ports
from tests.support.processes import PORT_TAKEN, START_TIMEOUT_SECONDS, STOP_TIMEOUT_SECONDS
from tests.support.waits import WAIT_SECONDS, until
from tests.support.whole_ends import SECONDS_TO_END, kill_and_tell


class ProjectProcess:
    """A running server of a project; what it prints is collected line by line."""

    def __init__(self, process: subprocess.Popen[str], port: int, readiness_file: Path) -> None:
        self.process = process
        self.address = f"127.0.0.1:{port}"
        self.readiness_file = readiness_file
        self.lines: list[str] = []
        self._printed = threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._printed:
                self.lines.append(line)
                self._printed.notify_all()

    def ask(self, verb: str = "GET", path: str = "/", **options: Any) -> httpx.Response:
        return httpx.request(verb, f"http://{self.address}{path}", timeout=WAIT_SECONDS, trust_env=False, **options)

    def log(self) -> list[dict[str, Any]]:
        with self._printed:
            return [json.loads(line) for line in self.lines if line.startswith("{")]

    def wait_logged(self, wanted: Callable[[dict[str, Any]], bool], count: int = 1) -> dict[str, Any]:
        ends = time.monotonic() + START_TIMEOUT_SECONDS
        with self._printed:
            while True:
                found = [line for line in map(json.loads, filter(_is_json, self.lines)) if wanted(line)]
                if len(found) >= count:
                    return dict(found[count - 1])
                left = ends - time.monotonic()
                if left < 0 or self.process.poll() is not None:
                    raise AssertionError("".join(self.lines))
                self._printed.wait(min(left, 0.2))

    def wait_serving(self) -> None:
        self.wait_logged(lambda line: line["message"] == "serving")

    def wait_file(self, *, exists: bool) -> None:
        until(lambda: self.readiness_file.exists() is exists, why=lambda: "".join(self.lines))

    def wait_end(self) -> int:
        left: list[str] = []
        try:
            code = self.process.wait(STOP_TIMEOUT_SECONDS)
            self._reader.join(SECONDS_TO_END)
        finally:
            if self._reader.is_alive():
                left = kill_and_tell(self.process)
                self._reader.join()
            if self.process.stdout is not None:
                self.process.stdout.close()
        assert not left, f"still running behind a server that has ended: {left}\n{''.join(self.lines)}"
        return code

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.wait_end()


def _is_json(line: str) -> bool:
    return line.startswith("{")


@contextlib.contextmanager
def serving_project(
    project: Path, *further: str, options: Sequence[str] = ("--rest_bind_address", "127.0.0.1"), ready: bool = True
) -> Iterator[ProjectProcess]:
    """Run ``ovms serve PROJECT`` until the block ends; its readiness file lies beside the project's folder.

    If another process takes the port before the server binds it, a server that is waited for is started again on
    another port.

    Args:
        project: the folder or file.
        further: more options.
        options: where to listen.
        ready: whether to wait until the project can be called.
    """
    with contextlib.ExitStack() as stack:
        for last in (False, False, True):
            server = stack.enter_context(_started(project, *options, *further))
            try:
                if ready:
                    server.wait_serving()
            except AssertionError as error:
                if last or PORT_TAKEN not in " ".join(str(error).split()):
                    raise
            else:
                break
        yield server


@contextlib.contextmanager
def _started(project: Path, *options: str) -> Iterator[ProjectProcess]:
    (port,) = free_ports(1)
    file = project.parent.parent / "workspace" / "ready.txt"
    command = [sys.executable, "-m", "ovms_cli", "serve", str(project), "--port", str(port)]
    command += ["--readiness_file", str(file), *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    server = ProjectProcess(process, port, file)
    try:
        yield server
    finally:
        if process.poll() is None:
            process.kill()
        server.wait_end()
