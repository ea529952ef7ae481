"""``ovms top`` in a pipe."""

from __future__ import annotations

import csv
import io
import json

import pytest

from tests.support.commands import run_command
from tests.support.served_in_thread import ServedInThread, serving_in_thread

INTERVAL = ("--once", "--interval", "0.1")


def test_one_interval_is_printed_in_every_form(server: ServedInThread) -> None:
    """A line for each servable; plain numbers in JSON and CSV."""
    target = ("top", "--url", server.http, *INTERVAL)
    table, as_json, as_csv = (run_command(*target, "--output", form) for form in ("table", "json", "csv"))
    assert [each.exit_code for each in (table, as_json, as_csv)] == [0, 0, 0]
    titles, *rows = (line.split()[:3] for line in table.stdout.splitlines())
    assert titles == ["servable", "version", "state"]
    assert ["pixels", "1", "READY"] in rows
    document = json.loads(as_json.stdout)
    (pixels,) = (each for each in document["servables"] if each["name"] == "pixels")
    assert (document["ready"], pixels["requests_per_second"]) == (False, 0)
    assert document["resident_bytes"] > 2**20
    assert document["connections"]["REST"] == 1
    (values,) = (row for row in csv.DictReader(io.StringIO(as_csv.stdout)) if row["name"] == "pixels")
    assert (values["in_flight"], values["p50_ms"]) == ("0", "")


def test_stages_of_ops_are_a_view_of_their_own(server: ServedInThread) -> None:
    """The pipeline is chosen by its name."""
    done = run_command("top", "--url", server.http, "--once", "--stages", "diamond", "--output", "json")
    assert set(json.loads(done.stdout)["ops"]) == {"all_sizes", "join", "petal_only", "read"}, done.stderr


@pytest.mark.parametrize(
    ("code", "options", "text"),
    [
        (1, ("--stages", "dummy"), "has no figures of a pipeline"),
        (64, ("--sort", "weight"), "expected one of servable, version, state"),
    ],
)
def test_wrong_options_are_reported(server: ServedInThread, code: int, options: tuple[str, ...], text: str) -> None:
    """With what was expected."""
    done = run_command("top", "--url", server.http, *INTERVAL, *options)
    assert (done.exit_code, text in done.stderr) == (code, True), done.stderr


def test_a_port_of_grpc_is_no_server_for_top(server: ServedInThread) -> None:
    """The figures are metrics over HTTP."""
    assert run_command("top", "--url", server.grpc, *INTERVAL).exit_code == 2


def test_disabled_metrics_are_reported() -> None:
    """The setting may switch them off."""
    with serving_in_thread(metrics_enable=False, allow_empty=True) as server:
        done = run_command("top", "--url", server.http, *INTERVAL)
    assert (done.exit_code, "metrics are disabled" in done.stderr) == (1, True), done.stderr
