"""Terminal output of `ovms serve` while the server starts: steps of the load, and then a panel with addresses."""

from __future__ import annotations

import logging
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ovmstrio.cli.console import echo, messages_are_rich, stderr
from ovmstrio.cli.tables import aligned, fitted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text

    from ovmstrio.core.request import ServableMetadata
    from ovmstrio.server.running import Running
    from ovmstrio.server.settings import ServerSettings
    from ovmstrio.serving.records import VersionStatus


async def show_startup(running: Running, settings: ServerSettings) -> None:
    """Show the loading progress on a terminal, and then a panel of all servables.

    Cancellation: at any checkpoint; the progress disappears.
    """
    if not messages_are_rich():
        await running.plane.registry.wait_loaded()
        _print_lines(running)
        return
    console = stderr()
    await _show_loading(running, console)
    if not running.plane.is_draining:
        console.print(_panel(running, console))
        # Outside of the frame, so that long lines can be copied.
        console.print(_links(running, settings), soft_wrap=True, highlight=False)


# Loading


async def _show_loading(running: Running, console: Console) -> None:
    """Show a spinner with elapsed time for each version that loads, with its latest log event as the step."""
    import trio
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from ovmstrio.serving.records import VersionState

    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        tasks: dict[tuple[str, int], Any] = {}

        def show_event(name: str, event: str) -> None:
            for (loading, _), task in tuple(tasks.items()):
                if loading == name:
                    progress.update(task, description=f"{name}: {event}")

        async def follow() -> None:
            while True:
                statuses = [each for some in running.plane.statuses().values() for each in some]
                now = {(each.name, each.version) for each in statuses if each.state is VersionState.LOADING}
                for ended in tasks.keys() - now:
                    progress.remove_task(tasks.pop(ended))
                for begun in sorted(now - tasks.keys()):
                    tasks[begun] = progress.add_task(f"{begun[0]}: loading", total=None)
                await running.plane.wait_change()

        with _service_events(show_event):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(follow)
                await running.plane.registry.wait_loaded()
                nursery.cancel_scope.cancel()


@contextmanager
def _service_events(show: Callable[[str, str], None]) -> Iterator[None]:
    """Call ``show`` with service and event of each log record that names a service, in the thread of the record."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if isinstance(record.msg, dict):
                name = record.msg.get("model") or record.msg.get("name")
                if isinstance(name, str):
                    show(name, str(record.msg.get("event", "")))

    handler = Handler()
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)


# Panel


def _print_lines(running: Running) -> None:
    """Print the panel for a pipe: one line for each row, without wrapping."""
    readiness = running.plane.readiness()
    state = "ready" if readiness.ready else f"not ready: {readiness.reason};"
    echo(f"{aligned(_rows(running))}\n{_addresses(running)}{state} after {running.seconds:.2f} s", file=sys.stderr)


def _panel(running: Running, console: Console) -> RenderableType:
    from rich.console import Group
    from rich.panel import Panel
    from rich.text import Text

    table = fitted(_placed_services(running), console)
    shown = Text(table) if isinstance(table, str) else table
    content = Group(shown, _state(running))
    is_ready = running.plane.readiness().ready
    return Panel(content, title="ovmstrio", title_align="left", border_style="green" if is_ready else "red")


def _placed_services(running: Running) -> Table:
    """Return the table of the panel: names, kinds, versions, and where each service runs."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=box.SIMPLE, pad_edge=False)
    for column in ("service", "kind", "version", "state", "runs on", "load time", "memory", "reason"):
        table.add_column(column, overflow="fold")
    registry = running.plane.registry
    for name, statuses in running.plane.statuses().items():
        kind = escape(registry.kind_of(name))
        for status in statuses:
            row = _row(status)
            table.add_row(row[0], kind, *row[1:3], escape(_place(running, status)), *row[3:])
        if not statuses:
            table.add_row(escape(name), kind, "", "[red]NOT READY[/]", "", "", "", escape(registry.why_not(name)))
    return table


def _place(running: Running, status: VersionStatus) -> str:
    """Return the devices of a model, and the threads or processes of Python code."""
    from ovmstrio.core.errors import ServerError
    from ovmstrio.core.resource_registry import current_resource_registry

    try:
        facts = running.plane.registry.look_inside(status.name, str(status.version)).facts
    except ServerError:
        return ""
    resources = current_resource_registry()
    processes = sum(owner == status.name and process.pid is not None for owner, process in resources.processes())
    places = [str(facts.get("devices") or facts.get("device") or "")]
    if processes:
        places.append(f"{processes} worker process{'es' if processes > 1 else ''}")
    elif any(owner == status.name for owner, _ in resources.pools()):
        places.append("threads")
    elif status.kind in _PYTHON_KINDS:
        places.append("in process")
    return ", ".join(filter(None, places))


_PYTHON_KINDS = frozenset({"graph", "handler", "op pipeline"})


def _links(running: Running, settings: ServerSettings) -> Text:
    """Return addresses, as links of the terminal where they are pages, and a command to try."""
    from rich.text import Text

    text = Text()
    base = _base_url(running, settings)
    pages = {"console": "/console"} if settings.console != "off" else {}
    pages["API"] = "/v2/docs"
    if running.plane.render_metrics(["ovmstrio_ready"]) is not None:
        pages["metrics"] = "/metrics"
    for name, path in pages.items() if base else ():
        text.append(f"{name:8} ").append(f"{base}{path}\n", style=f"underline link {base}{path}")
    for protocol, addresses in (("REST", running.rest), ("gRPC", running.grpc), ("probes", running.probes)):
        if addresses or protocol != "probes":
            text.append(f"{protocol:8} {', '.join(addresses) or 'off'}\n")
    if command := _next_command(running, base):
        text.append("try      ").append(command, style="bold")
    text.rstrip()
    return text


def _base_url(running: Running, settings: ServerSettings) -> str:
    """Return the URL of the REST port for a browser on this machine, empty without a port."""
    scheme = "http" if settings.tls_cert is None else "https"
    for address in running.rest:
        host, _, port = address.rpartition(":")
        if port.isdecimal():
            is_any = host.strip("[]") in {"0.0.0.0", "::", "127.0.0.1", "::1"}  # noqa: S104 - compared only
            return f"{scheme}://{'localhost' if is_any else host}:{port}"
    return ""


_MAX_EXAMPLE_VALUES = 16
_DEFAULT_PORT = 9000


def _next_command(running: Running, base: str) -> str:
    """Return a command that calls the first service that is ready; none without a REST port or over TLS."""
    import shlex

    from ovmstrio.cli.demo import find_programs
    from ovmstrio.core.errors import ServerError
    from ovmstrio.serving.records import VersionState

    if not base.startswith("http://"):
        return ""
    ovms = find_programs()[0]
    # The default address of calls is that of gRPC.
    is_default = any(address.endswith(f":{_DEFAULT_PORT}") for address in running.grpc)
    url = "" if is_default else f" --url {base}"
    for name, statuses in running.plane.statuses().items():
        if all(each.state is not VersionState.AVAILABLE for each in statuses):
            continue
        if running.plane.registry.kind_of(name) == "text model":
            return f"{ovms} chat {shlex.quote(name)} --url {base}"
        try:
            metadata = running.plane.registry.peek(name).metadata
        except ServerError:
            continue
        inputs = _example_inputs(metadata)
        if inputs is not None:
            return " ".join([ovms, "infer", shlex.quote(name), *inputs]) + url
    return f"{ovms} models{url}" if running.plane.statuses() else ""


def _example_inputs(metadata: ServableMetadata) -> list[str] | None:
    """Return zeros for each input as arguments of the shell; None if there are none, or one is long or untyped."""
    import json
    import shlex

    import numpy as np

    from ovmstrio.core.tensor import BYTES, INVALID

    arguments = []
    for spec in metadata.inputs:
        sizes = [dim.low if dim.is_fixed else max(dim.low, 1) for dim in spec.shape]
        if spec.datatype in {BYTES, INVALID} or metadata.has_sequences or np.prod(sizes) > _MAX_EXAMPLE_VALUES:
            return None
        values = json.dumps(np.zeros(sizes, int).tolist())
        arguments.append(shlex.quote(values if len(metadata.inputs) == 1 else f"{spec.name}={values}"))
    return arguments or None


def _rows(running: Running) -> list[Sequence[str]]:
    """Return header and rows of the panel for a pipe."""
    rows: list[Sequence[str]] = [("servable", "version", "state", "load time", "memory", "reason")]
    registry = running.plane.registry
    for name, statuses in running.plane.statuses().items():
        rows += map(_facts, statuses)
        if not statuses:
            rows.append((name, "", "NOT READY", "", "", "; ".join(registry.why_not(name).split("\n"))))
    return rows


def _addresses(running: Running) -> str:
    rows = [("gRPC", running.grpc), ("REST", running.rest)]
    rows += [("probes", list(running.probes))] if running.probes else []
    return "".join(f"{protocol:5} {', '.join(addresses) or 'off'}\n" for protocol, addresses in rows)


def _state(running: Running) -> RenderableType:
    from rich.markup import escape
    from rich.text import Text

    readiness = running.plane.readiness()
    state = "[green]ready[/]" if readiness.ready else f"[red]not ready[/]: {escape(readiness.reason)};"
    return Text.from_markup(f"{state} after {running.seconds:.2f} s")


def _row(status: VersionStatus) -> list[str]:
    """Return the facts in rich's markup."""
    from rich.markup import escape

    facts = [escape(fact) for fact in _facts(status)]
    colour = "green" if facts[2] == "AVAILABLE" else "red" if status.reason else "yellow"
    facts[2] = f"[{colour}]{facts[2]}[/]"
    return facts


def _facts(status: VersionStatus) -> tuple[str, ...]:
    return (
        status.name,
        str(status.version or ""),
        "UNAVAILABLE" if status.has_failed else status.state.name,
        "" if status.load_seconds is None else f"{status.load_seconds:.2f} s",
        "" if status.grown_bytes is None else f"{status.grown_bytes / 2**20:.0f} MiB",
        status.reason.split("\n")[0],
    )
