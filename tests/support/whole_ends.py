"""The ends of processes that tests start and whose output they read, in bounded time whatever is left behind.

What a process has started may outlive it, and hold the pipe open that its output comes by: whoever reads to the end
would wait for it for ever, and so would whoever closes a pipe that another thread reads.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Timer

import psutil

SECONDS_TO_END = 60
"""How long what a server has started may take to end behind it on a busy machine."""


def end_of_output(process: subprocess.Popen[str], seconds: float = SECONDS_TO_END) -> str:
    """Wait for a process that was told to end, and give what it has printed and nobody has read.

    Raises:
        AssertionError: it does not end in time, or something that it has started does not; that is killed.
    """
    try:
        return process.communicate(timeout=seconds)[0] or ""
    except subprocess.TimeoutExpired:
        left = kill_and_tell(process)
        printed = process.communicate(timeout=seconds)[0] or ""
    raise AssertionError(f"still running {seconds} s after the end of a process: {left}\n{printed}")


@contextmanager
def killed_if_late(process: subprocess.Popen[str], seconds: float) -> Iterator[None]:
    """Kill a process, and everything else that can write to its output, if the block takes longer; so reads end."""
    late = Timer(seconds, kill_and_tell, (process,))
    late.start()
    try:
        yield
    finally:
        late.cancel()
        late.join()


def kill_and_tell(process: subprocess.Popen[str]) -> list[str]:
    """Kill a process and everything else that can write to its output; gives their numbers and commands."""
    own = [psutil.Process(process.pid)] if process.poll() is None else []
    return [killed(each) for each in {*own, *_writers(process)}]


def killed(process: psutil.Process) -> str:
    """Kill a process; gives its number and command."""
    try:
        told = f"{process.pid} {shlex.join(process.cmdline())}"
        process.kill()
    except psutil.NoSuchProcess:
        return "one that has just ended"
    return told


def _writers(process: subprocess.Popen[str]) -> list[psutil.Process]:
    if process.stdout is None or process.stdout.closed:
        return []
    pipe = Path(f"/proc/self/fd/{process.stdout.fileno()}").readlink()
    return [each for each in psutil.process_iter() if each.pid != os.getpid() and _has_open(each.pid, pipe)]


def _has_open(pid: int, file: Path) -> bool:
    with suppress(OSError):
        for each in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                if each.readlink() == file:
                    return True
    return False
