"""Tables, exit codes and the beginning of the command, as they are for scripts and for people."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from rich.table import Table
from typer.main import get_command

from ovms_cli import tables
from ovms_cli.all_commands import app
from ovms_cli.exits import EXIT_CODES
from ovms_cli.tables import Output, print_table, show_data
from ovms_cli.tensor_output import write_outputs
from tests.support.commands import run_command

ROOT = Path(__file__).parents[3]
LONG = "a_model_with_quite_a_long_name_that_must_be_found"


def _table() -> Table:
    table = Table()
    for column in ("model", "state", "inputs"):
        table.add_column(column)
    table.add_row(LONG, "[green]READY[/]", "x FP32 [-1, 10]".replace("[", "\\[") + "\ny INT64")
    table.add_row("b", "READY", "")
    return table


def test_a_table_in_a_pipe_has_a_line_for_each_row(capsys: pytest.CaptureFixture[str]) -> None:
    """However long: names stay whole for grep."""
    print_table(_table())
    lines = capsys.readouterr().out.split("\n")
    width = len(LONG)
    assert lines == [
        f"{'model':{width}}  state  inputs",
        f"{LONG}  READY  x FP32 [-1, 10]; y INT64",
        f"{'b':{width}}  READY",
        "",
    ]


def test_a_table_on_a_narrow_terminal_is_a_block_for_each_row(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forty columns cut no name into pieces."""
    monkeypatch.setattr(tables, "stdout", lambda: Console(force_terminal=True, width=40))
    print_table(_table())
    told = capsys.readouterr().out
    assert told.startswith(f"model   {LONG}\nstate   READY\ninputs  x FP32 [-1, 10]; y INT64\n\nmodel   b\n")


def test_a_table_on_a_wide_terminal_has_a_line_for_each_row_and_colours(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of the markup is seen."""
    monkeypatch.setattr(tables, "stdout", lambda: Console(force_terminal=True, width=200))
    print_table(_table())
    told = capsys.readouterr().out
    assert "[green]" not in told
    assert re.search(rf"{LONG} .*\x1b\[32mREADY\x1b\[0m", told)


def test_the_same_data_as_csv_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    """Without colours, and with nothing cut."""
    show_data(_table(), [1], Output.CSV)
    assert list(csv.reader(io.StringIO(capsys.readouterr().out)))[1] == [LONG, "READY", "x FP32 [-1, 10]; y INT64"]
    for output, as_json in ((Output.JSON, False), (Output.TABLE, True)):
        show_data(_table(), [1], output, as_json=as_json)
        assert json.loads(capsys.readouterr().out) == [1]


_DATA = {
    "models": [],
    "sequences": ["m"],
    "infer": ["--model", "m"],
    "stream": ["--model", "m", "--input", "x"],
    "sequence run": ["--model", "m", "--input", "x"],
    "health": [],
    "chat": [],
    "check": ["c"],
    "prepare": ["--list"],
    "trace": ["--once"],
    "demo": ["--once"],
    "graph check": ["g"],
    "pipeline check": ["c"],
    "custom-node check": ["n"],
    "keys list": [],
    "profile": [],
}
"""Commands that show data, with what they cannot do without."""


@pytest.mark.parametrize("command", _DATA)
def test_every_command_that_shows_data_takes_the_same_forms(command: str) -> None:
    """One that it does not know is refused before anything is done, with those that there are."""
    told = run_command(*command.split(), *_DATA[command], "--output", "xml")
    assert told.exit_code == 64
    assert all(form in told.output for form in ("--output", "table", "json", "csv")), told.output


def test_no_command_has_json_alone() -> None:
    """Whatever takes ``--json`` is in the table above; so are those that print tables."""
    root: Any = get_command(app)
    groups = [(f"{name} ", group.commands) for name, group in root.commands.items() if hasattr(group, "commands")]
    commands = {prefix + name: one for prefix, found in [("", root.commands), *groups] for name, one in found.items()}
    with_json = {name for name, one in commands.items() if any("--json" in each.opts for each in one.params)}
    assert with_json <= set(_DATA)
    assert {name for name in _DATA if not any("--output" in each.opts for each in commands[name].params)} == set()


def test_checks_tell_their_problems_as_csv(tmp_path: Path) -> None:
    """A row each, with the line of the file."""
    (tmp_path / "graph.pbtxt").write_text('input_stream: "a"\nnode { calculator: "Nonsense" }\n')
    told = run_command("graph", "check", str(tmp_path), "--output", "csv")
    assert told.exit_code == 1
    rows = list(csv.DictReader(io.StringIO(told.output)))
    assert ("error", "2") in [(row["severity"], row["line"]) for row in rows]
    assert all(Path(row["file"]).name == "graph.pbtxt" for row in rows)


def test_outputs_as_csv_have_a_row_for_each_value(capsys: pytest.CaptureFixture[str]) -> None:
    """With its place, and nothing left out."""
    outputs = {"y": np.arange(20).reshape(2, 10), "z": np.array([b"a,b"], object), "w": np.array(np.nan)}
    write_outputs(outputs, "csv")
    rows = list(csv.reader(io.StringIO(capsys.readouterr().out)))
    assert rows[0] == ["output", "index", "value"]
    assert rows[-4:] == [["y", "1 8", "18"], ["y", "1 9", "19"], ["z", "0", "a,b"], ["w", "", "NaN"]]
    assert len(rows) == 1 + 20 + 1 + 1


def test_the_page_of_exit_codes_is_the_table_of_the_command() -> None:
    """One table, and all of it."""
    rows = re.findall(r"^\| (\d+) \| (.*) \|$", (ROOT / "docs" / "exit_codes.md").read_text(), re.MULTILINE)
    assert {int(code): meaning for code, meaning in rows} == EXIT_CODES
