"""`ovms health`: whether a server or a model can be called, as an exit code."""

from __future__ import annotations

from typing import Annotated

import typer

from ovms_cli.console import note, stdout
from ovms_cli.server_options import Ca, Cert, Key, Rest, Timeout, Url, asking

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(health)


def health(
    *,
    model: Annotated[str, typer.Option("--model", help="Ask about this model instead of the server.")] = "",
    version: Annotated[str, typer.Option("--version", help="Ask about this version of it.")] = "",
    live: Annotated[bool, typer.Option("--live", help="Ask only whether the server answers at all.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Answer in JSON.")] = False,
    url: Url = "",
    rest: Rest = True,
    timeout: Timeout = 5.0,
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
) -> None:
    """Ask whether the server, or a model, is ready.

    Exits with 0 if so, with 1 and the reason if not, with 2 if nobody answers, with 64 if the command line is wrong.
    REST is the default here, because it carries the reason.
    """
    from ovmstrio.client import Health

    with asking(url, rest=rest, timeout=timeout, ca=ca, cert=cert, key=key) as client:
        if live:
            answer = Health(ready=client.server_live())
        else:
            answer = client.model_ready(model, version) if model else client.server_ready()
    if as_json:
        stdout().print_json(data={"ready": answer.ready, "reason": answer.reason})
    elif answer.ready:
        stdout().print("live" if live else "ready")
    else:
        note(answer.reason or "not ready", style="")
    raise typer.Exit(0 if answer.ready else 1)
