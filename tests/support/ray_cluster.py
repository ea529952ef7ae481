"""A Ray cluster for tests: its process, the command that deploys on it, and the ports of its proxies."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tests.support.ports import free_ports
from tests.support.processes import killed_if_late

_START_SECONDS = 300
_PROGRAM = Path(__file__).parent / "ray_program.py"
_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}


@dataclass
class RayCluster:
    """A cluster that runs."""

    address: str
    http: int
    grpc: int
    process: subprocess.Popen[str]
    commands: IO[str]
    answers: IO[str]

    def tell(self, *words: str) -> str:
        with killed_if_late(self.process, _START_SECONDS):
            self.commands.write(" ".join(words) + "\n")
            self.commands.flush()
            return self.answers.readline().strip()

    def deploy(self, config: Path, *options: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "ovms_cli", "deploy", "ray", str(config), "--address", self.address]
        command += ["--http_port", str(self.http), "--grpc_port", str(self.grpc), "--proxies", "HeadOnly", *options]
        environment = os.environ | _QUIET
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=_START_SECONDS, check=False
        )


@contextmanager
def ray_cluster(nodes: int = 1) -> Iterator[RayCluster]:
    """Run a cluster; every process of it has ended behind the block."""
    # Paths of sockets have few characters.
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")
    process = subprocess.Popen(
        [sys.executable, str(_PROGRAM), str(nodes)],
        env=os.environ | _QUIET | {"RAY_TMPDIR": folder},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        with process.stdin as commands, process.stdout as answers:
            with killed_if_late(process, _START_SECONDS):
                line = answers.readline().split()
            assert line[:1] == ["address"], line
            http, grpc = free_ports(2)
            yield RayCluster(line[1], http, grpc, process, commands, answers)
    finally:
        try:
            process.wait(_START_SECONDS)
        finally:
            _end(process)
            shutil.rmtree(folder, ignore_errors=True)


def _end(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
