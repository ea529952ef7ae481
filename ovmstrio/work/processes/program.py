"""Programs of the server's own that run in processes beside it: their start and their end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

import trio

__all__ = ["describe_end", "describe_exit", "signal_name", "start_program"]

_ROOT: Final = Path(__file__).parents[3]


async def start_program(module: str, theirs: socket.socket, *, own_group: bool = False) -> trio.Process:
    """Start a module as a program, with the descriptor of a socket as its argument.

    Args:
        module: what is run.
        theirs: the program's end.
        own_group: whether signals from a terminal are not for the program, nor for what it starts.

    Raises:
        OSError: no process can be started.

    Ownership: the process, which is the caller's to kill and to wait for; the socket remains the caller's.

    Cancellation: none happens while it starts.
    """
    # Without -P, modules of the current directory would come before the server's.
    return await trio.lowlevel.open_process(
        [sys.executable, "-P", "-m", module, str(theirs.fileno())],
        stdin=subprocess.DEVNULL,
        pass_fds=(theirs.fileno(),),
        env=_environment(),
        process_group=0 if own_group else None,
    )


def _environment() -> dict[str, str] | None:
    """Have the program find the server, which it does by itself if that is installed."""
    if _ROOT.name in {"site-packages", "dist-packages"}:
        return None
    search_path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": search_path}


def describe_end(status: int) -> str:
    """Say in words how a process ended, whose status is below 0 for a signal."""
    return f"ended with status {status}" if status >= 0 else f"was killed by {signal_name(-status)}"


def signal_name(number: int) -> str:
    """Give the name of a signal; those for real-time programs have none."""
    with suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


def describe_exit(code: int) -> str:
    """Say in words what an exit code is, which is below 0 for a signal."""
    if code < 0:
        return f"crashed with {signal_name(-code)}"
    return f"ended the process with exit code {code}"
