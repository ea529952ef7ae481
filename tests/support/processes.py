"""Commands of ``ovms`` in subprocesses on free ports, which end with their test."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from threading import Timer
from typing import Any, TypeVar

import httpx
import psutil

from tests.support.ports import free_ports
from tests.support.waits import WAIT_SECONDS, until

SECONDS_TO_END = 60
"""Bound in seconds on the end of child processes after their server, on a busy machine."""


def end_of_output(process: subprocess.Popen[str], seconds: float = SECONDS_TO_END) -> str:
    """Wait for the end of a process and of its output; raise AssertionError if something keeps the output open."""
    try:
        return process.communicate(timeout=seconds)[0] or ""
    except subprocess.TimeoutExpired:
        left = kill_processes(process)
        printed = process.communicate(timeout=seconds)[0] or ""
    raise AssertionError(f"still running {seconds} s after the end of a process: {left}\n{printed}")


@contextlib.contextmanager
def killed_if_late(process: subprocess.Popen[str], seconds: float) -> Iterator[None]:
    """Kill a process, and everything else that can write to its output, if the block takes longer; so reads end."""
    late = Timer(seconds, kill_processes, (process,))
    late.start()
    try:
        yield
    finally:
        late.cancel()
        late.join()


def kill_processes(process: subprocess.Popen[str]) -> list[str]:
    own = [psutil.Process(process.pid)] if process.poll() is None else []
    return [killed(each) for each in {*own, *_writers(process)}]


def killed(process: psutil.Process) -> str:
    try:
        command = f"{process.pid} {shlex.join(process.cmdline())}"
        process.kill()
    except psutil.NoSuchProcess:
        return "a process that has just ended"
    return command


def _writers(process: subprocess.Popen[str]) -> list[psutil.Process]:
    if process.stdout is None or process.stdout.closed:
        return []
    pipe = Path(f"/proc/self/fd/{process.stdout.fileno()}").readlink()
    return [each for each in psutil.process_iter() if each.pid != os.getpid() and _has_open(each.pid, pipe)]


def _has_open(pid: int, file: Path) -> bool:
    with contextlib.suppress(OSError):
        for each in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if each.readlink() == file:
                    return True
    return False


T = TypeVar("T")
SHARED_CACHE = Path(tempfile.gettempdir()) / f"ovmstrio-tests-{os.getuid()}"
"""Folder of trial verdicts that runs of the tests share, so that known models are not tried again."""
START_TIMEOUT_SECONDS = 180
STOP_TIMEOUT_SECONDS = 120
PORT_TAKEN = "Address already in use"
"""Part of the message of a server whose port another process has taken."""


def environment() -> dict[str, str]:
    return {"XDG_CACHE_HOME": str(SHARED_CACHE), **os.environ}


def run_ovms(*arguments: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ovmstrio.cli", *arguments],
        check=False,
        capture_output=True,
        env=environment(),
        text=True,
        timeout=timeout,
    )


def is_at_work(pid: int) -> bool:
    """Return whether a process runs; one that has ended and was not waited for does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def is_resource_tracker(process: psutil.Process) -> bool:
    try:
        return any("multiprocessing.resource_tracker" in part for part in process.cmdline())
    except psutil.Error:
        return False


class OvmsProcess:
    def __init__(self, process: subprocess.Popen[str], grpc: int, rest: int, log: Path | None = None) -> None:
        self.process = process
        self._log = log
        self.grpc = f"127.0.0.1:{grpc}"
        self.rest = f"http://127.0.0.1:{rest}"

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.rest + path, timeout=WAIT_SECONDS)

    def answers(self, path: str = "/v2/health/live") -> bool:
        try:
            return self.get(path).is_success
        except httpx.TransportError:
            return False

    def wait_ready(self) -> None:
        self.wait_path("/v2/health/ready")

    def wait_live(self) -> None:
        self.wait_path("/v2/health/live")

    def wait_path(self, path: str) -> None:
        def answers() -> bool:
            if self.process.poll() is not None:
                raise AssertionError(f"the server ended with {self.process.returncode}:\n{self._printed()}")
            return self.answers(path)

        until(answers, seconds=START_TIMEOUT_SECONDS, why=lambda: f"no success from {path}")

    def descendants(self, part: str) -> list[psutil.Process]:
        found = []
        for each in psutil.Process(self.process.pid).children(recursive=True):
            # A process may end while it is looked at.
            with contextlib.suppress(psutil.NoSuchProcess):
                if part in " ".join(each.cmdline()):
                    found.append(each)
        return found

    def descriptors(self, part: str) -> list[Path]:
        """Return the open files of the server process whose targets contain ``part``."""
        found = []
        for each in Path(f"/proc/{self.process.pid}/fd").iterdir():
            # A file may be closed while it is looked at.
            with contextlib.suppress(FileNotFoundError):
                if part in str(each.readlink()):
                    found.append(each)
        return found

    def stop(self, number: signal.Signals = signal.SIGTERM) -> tuple[int, str]:
        self.process.send_signal(number)
        output = self._printed()
        return self.process.returncode, output

    def _printed(self) -> str:
        output, _ = self.process.communicate(timeout=STOP_TIMEOUT_SECONDS)
        return output if self._log is None else self.printed_so_far()

    def printed_so_far(self) -> str:
        return "" if self._log is None else self._log.read_text(errors="replace")


@contextlib.contextmanager
def running(
    *arguments: str, grpc: int, rest: int, ready: bool = True, folder: Path | None = None, log: Path | None = None
) -> Iterator[OvmsProcess]:
    """Run an ``ovms`` command that serves at these ports until the block ends, in a folder or the current one.

    Output is appended to ``log`` if given. A server that prints much needs one, because its pipe is not read otherwise.
    """
    command = [sys.executable, "-m", "ovmstrio.cli", *arguments]
    with contextlib.ExitStack() as stack:
        output = subprocess.PIPE if log is None else stack.enter_context(log.open("a"))
        process = subprocess.Popen(
            command, cwd=folder, env=environment(), stdout=output, stderr=subprocess.STDOUT, text=True
        )
        try:
            server = OvmsProcess(process, grpc, rest, log)
            if ready:
                server.wait_ready()
            yield server
        finally:
            if process.poll() is None:
                process.kill()
            end_of_output(process)


def _on_free_ports(start: Callable[[], T]) -> T:
    """Start a server, on other ports if another process takes a port before the server binds it."""
    for _ in range(2):
        try:
            return start()
        except AssertionError as error:
            if PORT_TAKEN not in " ".join(str(error).split()):
                raise
    return start()


@contextlib.contextmanager
def serving(*options: str, ready: bool = True, log: Path | None = None) -> Iterator[OvmsProcess]:
    """Run ``ovms serve`` on free loopback ports as :func:`running` does; models are tried first only by an option."""
    options = options if "--crash_probe" in options else (*options, "--crash_probe", "off")
    with contextlib.ExitStack() as stack:

        def start() -> OvmsProcess:
            grpc, rest = free_ports(2)
            arguments = ["serve", "--port", str(grpc), "--rest_port", str(rest)]
            arguments += ["--grpc_bind_address", "127.0.0.1", "--rest_bind_address", "127.0.0.1", *options]
            return stack.enter_context(running(*arguments, grpc=grpc, rest=rest, ready=ready, log=log))

        yield _on_free_ports(start)


class ProjectProcess:
    def __init__(self, process: subprocess.Popen[str], port: int, readiness_file: Path) -> None:
        self.process = process
        self.address = f"127.0.0.1:{port}"
        self.readiness_file = readiness_file
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)

    def ask(self, verb: str = "GET", path: str = "/", **options: Any) -> httpx.Response:
        return httpx.request(verb, f"http://{self.address}{path}", timeout=WAIT_SECONDS, trust_env=False, **options)

    def log(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in list(self.lines) if line.startswith("{")]

    def wait_logged(self, wanted: Callable[[dict[str, Any]], bool], count: int = 1) -> dict[str, Any]:
        def find() -> list[dict[str, Any]]:
            has_ended = self.process.poll() is not None
            found = [line for line in self.log() if wanted(line)][count - 1 :]
            assert found or not has_ended, "".join(self.lines)
            return found

        return until(find, seconds=START_TIMEOUT_SECONDS, why=lambda: "".join(self.lines))[0]

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
                left = kill_processes(self.process)
                self._reader.join()
            if self.process.stdout is not None:
                self.process.stdout.close()
        assert not left, f"still running behind a server that has ended: {left}\n{''.join(self.lines)}"
        return code

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.wait_end()


@contextlib.contextmanager
def serving_project(
    project: Path, *further: str, options: Sequence[str] = ("--rest_bind_address", "127.0.0.1"), ready: bool = True
) -> Iterator[ProjectProcess]:
    """Run ``ovms serve PROJECT`` with addresses as ``options``; its readiness file is in ``../workspace``."""
    with contextlib.ExitStack() as stack:

        def start() -> ProjectProcess:
            server = stack.enter_context(_started(project, *options, *further))
            if ready:
                server.wait_serving()
            return server

        yield _on_free_ports(start)


@contextlib.contextmanager
def _started(project: Path, *options: str) -> Iterator[ProjectProcess]:
    (port,) = free_ports(1)
    file = project.parent.parent / "workspace" / "ready.txt"
    command = [sys.executable, "-m", "ovmstrio.cli", "serve", str(project), "--port", str(port)]
    command += ["--readiness_file", str(file), *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    server = ProjectProcess(process, port, file)
    try:
        yield server
    finally:
        if process.poll() is None:
            process.kill()
        server.wait_end()


@contextlib.contextmanager
def running_service(
    folder: Path, *arguments: str, config: str = "config.yml", log: Path | None = None
) -> Iterator[OvmsProcess]:
    """Run ``web_service.py`` of a folder until the block ends; gives the ports in its configuration others."""
    grpc, http = free_ports(2)
    file = folder / config
    text = re.sub(r"(?m)^rpc_port:.*$", f"rpc_port: {grpc}", file.read_text(encoding="utf-8"))
    file.write_text(re.sub(r"(?m)^http_port:.*$", f"http_port: {http}", text), encoding="utf-8")
    with running("run", "web_service.py", *arguments, grpc=grpc, rest=http, folder=folder, log=log) as server:
        yield server
