"""What `ovms serve` shows of a starting server, and how it says why one could not start."""

from __future__ import annotations

import errno
import gc
from typing import TYPE_CHECKING, Any, Final

from ovms_cli.console import stderr

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

    from ovmstrio.registry import VersionStatus
    from ovmstrio.server.settings import ServeSettings
    from ovmstrio.server.supervisor import Running

__all__ = ["explain", "show_startup", "spare_the_collector"]

_OBJECTS_A_COLLECTION: Final = 20_000
"""How many objects may come before the youngest are looked at; a call makes a few dozen, few of them in cycles."""


async def spare_the_collector(running: Running) -> None:
    """Keep Python's cyclic collector from what was loaded at the start, and from looking at every few calls.

    By default it takes a tenth to a fifth of the time of a small call.

    Cancellation: until the first load has ended; nothing is changed then.
    """
    await running.plane.registry.wait_loaded()
    gc.collect()
    gc.freeze()
    gc.set_threshold(_OBJECTS_A_COLLECTION, 20, 20)


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
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE, pad_edge=False)
    for column in ("servable", "version", "state", "load time", ""):
        table.add_column(column, overflow="fold")
    for statuses in running.plane.statuses().values():
        for status in statuses:
            table.add_row(*_row(status))
    readiness = running.plane.readiness()
    where = Text()
    for protocol, addresses in (("gRPC", running.grpc), ("REST", running.rest)):
        where.append(f"{protocol:5} {', '.join(addresses) or 'off'}\n")
    state = "[green]ready[/]" if readiness.ready else f"[red]not ready[/] {readiness.reason}"
    content = Group(table, where, Text.from_markup(f"{state} after {running.seconds:.2f} s"))
    return Panel(content, title="ovms", title_align="left", border_style="green" if readiness.ready else "red")


def _row(status: VersionStatus) -> tuple[str, str, str, str, str]:
    from rich.markup import escape

    state = status.state.name
    colour = "green" if state == "AVAILABLE" else "red" if status.reason else "yellow"
    seconds = "" if status.load_seconds is None else f"{status.load_seconds:.2f} s"
    return (
        status.name,
        str(status.version or ""),
        f"[{colour}]{state}[/]",
        seconds,
        escape(status.reason.split("\n")[0]),
    )


def explain(group: BaseExceptionGroup[Any], settings: ServeSettings) -> list[str]:
    """Say in a line each why the server could not start, or ended."""
    return [_explain_one(error, settings) for error in _leaves(group)]


def _leaves(group: BaseExceptionGroup[Any]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error


def _explain_one(error: BaseException, settings: ServeSettings) -> str:
    if not isinstance(error, OSError):
        return str(error)
    if error.errno == errno.EADDRINUSE:
        return (
            f"an address is in use: {error.strerror} (gRPC port {settings.port}, REST port {settings.rest_port}); "
            "choose others with --port and --rest_port, or end the program that has them"
        )
    return f"{error.strerror}: {error.filename}" if error.filename else str(error)
