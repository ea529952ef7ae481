"""`ovms health`: whether a server or a model can be called, as an exit code."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ovms_cli.console import data_table, note, stdout
from ovms_cli.problems import safe
from ovms_cli.server_options import Ca, Cert, Key, Timeout, Url, asking, open_tls
from ovms_cli.tables import JsonOption, Output, OutputOption, chosen, show_data

if TYPE_CHECKING:
    from rich.table import Table


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(health)


def health(
    *,
    model: Annotated[str, typer.Option("--model", help="Ask about this model instead of the server.")] = "",
    version: Annotated[str, typer.Option("--version", help="Ask about this version of it.")] = "",
    live: Annotated[bool, typer.Option("--live", help="Ask only whether the server answers at all.")] = False,
    output: OutputOption = Output.TABLE,
    as_json: JsonOption = False,
    url: Url = "",
    rest: Annotated[
        bool | None,
        typer.Option("--rest/--grpc", help="The protocol to speak; by default the one that is answered."),
    ] = None,
    timeout: Timeout = 5.0,
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
) -> None:
    """Ask whether the server, or a model, is ready.

    Exits with 0 if so, with 1 and the reason if not, with 2 if nobody answers, with 64 if the command line is wrong.
    REST is asked first, because it carries the reason, and gRPC if nobody answers that.
    """
    from ovmstrio.client import Health

    spoken = rest if rest is not None else _answers_rest(url, timeout, ca, cert, key)
    with asking(url, rest=spoken, timeout=timeout, ca=ca, cert=cert, key=key) as client:
        if live:
            answer = Health(ready=client.server_live())
        else:
            answer = client.model_ready(model, version) if model else client.server_ready()
    form = chosen(output, as_json=as_json)
    if form is not Output.TABLE:
        facts = {"ready": answer.ready, "reason": answer.reason}
        show_data(_table(facts), facts, form)
    elif answer.ready:
        stdout().print("live" if live else "ready")
    else:
        note(answer.reason or "not ready", style="")
    raise typer.Exit(0 if answer.ready else 1)


def _table(facts: dict[str, Any]) -> Table:
    table = data_table(*facts)
    table.add_row(*(safe(str(value)) for value in facts.values()))
    return table


def _answers_rest(url: str, timeout: float, ca: Path | None, cert: Path | None, key: Path | None) -> bool:
    """Tell whether REST is spoken at an address, or gRPC is the one to ask."""
    from ovmstrio.client import Unreachable, open_client
    from ovmstrio.core.errors import ServerError

    if url.startswith(("grpc://", "grpcs://", "unix:")):
        return False
    try:
        with open_client(url, rest=True, timeout=timeout, tls=open_tls(url, ca, cert, key)) as client:
            client.server_live()
    except Unreachable:
        return False
    except ServerError:
        pass
    return True
