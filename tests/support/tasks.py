"""Tasks of tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import TypeVar

import trio

R = TypeVar("R")
T = TypeVar("T")


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


async def gather(function: Callable[[T], Awaitable[R]], values: Iterable[T]) -> list[R]:
    """Call an async function with all values at the same time, and return its results in the order of the values."""
    results: dict[int, R] = {}

    async def call(number: int, value: T) -> None:
        results[number] = await function(value)

    async with trio.open_nursery() as nursery:
        for number, value in enumerate(values):
            nursery.start_soon(call, number, value)
    return [results[number] for number in range(len(results))]
