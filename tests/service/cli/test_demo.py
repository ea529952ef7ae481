from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.support.ports import free_ports
from tests.support.processes import STOP_TIMEOUT_SECONDS, run_ovms

pytestmark = pytest.mark.e2e


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give every demo an empty cache folder and a wide terminal."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path


def test_every_answer_is_right_over_both_protocols(cache: Path) -> None:
    """The demo asks sixteen questions twice and ends with 0; its repository lies in the cache."""
    grpc, rest = free_ports(2)
    result = run_ovms("demo", "--once", "--port", str(grpc), "--rest_port", str(rest))
    assert result.returncode == 0, result.stdout + result.stderr
    assert "32 of 32 answers are right" in result.stdout
    rows = [line.split() for line in result.stdout.splitlines()]
    answered = [row[0] for row in rows if row.count("ok") == 2]
    assert answered == [
        *["add_one", "iris", "iris", "iris", *["file_type"] * 5],
        *["incrementer", "labels_image", "counter_stream"],
        *["ensemble"] * 4,
    ]
    for answer in ("setosa", "versicolor", "virginica", "png", "python", "json", "npy", "zip"):
        assert any(answer in row for row in rows)
    assert len(list((cache / "ovmstrio").glob("samples-*/config.json"))) == 1


@pytest.mark.parametrize(("taken", "other"), [("--port", "--rest_port"), ("--rest_port", "--port")])
def test_a_port_in_use_is_named_with_its_option(taken: str, other: str) -> None:
    """The message says which port is taken and which option chooses another."""
    (free,) = free_ports(1)
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        result = run_ovms("demo", "--once", taken, str(port), other, str(free))
    assert result.returncode == 1
    assert f"port {port} is in use by another program; choose another with {taken}" in result.stderr


def test_the_same_port_twice_is_a_usage_error() -> None:
    """Both protocols cannot share a port."""
    result = run_ovms("demo", "--port", "9", "--rest_port", "9")
    assert result.returncode == 64
    assert "have to differ" in result.stderr


def test_it_goes_on_serving_until_interrupted() -> None:
    """Without --once the next commands are shown, and Ctrl-C ends the demo with 0 and no traceback."""
    grpc, rest = free_ports(2)
    command = [sys.executable, "-m", "ovms_cli", "demo", "--port", str(grpc), "--rest_port", str(rest)]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    # Busy machines take long to ask everything.
    timer = threading.Timer(10 * STOP_TIMEOUT_SECONDS, process.kill)
    timer.start()
    try:
        output = process.stdout
        assert output is not None
        shown = ""
        while "file_type.client" not in shown:
            line = output.readline()
            assert line, shown
            shown += line
        process.send_signal(signal.SIGINT)
        rest_of_it, _ = process.communicate(timeout=STOP_TIMEOUT_SECONDS)
    finally:
        timer.cancel()
        if process.poll() is None:
            process.kill()
            process.wait()
    assert process.returncode == 0, shown + rest_of_it
    assert f"curl -s http://127.0.0.1:{rest}/v2/models/iris/infer" in shown
    assert "Traceback" not in rest_of_it
