"""A trio loop in a thread, for tests that are not coroutines themselves."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import trio
import trio.testing

T = TypeVar("T")


class TrioThread:
    """Runs one call at a time, with everything that it sets in motion, and then stands still."""

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
