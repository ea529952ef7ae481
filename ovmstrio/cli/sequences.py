"""`ovms sequences`: list of the live sequences of a stateful model."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from ovmstrio.cli.console import data_table
from ovmstrio.cli.server_options import Ca, Cert, Key, Timeout, Url, asking
from ovmstrio.cli.tables import JsonOption, Output, OutputOption, show_data

if TYPE_CHECKING:
    from rich.table import Table

    from ovmstrio.client import SequenceState


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(sequences)


def sequences(
    name: Annotated[str, typer.Argument(help="The model.", show_default=False)],
    *,
    version: Annotated[str, typer.Option("--version", help="Version of the model; default: the highest.")] = "",
    output: OutputOption = Output.TABLE,
    as_json: JsonOption = False,
    url: Url = "",
    timeout: Timeout = 10.0,
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
) -> None:
    """List the live sequences of a stateful model: age, time since the last request, and number of requests.

    Uses the REST port. Exit codes: 0 on success, 1 if the model does not exist or the server refuses, 2 if the server
    does not answer, 64 if the command line is wrong.
    """
    with asking(url, rest=True, timeout=timeout, ca=ca, cert=cert, key=key) as client:
        listed = client.sequences(name, version)
    show_data(_table(listed), [asdict(sequence) for sequence in listed], output, as_json=as_json)


def _table(listed: list[SequenceState]) -> Table:
    table = data_table("sequence", "age", "idle", "requests", justify="right")
    for each in listed:
        table.add_row(str(each.id), f"{each.age_seconds:.0f} s", f"{each.idle_seconds:.0f} s", str(each.requests))
    return table
