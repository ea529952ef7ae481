"""One of many processes that serve a project: ``python -m ovmstrio.project_server.worker TASK``."""

from __future__ import annotations

import signal
import socket
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
from ovmstrio.project_server.passing import READY, ConnectionInbox
from ovmstrio.project_server.settings import ProjectSettings
from ovmstrio.runtimes.handlers.concurrency import Board, SharedLimit
from ovmstrio.runtimes.handlers.config.project_file import read_project

if TYPE_CHECKING:
    from ovmstrio.runtimes.handlers.config.project_spec import ProjectSpec
    from ovmstrio.wire.listeners import Listener

__all__ = ["WorkerTask"]


class WorkerTask(BaseModel):
    """What a worker process is told: the project's file, and the descriptors that it has from its parent."""

    file: Path
    settings: ProjectSettings
    port: int
    control: int
    board: int
    rows: int
    row: int


async def _work(task: WorkerTask, project: ProjectSpec) -> None:
    """Serve the connections that the parent gives, until it says that it will give no more, or has ended."""
    # The project's file may say something else by now.
    board = Board(task.board, task.rows)
    limit = SharedLimit(board, task.row, project.max_concurrency)
    control = trio.socket.from_stdlib_socket(socket.socket(fileno=task.control))
    inbox = ConnectionInbox(control, partial(board.add_closed_connection, task.row))
    tls = make_tls(project, task.settings)
    listener: Listener = inbox if tls is None else trio.SSLListener(inbox, tls, https_compatible=True)
    async with open_front_end(project, task.settings, limit, board.all_ready) as end, trio.open_nursery() as nursery:
        await nursery.start(end.serve_listeners, [listener])
        board.set_ready(task.row)
        await control.send(READY)
        await inbox.run()
        await end.drain(task.settings.drain_seconds)


def _leave_it_to_the_parent(*_: object) -> None:
    """Do nothing; an ignored signal would be ignored by processes that the handler starts, too."""


def main(task: WorkerTask) -> int:
    """Run the process, and give its exit code."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _leave_it_to_the_parent)
    project, _ = read_project(task.file)
    enter_project(project, task.port)
    configure_project_logs(project.log_level)
    failed = False
    try:
        trio.run(_work, task, project)
    except* Exception as group:  # noqa: BLE001 - the border of the process
        failed = True
        log_failures(group)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(WorkerTask.model_validate_json(sys.argv[1])))
