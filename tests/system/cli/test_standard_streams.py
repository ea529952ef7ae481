"""A server whose standard streams are closed, full or unread."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.ports import free_ports
from tests.support.processes import OvmsProcess, environment

UNREAD = ">&3 2>&3"
"""Both outputs go to a pipe without a reader."""


def _ovms(redirections: str, *arguments: str) -> subprocess.Popen[str]:
    """Start a command whose standard streams a shell redirects."""
    command = ["sh", "-c", f'exec "$@" {redirections}', "sh", sys.executable, "-m", "ovms_cli", *arguments]
    null = subprocess.DEVNULL
    if redirections != UNREAD:
        return subprocess.Popen(command, env=environment(), stdin=null, stdout=null, stderr=null, text=True)
    reader, writer = os.pipe()
    os.close(reader)
    try:
        return subprocess.Popen(command[4:], env=environment(), stdin=null, stdout=writer, stderr=writer, text=True)
    finally:
        os.close(writer)


@pytest.mark.parametrize(
    "redirections",
    [
        "<&- >&- 2>&-",
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in ("2>&-", ">/dev/full 2>/dev/full", "2>/dev/full", ">&- 2>/dev/full", UNREAD)
        ),
    ],
)
def test_a_server_starts_and_logs_to_its_file_where_nothing_can_be_printed(redirections: str, tmp_path: Path) -> None:
    """Descriptors 0 to 2 are never sockets or files; each line of the log is a JSON object, warnings included."""
    grpc, rest = free_ports(2)
    log, config = tmp_path / "server.log", tmp_path / "config.json"
    config.write_text('{"model_config_list": []}')
    process = _ovms(
        redirections, "serve", "--port", str(grpc), "--rest_port", str(rest), "--config_path", str(config),
        "--allow_empty", "--log_path", str(log), "--log_format", "json", "--grpc_workers", "4",
    )  # fmt: skip
    server = OvmsProcess(process, grpc, rest)
    try:
        server.wait_ready()
        streams = [str(Path(f"/proc/{process.pid}/fd/{number}").readlink()) for number in range(3)]
        assert all(stream.startswith(("/dev/", "pipe:")) for stream in streams)
        assert server.stop()[0] == 0
    finally:
        process.kill()
        process.wait()
    lines = log.read_text().splitlines()
    assert any("grpc_workers" in line for line in lines)
    assert all(isinstance(json.loads(line), dict) for line in lines)
    assert not any("Traceback" in line for line in lines)


@pytest.mark.parametrize("redirections", ["2>&-", ">/dev/full 2>/dev/full"])
def test_a_server_that_cannot_start_logs_the_reason_to_its_file(redirections: str, tmp_path: Path) -> None:
    """The exit code is 1."""
    log, config = tmp_path / "server.log", tmp_path / "missing.json"
    process = _ovms(redirections, "serve", "--config_path", str(config), "--log_path", str(log))
    assert process.wait(60) == 1
    (line,) = log.read_text().splitlines()
    assert "[error" in line
    assert f"{config}: the file cannot be read" in line


def test_a_wrong_command_line_ends_with_its_code_where_nothing_can_be_printed() -> None:
    """Scripts distinguish a wrong option from a failed start."""
    assert _ovms("2>/dev/full", "serve", "--no_such_option", "1").wait(60) == 64


def test_a_log_file_on_a_full_disk_prints_no_traceback(tmp_path: Path) -> None:
    """Lines that cannot be written are dropped."""
    options = ["--config_path", str(tmp_path / "no.json"), "--log_path", "/dev/full"]
    command = [sys.executable, "-m", "ovms_cli", "serve", *options]
    done = subprocess.run(command, check=False, capture_output=True, env=environment(), text=True, timeout=60)
    assert done.returncode == 1
    assert "no.json: the file cannot be read" in done.stderr
    assert "Traceback" not in done.stderr
