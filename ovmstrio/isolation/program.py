"""Programs of the server's own that run in processes beside it: their start and their end."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Final, NamedTuple

import trio

from ovmstrio.isolation.process_exit import MEANINGS

__all__ = ["Program", "describe_end", "describe_exit", "signal_name", "start_program"]

_ROOT: Final = Path(__file__).parents[2]


_SERVER_PACKAGES: Final = ("ovmstrio", "pyovms", "cortex_internal")


class Program(NamedTuple):
    """What runs in a worker process.

    Attributes:
        module: is run as a program, with the descriptor of its socket as its first argument, and as its second that of
            a pipe whose other end is closed when the server ends.
        python: the interpreter, the server's own if None.  The module is run by its path under another one, with the
            folders of the server's packages, by name, as its third argument, and nothing else of the server's.
    """

    module: str
    python: Path | None = None

    def command(self, end: int, lifeline: int) -> list[str]:
        """Give the command that starts it."""
        numbers = [str(end), str(lifeline)]
        if self.python is None:
            # Without -P, modules of the current directory would come before the server's.
            return [sys.executable, "-P", "-m", self.module, *numbers]
        file = _ROOT.joinpath(*self.module.split(".")).with_suffix(".py")
        return [str(self.python), str(file), *numbers, json.dumps(_package_folders())]

    def environment(self) -> dict[str, str] | None:
        """Have the program find the server, which it does by itself if that is installed."""
        if self.python is not None:
            # What they name is for the server's interpreter.
            return {key: value for key, value in os.environ.items() if key not in {"PYTHONPATH", "PYTHONHOME"}}
        if _ROOT.name in {"site-packages", "dist-packages"}:
            return None
        search_path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
        return {**os.environ, "PYTHONPATH": search_path}


def _package_folders() -> dict[str, str]:
    specs = {name: find_spec(name) for name in _SERVER_PACKAGES}
    return {name: str(Path(spec.origin).parent) for name, spec in specs.items() if spec is not None and spec.origin}


async def start_program(
    program: Program, theirs: socket.socket, lifeline: int, *, own_group: bool = False, is_heard: bool = False
) -> trio.Process:
    """Start a program.

    Args:
        program: what is run.
        theirs: the program's end.
        lifeline: the end of a pipe that the program reads.
        own_group: whether signals from a terminal are not for the program, nor for what it starts.
        is_heard: whether what it prints goes through pipes; else it goes where the server's goes.

    Raises:
        OSError: no process can be started.

    Ownership: the process, which is the caller's to kill and to wait for, and its pipes; the files remain the caller's.

    Cancellation: none happens while it starts.
    """
    output = subprocess.PIPE if is_heard else None
    return await trio.lowlevel.open_process(
        program.command(theirs.fileno(), lifeline),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        pass_fds=(theirs.fileno(), lifeline),
        env=program.environment(),
        process_group=0 if own_group else None,
    )


def describe_end(status: int) -> str:
    """Say in words how a process ended, whose status is below 0 for a signal."""
    if status < 0:
        return f"was killed by {signal_name(-status)}"
    meaning = MEANINGS.get(status)
    return f"ended with status {status}" + ("" if meaning is None else f" ({meaning})")


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
