"""Waiting for a state in tests, with one bound for all of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

import trio
from trio.testing import MockClock

WAIT_SECONDS = 60
"""Bound of every wait in tests: far beyond what a busy machine needs, so that only a fault reaches it."""

_PAUSE_SECONDS = 0.01
T = TypeVar("T")


def until(holds: Callable[[], T], *, seconds: float = WAIT_SECONDS, why: Callable[[], object] | None = None) -> T:
    """Poll a condition until it is true, and return its value; ``why`` makes the message of a failure.

    The condition may raise to end the wait, for example because a process has exited.
    """
    end = time.monotonic() + seconds
    while not (value := holds()):
        assert time.monotonic() < end, why() if why else f"the condition is still false after {seconds} s"
        threading.Event().wait(_PAUSE_SECONDS)
    return value


class Gate:
    """Gate that blocks threads until a test opens it, and counts the waiting threads."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self.arrivals = 0

    def wait(self) -> None:
        self.arrivals += 1
        self._open.wait(WAIT_SECONDS)

    def next_arrival(self) -> Callable[[], bool]:
        before = self.arrivals
        return lambda: self.arrivals > before

    def set(self) -> None:
        self._open.set()

    def clear(self) -> None:
        self._open.clear()
        self.arrivals = 0


async def until_async(holds: Callable[[], T]) -> T:
    """Poll a condition that threads, processes or other tasks bring about, and return its true value.

    The bound is of the real clock. A mock clock stands still meanwhile.
    """
    end = time.monotonic() + WAIT_SECONDS
    is_mocked = isinstance(trio.lowlevel.current_clock(), MockClock)
    while not (value := holds()):
        assert time.monotonic() < end, f"the condition is still false after {WAIT_SECONDS} s"
        if is_mocked:
            await trio.lowlevel.checkpoint()
        else:
            await trio.sleep(0.001)
    return value
