"""``ovms stop``: services that run in the background are ended by what they noted of themselves."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ovmstrio.runtimes.ops.process_info import FILE_NAME, record_process
from tests.support.commands import run_command

run = partial(run_command, "stop")

STUBBORN = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); print(flush=True); input()"


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SERVING_HOME", raising=False)


@pytest.fixture
def server() -> Iterator[subprocess.Popen[bytes]]:
    """Give a process that the folder's file has with two ports, and that does not end at SIGINT."""
    process = subprocess.Popen([sys.executable, "-c", STUBBORN], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    _note(process.pid)
    yield process
    process.kill()
    process.communicate()


def _note(pid: int) -> None:
    with record_process([9998, 18082]) as file:
        entry: dict[str, Any] = json.loads(file.read_text())[0]
    file.write_text(json.dumps([{**entry, "pid": pid, "start_time": entry["start_time"] + 5, "began": None}]))


def test_a_service_of_a_port_is_ended(server: subprocess.Popen[bytes]) -> None:
    """One that does not end in time is told, with the way out, and one of another port is left alone."""
    other = run("--port", "1")
    assert other.exit_code == 1
    assert "no running service of port 1 is known" in " ".join(other.stderr.split())
    late = run("--port", "9998", "--timeout", "0.1")
    assert late.exit_code == 1
    told = " ".join(late.stderr.split())
    assert f"process {server.pid} (ports 9998, 18082) did not end within 0.1 s; --kill ends it at once" in told
    killed = run("--kill")
    assert killed.exit_code == 0, killed.output
    assert f"ended process {server.pid} (ports 9998, 18082)" in " ".join(killed.stdout.split())
    assert server.wait(60) == -9


def test_a_service_ends_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGINT is what it gets; the folder may be given."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], stderr=subprocess.DEVNULL) as process:
        _note(process.pid)
        monkeypatch.chdir(elsewhere)
        assert run(str(tmp_path)).exit_code == 0
        assert process.wait(60) != 0


def test_nothing_to_stop(tmp_path: Path) -> None:
    """Without a service, or without the folder, the command fails and says where it looked."""
    assert run().exit_code == 1
    assert str(tmp_path) in run().stderr.replace("\n", "")
    assert run("nowhere").exit_code == 64
    (tmp_path / FILE_NAME).write_text("[]")
    assert run().exit_code == 1
