"""`ovms health`: readiness of a server or a model, as an exit code."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ovmstrio.cli.console import data_table, print_message, stdout
from ovmstrio.cli.problems import safe
from ovmstrio.cli.server_options import Ca, Cert, Key, Rest, Timeout, Url, asking
from ovmstrio.cli.tables import FormatOption, JsonOption, Output, chosen, show_data

if TYPE_CHECKING:
    from rich.table import Table


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(health)


def health(
    *,
    model: Annotated[str, typer.Option("--model", metavar="NAME", help="Check this model instead of the server.")] = "",
    version: Annotated[str, typer.Option("--version", metavar="VERSION", help="Check this version of the model.")] = "",
    live: Annotated[bool, typer.Option("--live", help="Check liveness instead of readiness.")] = False,
    form: FormatOption = Output.TABLE,
    as_json: JsonOption = False,
    url: Url = "",
    rest: Rest = None,
    timeout: Timeout = 5.0,
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
) -> None:
    """Check whether the server or a model is ready.

    Exit codes: 0 if ready, 1 with the reason if not, 2 if the server does not answer, 64 if the command line is wrong.
    Only the answer of REST has the reason, so that without --url the REST port is tried first.
    """
    from ovmstrio.client import Health

    with asking(url, rest=rest, prefers="REST", timeout=timeout, ca=ca, cert=cert, key=key) as client:
        if live:
            answer = Health(ready=client.server_live())
        else:
            answer = client.model_ready(model, version) if model else client.server_ready()
    form = chosen(form, as_json=as_json)
    if form is not Output.TABLE:
        facts = {"ready": answer.ready, "reason": answer.reason}
        show_data(_table(facts), facts, form)
    elif answer.ready:
        stdout().print("live" if live else "ready")
    else:
        print_message(answer.reason or "not ready", style="")
    raise typer.Exit(0 if answer.ready else 1)


def _table(facts: dict[str, Any]) -> Table:
    table = data_table(*facts)
    table.add_row(*(safe(str(value)) for value in facts.values()))
    return table
