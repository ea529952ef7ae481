"""Priority of computing threads, below that of the event loop and of Python code."""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

_STEP: Final = 7
"""Difference of nice values: with 4 the event loop waits for milliseconds, 10 costs inferences 7 % of their rate."""
_START_CHECKS: Final = 100
_START_CHECK_SECONDS: Final = 0.001


def lower_native_threads() -> None:
    """Set a priority below that of the main thread for all threads that Python has not started. Blocks briefly.

    They compute: OpenVINO's, and those of libraries of user code. The event loop then gets a core as soon as it has
    work, instead of waiting for milliseconds while inferences take all cores. Only Linux has priorities of threads.
    """
    if sys.platform != "linux":
        return
    threads = [int(each.name) for each in Path("/proc/self/task").iterdir()]
    for _ in range(_START_CHECKS):
        # A Python thread that is starting has no id yet.
        known = {each.native_id for each in threading.enumerate()}
        if None not in known:
            break
        time.sleep(_START_CHECK_SECONDS)
    else:
        return
    nice = os.getpriority(os.PRIO_PROCESS, os.getpid()) + _STEP
    for each in threads:
        if each not in known:
            with suppress(OSError):  # ended, or refused by the container's seccomp profile
                os.setpriority(os.PRIO_PROCESS, each, nice)
