"""Counts calls of Python functions in the server's thread, which say what a request costs whatever else runs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import trio

__all__ = ["calls_of_one"]


async def calls_of_one(drive: Callable[[int], None]) -> float:
    """Count what one more request costs, at best of a few times; ``drive`` makes so many, in another thread.

    Calls of other threads are not counted.
    """
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    async def calls_of(requests: int) -> int:
        nonlocal calls
        calls = 0
        sys.setprofile(count)
        try:
            await trio.to_thread.run_sync(drive, requests)
        finally:
            sys.setprofile(None)
        return calls

    await trio.to_thread.run_sync(drive, 20)
    rounds = [(await calls_of(10), await calls_of(210)) for _ in range(5)]
    # What else runs in the thread only adds calls, to the few as to the many; trio's order of tasks is luck.
    return (min(many for _, many in rounds) - min(few for few, _ in rounds)) / 200
