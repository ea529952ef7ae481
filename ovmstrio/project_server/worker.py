"""The program of one of many processes that serve a project: its first request is a :class:`WorkerTask`."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import trio
from pydantic import BaseModel

from ovmstrio.project_server.environment import enter_project
from ovmstrio.project_server.failures import log_failures
from ovmstrio.project_server.front_ends import make_tls, open_front_end
from ovmstrio.project_server.logs import configure_project_logs
from ovmstrio.project_server.passing import ConnectionInbox
from ovmstrio.project_server.settings import ProjectSettings
from ovmstrio.runtimes.handlers.concurrency import Board, SharedLimit
from ovmstrio.runtimes.handlers.config.project_file import read_project
from ovmstrio.work.processes import WorkRequest, WorkRequests, run_program

if TYPE_CHECKING:
    from ovmstrio.runtimes.handlers.config.project_spec import ProjectSpec
    from ovmstrio.wire.listeners import Listener

__all__ = ["WorkerTask"]


class WorkerTask(BaseModel):
    """What a worker process is told, and the board's descriptor with it."""

    file: Path
    settings: ProjectSettings
    port: int
    rows: int
    row: int


async def _serve(first: WorkRequest, requests: WorkRequests) -> None:
    """Serve the connections that the parent gives, until it says that it will give no more, or has ended.

    Raises:
        ConfigError: the project cannot be served.
        ValueError: the board is missing.

    Ownership: what the project's server opens.

    Cancellation: at once.
    """
    task = WorkerTask.model_validate(first.value)
    project, _ = read_project(task.file)
    enter_project(project, task.port)
    configure_project_logs(project.log_level)
    if first.descriptor is None:
        raise ValueError("a process of a project needs the board")
    await _serve_project(task, project, Board(first.descriptor, task.rows), first, requests)


async def _serve_project(
    task: WorkerTask, project: ProjectSpec, board: Board, first: WorkRequest, requests: WorkRequests
) -> None:
    # The project's file may say something else by now.
    limit = SharedLimit(board, task.row, project.max_concurrency)
    inbox = ConnectionInbox(partial(board.add_closed_connection, task.row))
    tls = make_tls(project, task.settings)
    listener: Listener = inbox if tls is None else trio.SSLListener(inbox, tls, https_compatible=True)
    async with open_front_end(project, task.settings, limit, board.all_ready) as end, trio.open_nursery() as nursery:
        await nursery.start(end.serve_listeners, [listener])
        board.set_ready(task.row)
        await first.answer(None)
        await requests.handle_all(inbox.put)
        await end.drain(task.settings.drain_seconds)


def main() -> int:
    """Run the process, and give its exit code."""
    failed = False
    try:
        run_program(_serve)
    except* Exception as group:  # noqa: BLE001 - the border of the process
        failed = True
        log_failures(group)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
