"""Waiting for what other threads and processes do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import trio

__all__ = ["until"]


async def until(true: Callable[[], Any]) -> None:
    """Return once something holds that a thread or a process brings about; fails after two minutes."""
    with trio.fail_after(120):
        while not true():  # noqa: ASYNC110 - user code elsewhere sets no event of trio's
            await trio.sleep(0.001)
