"""`ovms paddle stop`: command that ends pipeline services that run in the background."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ovmstrio.cli.console import EX_USAGE, fail, print_result

if TYPE_CHECKING:
    from ovmstrio.ops.process_info import ServingProcess


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(stop)


def stop(
    folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="DIR", help="Folder where they were started; default: $SERVING_HOME or the current folder."
        ),
    ] = None,
    *,
    port: Annotated[
        int | None, typer.Option("--port", metavar="PORT", help="Stop only the service with this port.")
    ] = None,
    kill: Annotated[bool, typer.Option("--kill", help="Stop at once, without waiting for requests.")] = False,
    timeout: Annotated[
        float, typer.Option("--timeout", min=0, metavar="SECONDS", help="Seconds to wait for the services to end.")
    ] = 60.0,
) -> None:
    """Stop the pipeline services of a folder's ProcessInfo.json, and wait until they have ended.

    Exits with 1 if there is no such service, or if a service does not end in time.
    """
    from ovmstrio.ops.process_info import FILE_NAME, serving_home, signal_processes, wait_for_exit

    where = folder or serving_home()
    if not where.is_dir():
        fail(f"{where}: no such folder; give the folder of the service's {FILE_NAME}", EX_USAGE)
    sent, _ = signal_processes(signal.SIGKILL if kill else signal.SIGINT, port, where)
    if not sent:
        of_port = f" of port {port}" if port is not None else ""
        fail(f"no running service{of_port} found in {where.absolute()}; services are listed where they start")
    late = []
    for process in sent:
        if wait_for_exit(process, timeout):
            print_result(f"ended {_names([process])}")
        else:
            late.append(process)
    if late:
        fail(f"{_names(late)} did not end within {timeout:g} s; --kill ends it at once")


def _names(processes: list[ServingProcess]) -> str:
    return ", ".join(f"process {each.pid} (ports {', '.join(map(str, filter(None, each.port)))})" for each in processes)
