"""Exit statuses of worker processes, and their exit together with the server.

Interpreters older than 3.10 must be able to import this module.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal

PYTHON_TOO_OLD = 81
NUMPY_MISSING = 82
CHANNEL_CLOSED = 83
LOOP_FAILED = 84
RECEIVE_FAILED = 85
MODEL_LOST = 86

EXIT_DESCRIPTIONS = {
    PYTHON_TOO_OLD: "its interpreter is older than Python 3.10",
    NUMPY_MISSING: "its interpreter has no numpy, which pyovms needs: run python -m pip install numpy there",
    CHANNEL_CLOSED: "its code has closed the descriptor of the channel to the server",
    LOOP_FAILED: "the event loop of its async code failed",
    RECEIVE_FAILED: "a message could not be received: out of file descriptors or memory",
    MODEL_LOST: "the model failed and could not be reloaded",
}


def exit_with_parent(file: int) -> None:
    """Make the kernel end this process when the other end of the pipe ``file`` is closed, or is closed already.

    A waiting thread would not run while user code holds the GIL, so the kernel sends SIGIO, whose default action is to
    terminate the process.
    """
    os.set_inheritable(file, False)
    fcntl.fcntl(file, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_ASYNC)
    # No SIGIO is sent for a close before F_SETFL, for example if the server exits while this process starts.
    end = select.poll()
    end.register(file, 0)
    if end.poll(0):
        os.kill(os.getpid(), signal.SIGIO)


def ignore_stop_signals() -> None:
    """Ignore SIGINT and SIGTERM for the process group, because the server decides when its processes end.

    Unlike SIG_IGN, a handler is not inherited by processes that user code starts.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
