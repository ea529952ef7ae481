"""What `ovms serve` shows of a starting server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ovms_cli.console import stderr

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ovmstrio.registry import VersionStatus
    from ovmstrio.server.running import Running

__all__ = ["show_startup"]


async def show_startup(running: Running) -> None:
    """Show a line of what is loading while it loads, on a terminal, and then a panel of all that is served.

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
    console.print(_panel(running))


def _progress(running: Running) -> RenderableType:
    from rich.text import Text

    return Text(f"{running.plane.readiness().reason or 'loaded'} ({running.seconds:.1f} s)", style="dim")


def _panel(running: Running) -> RenderableType:
    from rich import box
    from rich.console import Group
    from rich.markup import escape
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE, pad_edge=False)
    for column in ("servable", "version", "state", "load time", "memory", ""):
        table.add_column(column, overflow="fold")
    registry = running.plane.registry
    for name, statuses in running.plane.statuses().items():
        for status in statuses:
            table.add_row(*_row(status))
        if not statuses:
            table.add_row(escape(name), "", "[red]NOT READY[/]", "", "", escape(registry.why_not(name)))
    readiness = running.plane.readiness()
    where = Text()
    rows = [("gRPC", running.grpc), ("REST", running.rest)]
    rows += [("probes", list(running.probes))] if running.probes else []
    for protocol, addresses in rows:
        where.append(f"{protocol:5} {', '.join(addresses) or 'off'}\n")
    state = "[green]ready[/]" if readiness.ready else f"[red]not ready[/]: {escape(readiness.reason)};"
    content = Group(table, where, Text.from_markup(f"{state} after {running.seconds:.2f} s"))
    return Panel(content, title="ovms", title_align="left", border_style="green" if readiness.ready else "red")


def _row(status: VersionStatus) -> tuple[str, str, str, str, str, str]:
    from rich.markup import escape

    state = status.state.name
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
