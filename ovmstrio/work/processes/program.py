"""Programs of the server's own that run in processes beside it: their start, their main function and their end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import trio

__all__ = ["describe_end", "serve_descriptor", "start_program"]

_ROOT: Final = Path(__file__).parents[3]


async def start_program(module: str, theirs: socket.socket) -> trio.Process:
    """Start a module as a program, with the descriptor of a socket as its argument.

    Raises:
        OSError: no process can be started.

    Ownership: the process, which is the caller's to kill and to wait for; the socket remains the caller's.

    Cancellation: none happens while it starts.
    """
    search_path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
    # Without -P, modules of the current directory would come before the server's.
    return await trio.lowlevel.open_process(
        [sys.executable, "-P", "-m", module, str(theirs.fileno())],
        stdin=subprocess.DEVNULL,
        pass_fds=(theirs.fileno(),),
        env={**os.environ, "PYTHONPATH": search_path},
    )


def serve_descriptor(serve: Callable[[socket.socket], Awaitable[None]]) -> None:
    """Be such a program: serve the socket whose descriptor is the first argument, and exit when that returns.

    Signals that are meant for the whole group of processes have no effect: they must not take the program from a server
    that is still serving.
    """
    for meant_for_the_server in (signal.SIGINT, signal.SIGTERM):
        signal.signal(meant_for_the_server, _leave_it_to_the_server)
    trio.run(serve, socket.socket(fileno=int(sys.argv[1])))
    sys.stdout.flush()
    # Threads may still be in what belongs to users, whose exit handlers had better not run beside them.
    os._exit(0)


def _leave_it_to_the_server(*_: object) -> None:
    """Do nothing; an ignored signal would be ignored by processes that users' code starts, too."""


def describe_end(status: int) -> str:
    """Say in words how a process ended, whose status is below 0 for a signal."""
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"
