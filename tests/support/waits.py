"""Waiting for a state in tests, with one bound for all of them, and the latency of a server under load."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

import httpx

if TYPE_CHECKING:
    from tests.support.processes import OvmsProcess

__all__ = ["WAIT_SECONDS", "until", "worst_wait"]

WAIT_SECONDS = 60
"""Bound of every wait in tests: far beyond what a busy machine needs, so that only a fault reaches it."""

_PAUSE_SECONDS = 0.01

T = TypeVar("T")


def until(holds: Callable[[], T], *, seconds: float = WAIT_SECONDS, why: Callable[[], object] | None = None) -> T:
    """Poll a condition until it is true, and return its value.

    Args:
        holds: the condition; it may raise to end the wait, for example because a process has exited.
        seconds: bound of the wait.
        why: the message for a failure, created when the bound is reached.

    Raises:
        AssertionError: the condition is still false after ``seconds``.
    """
    end = time.monotonic() + seconds
    while not (value := holds()):
        assert time.monotonic() < end, why() if why else f"the condition is still false after {seconds} s"
        threading.Event().wait(_PAUSE_SECONDS)
    return value


@contextmanager
def worst_wait(server: OvmsProcess) -> Iterator[list[float]]:
    """Ask a server again and again on a connection of its own; gives how many seconds each answer took."""
    seconds: list[float] = []
    over = threading.Event()

    def ask() -> None:
        with httpx.Client(base_url=server.rest, timeout=60) as client:
            while not over.is_set():
                begun = time.perf_counter()
                client.get("/v2/health/live").raise_for_status()
                seconds.append(time.perf_counter() - begun)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield seconds
    finally:
        over.set()
        thread.join()
