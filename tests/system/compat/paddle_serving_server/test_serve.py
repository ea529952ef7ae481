from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ovmstrio.runtimes.ops.process_info import FILE_NAME, record_process
from paddle_serving_server.serve import main, stop_serving


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[bytes]]:
    """Give a process that the file has with ports 9998 and 18082."""
    monkeypatch.setenv("SERVING_HOME", str(tmp_path))
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with record_process([9998, 18082]) as file:
        (entry,) = json.loads(file.read_text())
    del entry["began"]
    file.write_text(json.dumps([{**entry, "pid": process.pid, "start_time": entry["start_time"] + 5}]))
    yield process
    process.kill()
    process.communicate()


def test_kill_ends_the_server_of_a_port(
    server: subprocess.Popen[bytes], capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    """``kill --port`` ends the process at once; one of another port is left alone."""
    assert main(["kill", "--port", "1"]) == 1
    assert "no running service of port 1" in capsys.readouterr().out
    assert server.poll() is None
    assert main(["check"]) == 0
    assert f"process {server.pid}, ports [9998, 18082]: running" in capsys.readouterr().out
    assert main(["kill", "--port", "18082"]) == 0
    assert server.wait(60) == -9
    assert not stop_serving("stop")
    assert "has ended already" in capsys.readouterr().out


def test_a_process_of_somebody_else_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A number that now belongs to another process, here the test's own, is not signalled."""
    monkeypatch.setenv("SERVING_HOME", str(tmp_path))
    (tmp_path / FILE_NAME).write_text(json.dumps([{"pid": os.getpid(), "port": [1, 2], "start_time": 1.0}]))
    assert main(["kill"]) == 1
