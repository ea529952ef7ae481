"""`ovms profile`: what a running server's time goes to."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ovms_cli.console import fail, note, print_json, say
from ovms_cli.server_options import Ca, Cert, Key, Timeout, Url, asking
from ovms_cli.tables import JsonOption, Output, OutputOption, chosen, print_csv, print_table

if TYPE_CHECKING:
    from collections.abc import Mapping


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(profile)


def profile(
    *,
    seconds: Annotated[float, typer.Option("--seconds", min=0.01, max=60, help="How long to look.")] = 5.0,
    rate: Annotated[float, typer.Option("--rate", min=1, max=1000, help="How often to look in a second.")] = 100.0,
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model", help="Time this model's layers; may be repeated.", show_default="those called meanwhile"
        ),
    ] = None,
    layers: Annotated[bool, typer.Option("--layers/--no_layers", help="Whether to time layers of models.")] = True,
    speedscope: Annotated[
        Path | None, typer.Option("--speedscope", help="Write a file that https://www.speedscope.app opens, too.")
    ] = None,
    output: OutputOption = Output.TABLE,
    as_json: JsonOption = False,
    url: Url = "",
    timeout: Timeout = 5.0,
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
) -> None:
    """Look at where a server is for a while: its event loop, its worker threads, and the layers of its models.

    Threads are sampled. Layers are timed afterwards, for a second each, on a copy of the model that is compiled for it
    and run on ones whose open dimensions are 1, which takes processors from the server. Needs the scope admin, or to be
    asked on the server's own machine.

    Exits with 1 if the server says no or the file cannot be written, with 2 if nobody answers, with 64 if the command
    line is wrong.
    """
    from ovms_cli.profile_tables import HEADER, profile_rows, profile_tables

    with asking(url, rest=True, timeout=timeout, ca=ca, cert=cert, key=key) as client:
        told = client.profile(seconds, rate, model if layers else [])
    if speedscope is not None:
        _write(speedscope, told)
    match chosen(output, as_json=as_json):
        case Output.JSON:
            print_json(told)
        case Output.CSV:
            print_csv([HEADER, *profile_rows(told)])
        case _:
            for title, table in profile_tables(told):
                say(title)
                if table is not None:
                    print_table(table)


def _write(file: Path, told: Mapping[str, Any]) -> None:
    import json

    from ovms_cli.speedscope import speedscope_document

    try:
        file.write_text(json.dumps(speedscope_document(told)))
    except OSError as error:
        fail(f"{file}: {error.strerror or error}")
    note(f"{file}: open it at https://www.speedscope.app, which sends it nowhere")
