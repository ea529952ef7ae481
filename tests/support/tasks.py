"""A nursery for what a test opens and closes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio


@asynccontextmanager
async def hosting() -> AsyncIterator[trio.Nursery]:
    """Give a nursery that ends when everything in it has; an error of the block comes out as it is, in no group."""
    failure: Exception | None = None
    async with trio.open_nursery() as nursery:
        try:
            yield nursery
        except Exception as error:  # noqa: BLE001 - it is raised below
            failure = error
    if failure is not None:
        raise failure
