"""Waiting for what other threads do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import trio

__all__ = ["until"]


async def until(true: Callable[[], Any]) -> None:
    """Return once something holds that a thread brings about; fails after some seconds."""
    with trio.fail_after(5):
        while not true():  # noqa: ASYNC110 - user code in a thread sets no event of trio's
            await trio.sleep(0.001)
