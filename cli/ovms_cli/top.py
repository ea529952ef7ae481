"""`ovms top`: what a running server does, as one looks on."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from ovms_cli.console import EX_USAGE, fail, stdout
from ovms_cli.server_options import Ca, Cert, Key, Timeout, Url, asking
from ovms_cli.tables import Output, OutputOption, show_data
from ovms_cli.trace import watch_stages

if TYPE_CHECKING:
    from ovms_cli.top_figures import Look
    from ovmstrio.client import Client


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(top)


def top(
    *,
    once: Annotated[bool, typer.Option("--once", help="Show one interval and end, as it is done in a pipe.")] = False,
    interval: Annotated[
        float, typer.Option("--interval", min=0.1, max=3600, help="Seconds between two looks at the server.")
    ] = 1.0,
    sort: Annotated[
        str,
        typer.Option("--sort", help="Column by which rows are sorted, such as p99 or memory.", show_default="req/s"),
    ] = "",
    stages: Annotated[
        str, typer.Option("--stages", help="Show the stages of the Ops of this pipeline, as ovms trace does.")
    ] = "",
    output: OutputOption = Output.TABLE,
    url: Url = "",
    timeout: Timeout = 5.0,
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
) -> None:
    """Watch a server: for each servable its state, requests and errors a second, calls under way and waiting, times.

    Times are the median and that of the slowest hundredth, of the calls that ended in the last interval; memory is what
    the load took, and what its worker processes have. Stateful models have their live sequences, models of text the
    tokens that they make in a second and how full their cache is. The server's own line has its processor time, memory
    and connections. s sorts by the next column, r the other way round, q or Ctrl-C ends it. A server that goes away is
    asked again until it comes back.

    Asks the REST port for metrics and the list of models. Exits with 0 after q or --once, with 1 if the server says no,
    with 2 if nobody answers with --once, with 64 if the command line is wrong, with 130 after Ctrl-C.
    """
    from ovms_cli.top_view import BUSIEST, SORTS

    if sort and sort not in SORTS:
        fail(f"--sort: expected one of {', '.join(SORTS)}, got {sort}", EX_USAGE)
    if stages:
        watch_stages(f"{url or '127.0.0.1:8000'}", stages, timeout, None if once else interval, output)
        return
    by = sort or BUSIEST
    with asking(url, rest=True, timeout=timeout, ca=ca, cert=cert, key=key) as client:
        if once or output is not Output.TABLE or not stdout().is_terminal:
            _show_once(client, interval, output, by)
        else:
            _watch(client, interval, url or "127.0.0.1:8000", by)


def _look(client: Client) -> Look:
    from ovms_cli.top_figures import FAMILIES, read_look

    try:
        return read_look(client.metrics(FAMILIES), client.models(), time.monotonic())
    except ValueError as error:
        fail(f"what answers has no metrics that can be read: {error}")


def _show_once(client: Client, interval: float, output: Output, by: str) -> None:
    from ovms_cli.top_figures import figures_between
    from ovms_cli.top_view import exact_table, figures_table, in_order

    before = _look(client)
    time.sleep(interval)
    figures = in_order(figures_between(before, _look(client)), by)
    table = exact_table(figures) if output is Output.CSV else figures_table(figures)
    show_data(table, asdict(figures), output)


def _watch(client: Client, interval: float, address: str, by: str) -> None:
    """Show figures until somebody has seen enough."""
    from rich.live import Live

    from ovms_cli.pressed_keys import pressed_keys
    from ovms_cli.top_figures import figures_between
    from ovms_cli.top_view import SORTS, draw, in_order
    from ovmstrio.client import Unreachable
    from ovmstrio.core.errors import DeadlineExceeded

    before, figures, trouble, is_reversed = None, None, "", False
    with pressed_keys() as wait, Live(console=stdout(), screen=True, auto_refresh=False) as live:
        while True:
            try:
                now = _look(client)
            except (Unreachable, DeadlineExceeded) as error:
                trouble = f"{error.message}; trying again"
            else:
                figures, before, trouble = figures_between(before or now, now), now, ""
            ends = time.monotonic() + interval
            while (left := ends - time.monotonic()) > 0:
                shown = None if figures is None else in_order(figures, by, is_reversed=is_reversed)
                live.update(draw(shown, address, trouble, *stdout().size, by=by), refresh=True)
                match wait(left).lower():
                    case "q":
                        return
                    case "s":
                        by = SORTS[(SORTS.index(by) + 1) % len(SORTS)]
                    case "r":
                        is_reversed = not is_reversed
