"""Processes of the benchmarks: start, CPU and memory measurement, stop."""

from __future__ import annotations

import contextlib
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import psutil

from tests.support.ports import free_ports

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = [
    "Server",
    "cpu_of_tree",
    "cpu_seconds",
    "ended",
    "h2load",
    "median_ms",
    "need",
    "ovms",
    "script",
    "service",
    "wait_idle",
]

READY_WITHIN_SECONDS = 180
_IDLE_WITHIN_SECONDS = 30.0
_LOOK_SECONDS = 0.2
_IDLE_PART = 0.1
KSERVE = "inference.GRPCInferenceService"


def need(tool: str, package: str) -> str:
    """Find a load generator, or exit with the name of its Debian package."""
    found = shutil.which(tool)
    if found is None:
        sys.exit(f"{tool} is not installed; Debian's package {package} has it")
    return found


def h2load(
    port: int, method: str, body: Path, *, calls: int, connections: int = 1, streams: int = 1,
    options: Sequence[str] = (), service: str = KSERVE,
) -> float:  # fmt: skip
    """Call a gRPC method a number of times with the same body; return calls per second."""
    command = [need("h2load", "nghttp2-client"), "-n", str(calls), "-c", str(connections), "-m", str(streams)]
    command += [*options, "-d", str(body), "-H", "content-type: application/grpc", "-H", "te: trailers"]
    url = f"http://127.0.0.1:{port}/{service}/{method}"
    out = subprocess.run([*command, url], capture_output=True, text=True, check=True).stdout
    found = re.search(r"([\d.]+) req/s", out)
    if f"{calls} succeeded" not in out or found is None:
        sys.exit(f"not every call succeeded:\n{out}")
    return float(found[1])


def median_ms(port: int, method: str, body: Path, *, calls: int, service: str = KSERVE) -> float:
    """Call a method a number of times in sequence; return the median latency in milliseconds."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "calls"
        h2load(port, method, body, calls=calls, options=["--log-file", str(log)], service=service)
        return statistics.median(int(line.split("\t")[2]) for line in log.read_text().splitlines()) / 1e3


class Server:
    """A server process and its two ports."""

    def __init__(self, process: subprocess.Popen[bytes], grpc: int, rest: int, ready_seconds: float) -> None:
        self.process = psutil.Process(process.pid)
        self.grpc = grpc
        self.rest = rest
        self.ready_seconds = ready_seconds

    @property
    def resident_mb(self) -> float:
        """Return the resident memory in megabytes."""
        return float(self.process.memory_info().rss / 1e6)


def cpu_seconds(process: psutil.Process) -> float:
    """Return the CPU time of a running process."""
    # Its clock; the times in /proc are multiples of 10 ms.
    return time.clock_gettime((~process.pid << 3) | 2)


def cpu_of_tree(process: psutil.Process) -> float:
    """Return the CPU time of a process and its children, including exited ones."""
    used = 0.0
    for each in [process, *process.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = each.cpu_times()
            used += times.user + times.system + times.children_user + times.children_system
    return used


def wait_idle(process: psutil.Process) -> None:
    """Wait until a process and its children are idle, at most half a minute.

    A server that does not notice client disconnects continues to compute for them.
    """
    ends = time.monotonic() + _IDLE_WITHIN_SECONDS
    while time.monotonic() < ends:
        before = cpu_of_tree(process)
        threading.Event().wait(_LOOK_SECONDS)
        if cpu_of_tree(process) - before <= _IDLE_PART * _LOOK_SECONDS:
            return


@contextlib.contextmanager
def ended(process: subprocess.Popen[bytes] | subprocess.Popen[str]) -> Iterator[None]:
    """Stop a process at the end of the block, gracefully if possible."""
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextlib.contextmanager
def ovms(config: Path, *options: str) -> Iterator[Server]:
    """Run ``ovms serve`` on free ports until the block ends; yields once it is ready."""
    grpc, rest = free_ports(2)
    command = [sys.executable, "-m", "ovmstrio.cli", "serve", "--config_path", str(config)]
    command += ["--port", str(grpc), "--rest_port", str(rest), "--log_level", "ERROR", *options]
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    with ended(process):
        _wait_ready(process, rest, started)
        yield Server(process, grpc, rest, time.perf_counter() - started)


def _wait_ready(process: subprocess.Popen[bytes], rest: int, started: float) -> None:
    while time.perf_counter() - started < READY_WITHIN_SECONDS:
        if process.poll() is not None:
            sys.exit("the server ended before it was ready")
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"http://127.0.0.1:{rest}/v2/health/ready").status_code == httpx.codes.OK:
                return
        threading.Event().wait(0.01)
    sys.exit("the server was not ready in time")


@contextlib.contextmanager
def script(
    arguments: Sequence[str], port: int, *, quiet: bool = False, folder: Path | None = None,
    python: str = sys.executable,
) -> Iterator[Server]:  # fmt: skip
    """Run a Python script that listens on ``port`` until the block ends; ``quiet`` discards its errors.

    The script runs in ``folder``, where it may write files, or in the current folder, with this interpreter unless
    another one is given.
    """
    command = [python, *arguments]
    errors = subprocess.DEVNULL if quiet else None
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=errors)
    started = time.perf_counter()
    with ended(process):
        while time.perf_counter() - started < READY_WITHIN_SECONDS:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            threading.Event().wait(0.05)
        yield Server(process, port, port, time.perf_counter() - started)


@contextlib.contextmanager
def service(folder: Path) -> Iterator[int]:
    """Run the ``web_service.py`` of a folder on free ports until the block ends; yield its HTTP port."""
    grpc, rest = free_ports(2)
    file = folder / "config.yml"
    text = re.sub(r"(?m)^rpc_port:.*$", f"rpc_port: {grpc}", file.read_text())
    file.write_text(re.sub(r"(?m)^http_port:.*$", f"http_port: {rest}", text))
    command = [sys.executable, "-m", "ovmstrio.cli", "paddle", "run", "web_service.py"]
    started = time.perf_counter()
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    with ended(process):
        _wait_ready(process, rest, started)
        yield rest
