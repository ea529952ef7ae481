"""`ovms profile`: a profile of a running server."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ovmstrio.cli.console import fail, print_json, print_message, print_result
from ovmstrio.cli.server_options import Ca, Cert, Key, Timeout, Url, asking
from ovmstrio.cli.tables import FormatOption, JsonOption, Output, chosen, print_csv, print_table

if TYPE_CHECKING:
    from collections.abc import Mapping


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(profile)


def profile(
    *,
    seconds: Annotated[
        float, typer.Option("--seconds", min=0.01, max=60, metavar="SECONDS", help="Duration of sampling in seconds.")
    ] = 5.0,
    rate: Annotated[float, typer.Option("--rate", min=1, max=1000, metavar="N", help="Samples per second.")] = 100.0,
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            metavar="NAME",
            help="Time the layers of this model. May be repeated.",
            show_default="models called while sampling",
        ),
    ] = None,
    layers: Annotated[bool, typer.Option("--layers/--no-layers", help="Time the layers of models.")] = True,
    speedscope: Annotated[
        Path | None,
        typer.Option("--speedscope", metavar="FILE", help="Also write a file for https://www.speedscope.app."),
    ] = None,
    form: FormatOption = Output.TABLE,
    as_json: JsonOption = False,
    url: Url = "",
    timeout: Timeout = 5.0,
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
) -> None:
    """Profile a running server: its event loop, its worker threads, and the layers of its models.

    Threads are sampled. The layers are timed afterwards, for one second per model. The server compiles a copy of the
    model for this and runs it on inputs of ones, with dynamic dimensions of 1. This takes CPU time from the server.
    Requires the scope admin, or a request from the server's own machine.

    Exit codes: 1 if the server refuses or the file cannot be written, 2 if the server does not answer, 64 if the
    command line is wrong.
    """
    from ovmstrio.cli.profile_tables import HEADER, profile_rows, profile_tables

    with asking(url, needs="REST", timeout=timeout, ca=ca, cert=cert, key=key) as client:
        report = client.profile(seconds, rate, model if layers else [])
    if speedscope is not None:
        _write(speedscope, report)
    match chosen(form, as_json=as_json):
        case Output.JSON:
            print_json(report)
        case Output.CSV:
            print_csv([HEADER, *profile_rows(report)])
        case _:
            for title, table in profile_tables(report):
                print_result(title)
                if table is not None:
                    print_table(table)


def _write(file: Path, report: Mapping[str, Any]) -> None:
    import json

    from ovmstrio.cli.speedscope import speedscope_document

    try:
        file.write_text(json.dumps(speedscope_document(report)))
    except OSError as error:
        fail(f"{file}: {error.strerror or error}")
    print_message(f"{file}: open it at https://www.speedscope.app, which does not upload it")
