"""A server whose standard streams are closed, full or unread: it starts, or its status and log file say why not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.ports import free_ports
from tests.support.processes import OvmsProcess, environment

START = [
    "2>&-",
    "<&- >&- 2>&-",
    pytest.param(">/dev/full 2>/dev/full", marks=pytest.mark.slow),
    pytest.param("2>/dev/full", marks=pytest.mark.slow),
    pytest.param(">&- 2>/dev/full", marks=pytest.mark.slow),
]


def _serve(redirections: str, *options: str) -> subprocess.Popen[str]:
    """Start a server whose standard streams a shell has redirected."""
    return subprocess.Popen(
        ["sh", "-c", f'exec "$@" {redirections}', "sh", sys.executable, "-m", "ovms_cli", "serve", *options],
        env=environment(), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip


def _empty_config(folder: Path) -> str:
    file = folder / "config.json"
    file.write_text('{"model_config_list": []}')
    return str(file)


def _check_serves(process: subprocess.Popen[str], grpc: int, rest: int, log: Path) -> None:
    """Check that a server answers, uses no standard descriptor for anything else, logs, and ends well."""
    server = OvmsProcess(process, grpc, rest)
    try:
        server.wait_ready()
        streams = [str(Path(f"/proc/{process.pid}/fd/{number}").readlink()) for number in range(3)]
        assert all(stream.startswith(("/dev/", "pipe:")) for stream in streams)
        assert server.stop()[0] == 0
    finally:
        process.kill()
        process.wait()
    written = log.read_text()
    assert "[info" in written
    assert "Traceback" not in written


@pytest.mark.parametrize("redirections", START)
def test_a_server_starts_and_logs_to_its_file_where_nothing_can_be_printed(redirections: str, tmp_path: Path) -> None:
    """Its descriptors 0 to 2 are never those of sockets or files."""
    grpc, rest = free_ports(2)
    log = tmp_path / "server.log"
    process = _serve(
        redirections, "--port", str(grpc), "--rest_port", str(rest), "--log_path", str(log),
        "--config_path", _empty_config(tmp_path), "--allow_empty",
    )  # fmt: skip
    _check_serves(process, grpc, rest, log)


@pytest.mark.slow
def test_a_server_without_a_reader_of_its_standard_error_starts_and_logs_to_its_file(tmp_path: Path) -> None:
    """A pipe without a reader fails each write."""
    grpc, rest = free_ports(2)
    log = tmp_path / "server.log"
    reader, writer = os.pipe()
    os.close(reader)
    process = subprocess.Popen(
        [sys.executable, "-m", "ovms_cli", "serve", "--port", str(grpc), "--rest_port", str(rest),
         "--log_path", str(log), "--config_path", _empty_config(tmp_path), "--allow_empty"],
        env=environment(), stdin=subprocess.DEVNULL, stdout=writer, stderr=writer, text=True,
    )  # fmt: skip
    os.close(writer)
    _check_serves(process, grpc, rest, log)


@pytest.mark.parametrize("redirections", ["2>&-", "2>/dev/full", ">/dev/full 2>/dev/full"])
def test_a_server_that_cannot_start_writes_the_reason_to_its_log_file(redirections: str, tmp_path: Path) -> None:
    """The exit status is that of any failed start."""
    log = tmp_path / "server.log"
    config = tmp_path / "missing.json"
    process = _serve(redirections, "--config_path", str(config), "--log_path", str(log))
    assert process.wait(60) == 1
    (line,) = log.read_text().splitlines()
    assert "[error" in line
    assert f"{config}: the file cannot be read" in line


@pytest.mark.parametrize("redirections", ["2>&-", "2>/dev/full"])
def test_a_wrong_command_line_ends_with_its_status_where_nothing_can_be_printed(redirections: str) -> None:
    """Scripts tell a wrong option from a failed start by the status."""
    assert _serve(redirections, "--no_such_option", "1").wait(60) == 64


def test_a_log_file_on_a_full_disk_prints_no_traceback(tmp_path: Path) -> None:
    """Lines that cannot be written are dropped."""
    options = ["--config_path", str(tmp_path / "no.json"), "--log_path", "/dev/full"]
    done = subprocess.run(
        [sys.executable, "-m", "ovms_cli", "serve", *options],
        check=False, capture_output=True, env=environment(), text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1
    assert "no.json: the file cannot be read" in done.stderr
    assert "Traceback" not in done.stderr
