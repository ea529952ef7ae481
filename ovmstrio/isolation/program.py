"""Start and exit description of worker programs."""

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

from ovmstrio.isolation.exit_status import EXIT_DESCRIPTIONS

_ROOT: Final = Path(__file__).parents[2]


_SERVER_PACKAGES: Final = ("ovmstrio", "pyovms", "cortex_internal")


class Program(NamedTuple):
    """Program of a worker process.

    Attributes:
        module: run as a program. Arguments: descriptor of its socket, descriptor of the parent-watch pipe.
        python: interpreter; None for the server's. Another interpreter runs the module by path, with a third argument:
            the folders of the server's packages as JSON.
    """

    module: str
    python: Path | None = None

    def command(self, end: int, lifeline: int) -> list[str]:
        """Return the command line."""
        numbers = [str(end), str(lifeline)]
        if self.python is None:
            # Without -P, modules of the current directory would shadow the server's.
            return [sys.executable, "-P", "-m", self.module, *numbers]
        file = _ROOT.joinpath(*self.module.split(".")).with_suffix(".py")
        return [str(self.python), str(file), *numbers, json.dumps(_package_folders())]

    def environment(self) -> dict[str, str] | None:
        """Return the environment, with PYTHONPATH if the server is not installed; None to inherit."""
        if self.python is not None:
            # These variables are meant for the server's interpreter.
            return {key: value for key, value in os.environ.items() if key not in {"PYTHONPATH", "PYTHONHOME"}}
        if _ROOT.name in {"site-packages", "dist-packages"}:
            return None
        search_path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
        return {**os.environ, "PYTHONPATH": search_path}


def _package_folders() -> dict[str, str]:
    specs = {name: find_spec(name) for name in _SERVER_PACKAGES}
    return {name: str(Path(spec.origin).parent) for name, spec in specs.items() if spec is not None and spec.origin}


async def start_program(
    program: Program, theirs: socket.socket, lifeline: int, *, own_group: bool = False, captures_output: bool = False
) -> trio.Process:
    """Start a program; the caller owns the process and its pipes, and keeps the files. Raises ``OSError``.

    Args:
        program: the program.
        theirs: socket for the program.
        lifeline: read end of the parent-watch pipe.
        own_group: start a process group, which terminal signals do not reach.
        captures_output: create pipes for stdout and stderr instead of inheriting them.
    """
    output = subprocess.PIPE if captures_output else None
    return await trio.lowlevel.open_process(
        program.command(theirs.fileno(), lifeline),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        pass_fds=(theirs.fileno(), lifeline),
        env=program.environment(),
        process_group=0 if own_group else None,
    )


def describe_exit_status(status: int) -> str:
    """Return a description of an exit status; negative for a signal."""
    if status < 0:
        return f"was killed by {signal_name(-status)}"
    meaning = EXIT_DESCRIPTIONS.get(status)
    return f"ended with status {status}" + ("" if meaning is None else f" ({meaning})")


def signal_name(number: int) -> str:
    """Return the name of a signal; real-time signals have none."""
    with suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


def describe_probe_exit(code: int) -> str:
    """Return a description of an exit code for a probe; negative for a signal."""
    if code < 0:
        return f"crashed with {signal_name(-code)}"
    return f"ended the process with exit code {code}"
