"""``ovms demo --once`` in this process."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.support.commands import run_command
from tests.support.ports import free_ports


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set an empty cache folder and wide outputs."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path


def test_all_answers_are_right_over_both_protocols(cache: Path) -> None:
    """The demo asks sixteen questions twice and ends with 0; its repository is in the cache."""
    grpc, rest = free_ports(2)
    result = run_command("demo", "--once", "--port", str(grpc), "--rest_port", str(rest))
    assert result.exit_code == 0, result.output
    assert "32 of 32 answers are right" in result.stdout
    rows = [line.split() for line in result.stdout.splitlines()]
    assert [row[0] for row in rows if row.count("ok") == 2] == [
        *["add_one", "iris", "iris", "iris", *["file_type"] * 5],
        *["incrementer", "labels_image", "counter_stream"],
        *["ensemble"] * 4,
    ]
    for answer in ("setosa", "versicolor", "virginica", "png", "python", "json", "npy", "zip"):
        assert any(answer in row for row in rows)
    assert len(list((cache / "ovmstrio").glob("samples-*/config.json"))) == 1


@pytest.mark.parametrize(("taken", "other"), [("--port", "--rest_port"), ("--rest_port", "--port")])
def test_a_port_in_use_is_reported_with_its_option(taken: str, other: str) -> None:
    """Before anything is prepared."""
    (free,) = free_ports(1)
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        result = run_command("demo", "--once", taken, str(port), other, str(free))
    assert result.exit_code == 1
    assert f"port {port} is in use by another program; choose another with {taken}" in result.stderr


def test_one_port_for_both_protocols_is_a_wrong_command_line() -> None:
    """The ports must differ."""
    result = run_command("demo", "--port", "9", "--rest_port", "9")
    assert (result.exit_code, "have to differ" in result.stderr) == (64, True)
