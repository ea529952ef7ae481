"""`ovms top`: what a running server does, as one looks on."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from ovms_cli.console import fail, stdout
from ovms_cli.server_options import Ca, Cert, Key, Timeout, Url, asking
from ovms_cli.tables import Output, OutputOption, show_data

if TYPE_CHECKING:
    from ovms_cli.top_figures import Look
    from ovmstrio.client import Client

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(top)


def top(
    *,
    once: Annotated[bool, typer.Option("--once", help="Show one interval and end, as it is done in a pipe.")] = False,
    interval: Annotated[
        float, typer.Option("--interval", min=0.1, max=3600, help="Seconds between two looks at the server.")
    ] = 1.0,
    output: OutputOption = Output.TABLE,
    url: Url = "",
    timeout: Timeout = 5.0,
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
) -> None:
    """Watch a server: for each servable its state, requests and errors a second, calls under way and waiting, times.

    Times are the median and that of the slowest hundredth, of the calls that ended in the last interval; memory is what
    the load took. The server's own line has its processor time, memory and connections. q or Ctrl-C ends it. A server
    that goes away is asked again until it comes back.

    Asks the REST port for metrics and the list of models. Exits with 0 after q or --once, with 1 if the server says no,
    with 2 if nobody answers with --once, with 64 if the command line is wrong, with 130 after Ctrl-C.
    """
    with asking(url, rest=True, timeout=timeout, ca=ca, cert=cert, key=key) as client:
        if once or output is not Output.TABLE or not stdout().is_terminal:
            _show_once(client, interval, output)
        else:
            _watch(client, interval, url or "127.0.0.1:8000")


def _look(client: Client) -> Look:
    from ovms_cli.top_figures import FAMILIES, read_look

    try:
        return read_look(client.metrics(FAMILIES), client.models(), time.monotonic())
    except ValueError as error:
        fail(f"what answers has no metrics that can be read: {error}")


def _show_once(client: Client, interval: float, output: Output) -> None:
    from ovms_cli.top_figures import figures_between
    from ovms_cli.top_view import exact_table, figures_table

    before = _look(client)
    time.sleep(interval)
    figures = figures_between(before, _look(client))
    table = exact_table(figures) if output is Output.CSV else figures_table(figures)
    show_data(table, asdict(figures), output)


def _watch(client: Client, interval: float, address: str) -> None:
    """Show figures until somebody has seen enough."""
    from rich.live import Live

    from ovms_cli.pressed_keys import pressed_keys
    from ovms_cli.top_figures import figures_between
    from ovms_cli.top_view import draw
    from ovmstrio.client import Unreachable
    from ovmstrio.core.errors import DeadlineExceeded

    before, figures, trouble = None, None, ""
    with pressed_keys() as wait, Live(console=stdout(), screen=True, auto_refresh=False) as live:
        while True:
            try:
                now = _look(client)
            except (Unreachable, DeadlineExceeded) as error:
                trouble = f"{error.message}; trying again"
            else:
                figures, before, trouble = figures_between(before or now, now), now, ""
            live.update(draw(figures, address, trouble, *stdout().size), refresh=True)
            if wait(interval) in {"q", "Q"}:
                return
