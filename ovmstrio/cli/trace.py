"""``ovms paddle trace``: live view of the Ops of a running pipeline."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ovmstrio.cli.console import exit_on_error, stdout
from ovmstrio.cli.exits import EX_INTERRUPTED, EX_UNREACHABLE, EX_USAGE
from ovmstrio.cli.server_options import Timeout, Url, finding_server
from ovmstrio.cli.tables import FORMATS, JsonOption, Output, chosen, print_csv

if TYPE_CHECKING:
    from collections.abc import Callable


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(trace)


def trace(
    target: Annotated[
        str, typer.Argument(metavar="TARGET", help="File config.yml, its directory, or HOST:PORT of the HTTP port.")
    ] = ".",
    *,
    once: Annotated[bool, typer.Option("--once", help="Show the current figures and exit.")] = False,
    form: Annotated[
        Output,
        typer.Option(
            "--format",
            metavar=FORMATS,
            help="Format of the output; json: a line per interval, csv: a row for each stage of each Op.",
        ),
    ] = Output.TABLE,
    as_json: JsonOption = False,
    interval: Annotated[
        float,
        typer.Option(
            "--interval", min=0.05, max=3600, metavar="SECONDS", help="Seconds between two requests to the server."
        ),
    ] = 1.0,
    url: Url = "",
    timeout: Timeout = 5.0,
) -> None:
    """Show the times of each stage, the queues between Ops and the sizes of batches, until interrupted.

    Exit codes: 1 if the server has no such figures, 2 if it does not answer, 64 if the command line is wrong.
    """
    form = chosen(form, as_json=as_json)
    if not url:
        watch_stages(target, "", timeout, None if once else interval, form)
        return
    with finding_server(url, needs="REST", timeout=timeout) as server:
        watch_stages(server.url, "", timeout, None if once else interval, form)


def watch_stages(target: str, service: str, patience: float, interval: float | None, form: Output) -> None:
    """Show the stages of a pipeline, once without an interval; ``service`` names it if the server has several."""
    from ovmstrio.cli.trace_figures import NoFigures, NoServer, NoTarget, find_url
    from ovmstrio.util.interrupts import run_interruptible

    try:
        with exit_on_error(EX_USAGE, NoTarget), exit_on_error(1, NoFigures), exit_on_error(EX_UNREACHABLE, NoServer):
            run_interruptible(lambda: _watch(find_url(target), service, patience, interval, form))
    except KeyboardInterrupt:
        raise typer.Exit(EX_INTERRUPTED) from None


async def _watch(url: str, service: str, patience: float, interval: float | None, form: Output) -> None:
    """Show the figures at each interval, or once without an interval."""
    from rich.live import Live

    from ovmstrio.cli.trace_figures import HEADER, draw, open_source, print_figures, rows

    async with open_source(url, patience, service) as read:
        console = stdout()
        if form is Output.JSON:
            await _repeat(read, lambda figures: typer.echo(json.dumps(figures)), interval)
        elif form is Output.CSV:
            print_csv([HEADER])
            await _repeat(read, lambda figures: print_csv(rows(figures)), interval)
        elif interval is None or not console.is_terminal:
            await _repeat(read, print_figures, interval)
        else:
            with Live(console=console, auto_refresh=False, screen=True, vertical_overflow="crop") as live:
                await _repeat(read, lambda figures: live.update(draw(figures, console), refresh=True), interval)


async def _repeat(read: Any, show: Callable[[dict[str, Any]], None], interval: float | None) -> None:
    """Show figures until cancelled, or once."""
    import trio

    while True:
        show(await read())
        if interval is None:
            return
        await trio.sleep(interval)
