"""How worker processes end that cannot say why: their exit statuses.  Older interpreters must be able to read this."""

from __future__ import annotations

import fcntl
import os
import select
import signal

__all__ = ["LOST_CHANNEL", "LOST_LOOP", "LOST_MODEL", "MEANINGS", "NO_NUMPY", "TOO_OLD", "UNREADABLE", "watch_lifeline"]

# ----------------------------------------------------------------------
# How worker processes end that cannot say why: their exit statuses.  Older interpreters must be able to read this
# ----------------------------------------------------------------------

TOO_OLD = 81
NO_NUMPY = 82
LOST_CHANNEL = 83
LOST_LOOP = 84
UNREADABLE = 85
LOST_MODEL = 86

MEANINGS = {
    TOO_OLD: "its interpreter is older than Python 3.10",
    NO_NUMPY: "its interpreter has no numpy, which pyovms needs: install it there with python -m pip install numpy",
    LOST_CHANNEL: "its code has closed the file through which it speaks with the server",
    LOST_LOOP: "the event loop of its async code has broken down",
    UNREADABLE: "it cannot take what the server sends: it may have no file descriptors or no memory left",
    LOST_MODEL: "the model failed and could not be loaded again",
}


# ----------------------------------------------------------------------
# The end of a worker process with that of its server, whatever it is doing then
# ----------------------------------------------------------------------


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
