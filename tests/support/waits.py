"""How long a server keeps its other callers waiting."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from tests.support.processes import OvmsProcess

__all__ = ["worst_wait"]


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
