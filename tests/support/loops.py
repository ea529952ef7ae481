"""A trio loop in a thread, and the order in which trio runs tasks."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Iterator, MutableSequence
from contextlib import contextmanager
from random import Random
from typing import Any, TypeVar

import pytest
import trio
import trio._core._run as trio_run
import trio.testing

T = TypeVar("T")


class TrioThread:
    """Thread with a trio loop that runs one call at a time until all its tasks are blocked."""

    def __init__(self) -> None:
        self._started = threading.Event()
        self._stop: trio.Event
        self._token: trio.lowlevel.TrioToken
        self._nursery: trio.Nursery
        self._thread = threading.Thread(target=trio.run, args=(self._main,))
        self._thread.start()
        self._started.wait()

    async def _main(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self._stop = trio.Event()
        async with trio.open_nursery() as self._nursery:
            self._started.set()
            await self._stop.wait()

    def run(self, call: Callable[..., Awaitable[T]], *args: Any) -> T:
        try:
            return trio.from_thread.run(call, *args, trio_token=self._token)
        finally:
            self._settle()

    def call(self, call: Callable[..., T], *args: Any) -> T:
        try:
            return trio.from_thread.run_sync(call, *args, trio_token=self._token)
        finally:
            self._settle()

    def start(self, call: Callable[..., Awaitable[object]], *args: Any) -> None:
        trio.from_thread.run_sync(self._nursery.start_soon, call, *args, trio_token=self._token)
        self._settle()

    def close(self) -> None:
        trio.from_thread.run_sync(self._stop.set, trio_token=self._token)
        self._thread.join()

    def _settle(self) -> None:
        trio.from_thread.run(trio.testing.wait_all_tasks_blocked, trio_token=self._token)


COINS = ("forward", "backward", "both")
"""Tasks of one moment run as they became runnable, the other way round, or now so and now so."""


class _Coin(Random):
    """Random source of trio whose order of tasks is fixed by the test."""

    def __init__(self, coin: str) -> None:
        super().__init__(5)
        self._sides = {"forward": [0.9], "backward": [0.1], "both": [0.1, 0.9, 0.9, 0.1, 0.1]}[coin]
        self._thrown = 0

    def random(self) -> float:
        self._thrown += 1
        return self._sides[self._thrown % len(self._sides)]

    def shuffle(self, x: MutableSequence[Any]) -> None:
        if self.random() < 0.5:
            x.reverse()


@contextmanager
def scheduled(coin: str) -> Iterator[None]:
    """Schedule tasks in the order of :data:`COINS` until the end of the block."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(trio_run, "_r", _Coin(coin))
        yield
