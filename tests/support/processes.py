"""The real ``ovms`` command in a subprocess, on free ports, ended with the test."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil

from tests.support.ports import free_ports
from tests.support.waits import WAIT_SECONDS, until
from tests.support.whole_ends import end_of_output

SHARED_CACHE = Path(tempfile.gettempdir()) / f"ovmstrio-tests-{os.getuid()}"
"""What is remembered of one run of the tests serves the next one, so that the same models are not tried again."""
START_TIMEOUT_SECONDS = 180
STOP_TIMEOUT_SECONDS = 120
PORT_TAKEN = "Address already in use"
"""Part of the message of a server whose port another process has taken."""


def environment() -> dict[str, str]:
    """Give the variables of a command: what it remembers stays out of the user's own folder."""
    return {"XDG_CACHE_HOME": str(SHARED_CACHE), **os.environ}


def run_ovms(*arguments: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ovms_cli", *arguments],
        check=False,
        capture_output=True,
        env=environment(),
        text=True,
        timeout=timeout,
    )


def is_resource_tracker(process: psutil.Process) -> bool:
    """Return whether a process is the one of Python's shared memory, which lives as long as its parent."""
    try:
        return any("multiprocessing.resource_tracker" in part for part in process.cmdline())
    except psutil.Error:
        return False


class OvmsProcess:
    """A running ``ovms`` command that serves."""

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

    What it prints goes to the end of ``log``, where one is given; a server that prints much needs one, for nobody reads
    the pipe that it has otherwise.
    """
    command = [sys.executable, "-m", "ovms_cli", *arguments]
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


@contextlib.contextmanager
def serving(*options: str, ready: bool = True, log: Path | None = None) -> Iterator[OvmsProcess]:
    """Run ``ovms serve`` with options on free loopback ports until the block ends; ``log`` as for :func:`running`.

    Models are not tried first, unless an option says so. If another process takes a port before the server binds it,
    a server that is waited for is started again on other ports.
    """
    options = options if "--trial_load" in options else (*options, "--trial_load", "off")
    with contextlib.ExitStack() as stack:
        for last in (False, False, True):
            grpc, rest = free_ports(2)
            arguments = ["serve", "--port", str(grpc), "--rest_port", str(rest)]
            arguments += ["--grpc_bind_address", "127.0.0.1", "--rest_bind_address", "127.0.0.1", *options]
            try:
                server = stack.enter_context(running(*arguments, grpc=grpc, rest=rest, ready=ready, log=log))
            except AssertionError as error:
                if last or PORT_TAKEN not in " ".join(str(error).split()):
                    raise
            else:
                break
        yield server
