"""``ovms profile`` against a server."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from tests.support.commands import CommandResult, run_command
from tests.support.ports import free_ports
from tests.support.served_in_thread import ServedInThread
from tests.support.speedscope_format import check_speedscope


def _profile(server: ServedInThread, *options: str) -> CommandResult:
    return run_command("profile", "--url", server.rest, "--seconds", "0.2", *options)


def test_a_profile_is_printed_in_every_form_and_written_for_speedscope(server: ServedInThread, tmp_path: Path) -> None:
    """Threads and the layers of the model."""
    done = _profile(server, "--model", "dummy", "--speedscope", str(tmp_path / "p.json"))
    assert done.exit_code == 0, done.stderr
    assert "event loop" in done.stdout
    assert "Add" in done.stdout
    document = json.loads((tmp_path / "p.json").read_text())
    check_speedscope(document)
    assert {"event loop", "layers of dummy"} <= {each["name"] for each in document["profiles"]}
    printed = json.loads(_profile(server, "--no_layers", "--json").stdout)
    assert (printed["models"], printed["seconds"] >= 0.2) == ([], True)
    rows = list(csv.reader(io.StringIO(_profile(server, "--model", "dummy", "--output", "csv").stdout)))
    assert rows[0] == ["where", "what", "place", "own_percent", "total_percent", "microseconds"]
    assert any(row[0] == "dummy" for row in rows)


@pytest.mark.parametrize(
    ("code", "options", "text"),
    [
        (1, ("--model", "nothing"), "nothing"),
        (1, ("--speedscope", "/no/such/p.json"), "No such file or directory"),
        (2, ("--url", "free"), "is the server running?"),
    ],
)
def test_failures_have_exit_codes(server: ServedInThread, code: int, options: tuple[str, ...], text: str) -> None:
    """1 is a refusal, 2 an unreachable server."""
    (port,) = free_ports(1)
    done = _profile(server, *(f"127.0.0.1:{port}" if each == "free" else each for each in options))
    assert (done.exit_code, text in done.stderr) == (code, True), done.stderr
