"""`ovms top`: live view of a running server."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from ovmstrio.cli.console import EX_USAGE, fail, stdout
from ovmstrio.cli.server_options import Ca, Cert, Key, Timeout, Url, asking, finding_server
from ovmstrio.cli.tables import FormatOption, JsonOption, Output, chosen, show_data
from ovmstrio.cli.trace import watch_stages

if TYPE_CHECKING:
    from ovmstrio.cli.top_figures import Look
    from ovmstrio.client import Client


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(top)


def top(
    *,
    once: Annotated[bool, typer.Option("--once", help="Show one interval and exit; default in a pipe.")] = False,
    interval: Annotated[
        float,
        typer.Option(
            "--interval", min=0.1, max=3600, metavar="SECONDS", help="Seconds between two requests to the server."
        ),
    ] = 1.0,
    sort: Annotated[
        str,
        typer.Option(
            "--sort", metavar="COLUMN", help="Column to sort by, such as p99 or memory.", show_default="req/s"
        ),
    ] = "",
    stages: Annotated[
        str,
        typer.Option(
            "--stages", metavar="NAME", help="Show the stages of the Ops of this pipeline, as ovms paddle trace does."
        ),
    ] = "",
    form: FormatOption = Output.TABLE,
    as_json: JsonOption = False,
    url: Url = "",
    timeout: Timeout = 5.0,
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
) -> None:
    """Watch a server: state, requests and errors per second, running and queued calls, and latency of each servable.

    Latencies are the median and the 99th percentile of the calls that ended in the last interval. Memory is that of the
    load plus that of worker processes. Stateful models also show live sequences; text models show tokens per second and
    the usage of their KV cache. The first line shows CPU time, memory and connections of the server. Keys: s sorts by
    the next column, r reverses the order, q or Ctrl-C quits. If the server does not answer, the command retries.

    Uses the metrics and the list of models of the REST port. Exit codes: 0 after q or --once, 1 if the server refuses,
    2 if the server does not answer with --once, 64 if the command line is wrong, 130 after Ctrl-C.
    """
    from ovmstrio.cli.top_view import BUSIEST, SORTS

    form = chosen(form, as_json=as_json)
    if sort and sort not in SORTS:
        fail(f"--sort: expected one of {', '.join(SORTS)}, got {sort}", EX_USAGE)
    if stages:
        with finding_server(url, needs="REST", timeout=timeout, ca=ca, cert=cert, key=key) as server:
            watch_stages(server.url, stages, timeout, None if once else interval, form)
        return
    by = sort or BUSIEST
    is_live = not once and form is Output.TABLE and stdout().is_terminal
    with asking(url, needs="REST", waits=is_live, timeout=timeout, ca=ca, cert=cert, key=key) as client:
        if not is_live:
            _show_once(client, interval, form, by)
        else:
            _watch(client, interval, url or "127.0.0.1:8000", by)


def _look(client: Client) -> Look:
    from ovmstrio.cli.top_figures import FAMILIES, read_look

    try:
        return read_look(client.metrics(FAMILIES), client.models(), time.monotonic())
    except ValueError as error:
        fail(f"the server's metrics cannot be parsed: {error}")


def _show_once(client: Client, interval: float, output: Output, by: str) -> None:
    from ovmstrio.cli.top_figures import figures_between
    from ovmstrio.cli.top_view import exact_table, figures_table, in_order

    before = _look(client)
    time.sleep(interval)
    figures = in_order(figures_between(before, _look(client)), by)
    table = exact_table(figures) if output is Output.CSV else figures_table(figures)
    show_data(table, asdict(figures), output)


def _watch(client: Client, interval: float, address: str, by: str) -> None:
    """Show figures until the user quits."""
    from rich.live import Live

    from ovmstrio.cli.pressed_keys import pressed_keys
    from ovmstrio.cli.top_figures import figures_between
    from ovmstrio.cli.top_view import SORTS, draw, in_order
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
