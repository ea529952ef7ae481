"""Terminal output of `ovms serve` while the server starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ovmstrio.cli.console import stderr
from ovmstrio.cli.tables import fitted, print_table

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text

    from ovmstrio.server.running import Running
    from ovmstrio.serving.records import VersionStatus


async def show_startup(running: Running) -> None:
    """Show the loading progress on a terminal, and then a panel of all servables.

    Cancellation: at any checkpoint; the line disappears.
    """
    import trio
    from rich.live import Live

    registry = running.plane.registry
    console = stderr()
    if console.is_terminal:
        with Live(console=console, auto_refresh=False, transient=True) as live:
            async with trio.open_nursery() as nursery:

                async def follow() -> None:
                    while True:
                        live.update(_progress(running), refresh=True)
                        await running.plane.wait_change()

                nursery.start_soon(follow)
                await registry.wait_loaded()
                nursery.cancel_scope.cancel()
    else:
        await registry.wait_loaded()
    if console.is_terminal:
        console.print(_panel(running, console))
    else:
        _print_lines(running, console)


def _progress(running: Running) -> RenderableType:
    from rich.text import Text

    return Text(f"{running.plane.readiness().reason or 'loaded'} ({running.seconds:.1f} s)", style="dim")


def _print_lines(running: Running, console: Console) -> None:
    """Print the panel for a pipe: one line for each row, without wrapping."""
    print_table(_services(running), console)
    console.print(_addresses(running), _state(running), soft_wrap=True, sep="")


def _panel(running: Running, console: Console) -> RenderableType:
    from rich.console import Group
    from rich.panel import Panel
    from rich.text import Text

    table = fitted(_services(running), console)
    content = Group(Text(table) if isinstance(table, str) else table, _addresses(running), _state(running))
    is_ready = running.plane.readiness().ready
    return Panel(content, title="ovms", title_align="left", border_style="green" if is_ready else "red")


def _services(running: Running) -> Table:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=box.SIMPLE, pad_edge=False)
    for column in ("servable", "version", "state", "load time", "memory", "reason"):
        table.add_column(column, overflow="fold")
    registry = running.plane.registry
    for name, statuses in running.plane.statuses().items():
        for status in statuses:
            table.add_row(*_row(status))
        if not statuses:
            table.add_row(escape(name), "", "[red]NOT READY[/]", "", "", escape(registry.why_not(name)))
    return table


def _addresses(running: Running) -> Text:
    from rich.text import Text

    where = Text()
    rows = [("gRPC", running.grpc), ("REST", running.rest)]
    rows += [("probes", list(running.probes))] if running.probes else []
    for protocol, addresses in rows:
        where.append(f"{protocol:5} {', '.join(addresses) or 'off'}\n")
    return where


def _state(running: Running) -> Text:
    from rich.markup import escape
    from rich.text import Text

    readiness = running.plane.readiness()
    state = "[green]ready[/]" if readiness.ready else f"[red]not ready[/]: {escape(readiness.reason)};"
    return Text.from_markup(f"{state} after {running.seconds:.2f} s")


def _row(status: VersionStatus) -> tuple[str, str, str, str, str, str]:
    from rich.markup import escape

    state = "UNAVAILABLE" if status.has_failed else status.state.name
    colour = "green" if state == "AVAILABLE" else "red" if status.reason else "yellow"
    seconds = "" if status.load_seconds is None else f"{status.load_seconds:.2f} s"
    return (
        status.name,
        str(status.version or ""),
        f"[{colour}]{state}[/]",
        seconds,
        "" if status.grown_bytes is None else f"{status.grown_bytes / 2**20:.0f} MiB",
        escape(status.reason.split("\n")[0]),
    )
