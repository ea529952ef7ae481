from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.support import ir
from tests.support.ports import free_ports
from tests.support.processes import OvmsProcess, running
from tests.support.system_servers import write_config
from tests.support.waits import until

pytestmark = pytest.mark.slow

ATTACK = """
import socket, struct, sys, time
host, port, path = sys.argv[1], int(sys.argv[2]), sys.argv[3]
lines = f"POST {path} HTTP/1.1", "Host: localhost", "X-Ovms-Console: 1", "Content-Length: 0", "", ""
request = "\\r\\n".join(lines).encode()
for first in (0, 1, len(request) - 1, len(request)):
    for pause in (0, 0.05):
        client = socket.create_connection((host, port), timeout=10)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        client.sendall(request[:first])
        time.sleep(pause)
        client.sendall(request[first:] + request)
        client.close()
client = socket.create_connection((host, port), timeout=10)
lines = *lines[:-2], "X-Forwarded-For: 127.0.0.1", "Connection: close", "", ""
client.sendall("\\r\\n".join(lines).encode())
print(client.makefile().read())
"""
PATHS = ("/v1/config/reload", "/v2/repository/models/dummy/unload", "/console/api/reload")


@dataclass(frozen=True)
class _OtherMachine:
    """A network namespace with a link to this one.

    Attributes:
        near: this machine's address on the link.
        far: the other one's.
    """

    name: str
    near: str
    far: str

    def attack(self, port: int, path: str) -> str:
        command = ["ip", "netns", "exec", self.name, sys.executable, "-c", ATTACK, self.near, str(port), path]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


def _ip(*arguments: str) -> bool:
    return subprocess.run(["ip", *arguments], check=False, capture_output=True).returncode == 0


@pytest.fixture
def other_machine() -> Iterator[_OtherMachine]:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    number = os.getpid() % 16_000
    name, net = f"ovms{number}", f"10.231.{number // 64}"
    near, far = f"{net}.{number % 64 * 4 + 1}", f"{net}.{number % 64 * 4 + 2}"
    with ExitStack() as stack:
        if not _ip("netns", "add", name):
            pytest.skip("the system makes no network namespaces")
        stack.callback(_ip, "netns", "delete", name)
        inside = ("-n", name)
        made = (
            _ip("link", "add", f"{name}a", "type", "veth", "peer", "name", f"{name}b"),
            _ip("link", "set", f"{name}b", "netns", name),
            _ip("address", "add", f"{near}/30", "dev", f"{name}a"),
            _ip("link", "set", f"{name}a", "up"),
            _ip(*inside, "address", "add", f"{far}/30", "dev", f"{name}b"),
            _ip(*inside, "link", "set", f"{name}b", "up"),
        )
        if not all(made):
            pytest.skip("the system links no network namespaces")
        yield _OtherMachine(name, near, far)


def _wait_refused(server: OvmsProcess, client: str, at_least: int) -> list[str]:
    """Wait until changes of a client have been refused; return the lines about changes."""

    def lines() -> list[str]:
        return [line for line in server.printed_so_far().splitlines() if "change=" in line]

    def are_refused() -> bool:
        return sum(f"client={client}" in line and "change refused" in line for line in lines()) >= at_least

    until(are_refused, why=server.printed_so_far)
    return lines()


@pytest.mark.parametrize("workers", ["1", "2"])
def test_another_machine_changes_nothing(tmp_path: Path, other_machine: _OtherMachine, workers: str) -> None:
    base = ir.save(ir.dummy(), tmp_path / "models", "dummy")
    config = write_config(tmp_path, {"name": "dummy", "base_path": str(base)})
    port, rest = free_ports(2)
    options = ["--port", str(port), "--rest_port", str(rest), "--rest_bind_address", f"127.0.0.1,{other_machine.near}"]
    options += ["--config_path", str(config), "--workers", workers, "--crash_probe", "off", "--console", "local"]
    with running("serve", *options, grpc=port, rest=rest, log=tmp_path / "log") as server:
        for path in PATHS:
            answer = other_machine.attack(rest, path)
            assert answer.startswith("HTTP/1.1 403"), answer
            assert f"came from {other_machine.far}" in answer
        lines = _wait_refused(server, other_machine.far, len(PATHS))
        assert [line for line in lines if "change refused" not in line and "fault repeated" not in line] == []
        assert [line for line in lines if "client=unix" in line or "client=unknown" in line] == []
        assert httpx.post(f"{server.rest}/v1/config/reload", timeout=20).status_code == 200
