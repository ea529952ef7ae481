from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import tritonclient.grpc as triton

from tests.support import ir
from tests.support.processes import environment
from tests.support.projects import write_project
from tests.support.system_servers import write_config

_HANDLER = """
class Handler:
    def __init__(self, config):
        pass

    def handle_post(self, payload):
        return payload
"""
_LAUNCHER = """
import fcntl, os, sys
given = [fcntl.fcntl(int(each), fcntl.F_DUPFD, 100) for each in sys.argv[1].split(",")]
for number, each in enumerate(given):
    os.dup2(each, 3 + number)
    os.close(each)
os.environ |= {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": str(len(given)), "LISTEN_FDNAMES": "grpc:rest"}
os.execv(sys.executable, [sys.executable, "-m", "ovmstrio.cli", *sys.argv[2:]])
"""


class _Systemd:
    """The part of systemd for one service: listening sockets, and the socket for notifications."""

    def __init__(self, folder: Path) -> None:
        self.listening = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
        self.grpc, self.rest = (f"127.0.0.1:{each.getsockname()[1]}" for each in self.listening)
        self._notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._path = str(folder / "notify")
        self._notify.bind(self._path)
        self._notify.settimeout(60)

    def wait_for(self, line: str) -> list[str]:
        lines: list[str] = []
        while line not in lines:
            lines += self.hear()
        return lines

    def hear(self) -> list[str]:
        return self._notify.recv(65_536).decode().split("\n")

    def close(self) -> None:
        for each in (*self.listening, self._notify):
            each.close()

    @contextmanager
    def start(self, *options: str, watchdog: str = "") -> Iterator[subprocess.Popen[bytes]]:
        descriptors = [each.fileno() for each in self.listening]
        arguments = [",".join(map(str, descriptors)), "serve", "--crash_probe", "off", *options]
        process = subprocess.Popen(
            [sys.executable, "-c", _LAUNCHER, *arguments],
            env={**environment(), "NOTIFY_SOCKET": self._path, "WATCHDOG_USEC": watchdog},
            pass_fds=descriptors,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[_Systemd]:
    found = _Systemd(tmp_path)
    yield found
    found.close()


def test_a_server_uses_inherited_sockets_and_notifies(tmp_path: Path, systemd: _Systemd) -> None:
    ir.save(ir.dummy(), tmp_path, "dummy")
    config = write_config(tmp_path, {"name": "dummy", "base_path": "dummy"})
    with systemd.start("--config_path", str(config), watchdog="400000") as process:
        systemd.wait_for("READY=1")
        assert httpx.get(f"http://{systemd.rest}/v2/models/dummy/ready", timeout=30).is_success
        with triton.InferenceServerClient(systemd.grpc) as client:
            assert client.is_model_ready("dummy", client_timeout=30)
        systemd.wait_for("WATCHDOG=1")
        systemd.wait_for("WATCHDOG=1")
        httpx.post(f"http://{systemd.rest}/v1/config/reload", timeout=30)
        assert "RELOADING=1" in systemd.wait_for("READY=1")
        config.write_text(config.read_text() + " ")
        assert "RELOADING=1" in systemd.wait_for("READY=1")
        process.send_signal(signal.SIGHUP)
        lines = systemd.wait_for("READY=1")
        assert any(line.startswith("MONOTONIC_USEC=") for line in lines)
        assert lines.index("RELOADING=1") < lines.index("READY=1")
        assert "STOPPING=1" not in lines
        assert httpx.get(f"http://{systemd.rest}/v2/models/dummy/ready", timeout=30).is_success
        process.send_signal(signal.SIGTERM)
        systemd.wait_for("STOPPING=1")
        assert process.wait(60) == 0
    address = systemd.rest.split(":")
    with socket.create_connection((address[0], int(address[1])), timeout=60) as waiting:
        waiting.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        with systemd.start("--config_path", str(config)):
            assert waiting.recv(100).startswith(b"HTTP/1.1 200")


def test_the_parent_of_several_processes_notifies(tmp_path: Path, systemd: _Systemd) -> None:
    project = write_project(tmp_path, _HANDLER, processes=2)
    with systemd.start(str(project), watchdog="200000") as process:
        systemd.wait_for("READY=1")
        answer = httpx.post(f"http://{systemd.rest}/", json={"a": 1}, timeout=30)
        assert answer.json() == {"a": 1}
        systemd.wait_for("WATCHDOG=1")
        process.send_signal(signal.SIGHUP)
        assert "RELOADING=1" in systemd.wait_for("READY=1")
        process.send_signal(signal.SIGTERM)
        systemd.wait_for("STOPPING=1")
        assert process.wait(60) == 0
