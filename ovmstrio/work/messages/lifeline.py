"""The end of a worker process with that of its server, whatever it is doing then."""

from __future__ import annotations

import fcntl
import os
import select
import signal

__all__ = ["watch_lifeline"]


def watch_lifeline(file: int) -> None:
    """Have the system end this process when the other end of a pipe is closed, at once if it is by now.

    A thread that waits for that would not run while code of users holds the interpreter's lock.  So the kernel is asked
    for SIGIO, whose default is to end the process.
    """
    os.set_inheritable(file, False)
    fcntl.fcntl(file, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_ASYNC)
    # The kernel tells of no end that came before it was asked to, as when the server ends while this process starts.
    end = select.poll()
    end.register(file, 0)
    if end.poll(0):
        os.kill(os.getpid(), signal.SIGIO)
