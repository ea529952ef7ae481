"""Calls of handlers that wait too long for a thread, a batch or a process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import trio
import trio.testing

from ovmstrio.core.errors import QueueTimeout
from ovmstrio.runtimes.handlers.handler import LoadedHandler
from tests.support.projects import opened
from tests.support.waits import until_async
from tests.unit.handlers.test_calls import HELD, let

WAITED = "nothing was free to run the call within 30 s .--queue_timeout.; try again later"


async def refused(call: Callable[[], Awaitable[object]]) -> None:
    """See that a call is refused for waiting."""
    with pytest.raises(QueueTimeout, match=WAITED) as caught:
        await call()
    assert caught.value.retry_after_seconds == 30


@dataclass(frozen=True, slots=True)
class Calls:
    handler: LoadedHandler
    nursery: trio.Nursery
    results: list[int] = field(default_factory=list)

    async def ask(self, payload: int) -> None:
        self.results.append(await self.handler.call("handle_post", payload=payload))


@asynccontextmanager
async def held(folder: Path) -> AsyncIterator[Calls]:
    """Open a handler whose thread call 1 has, until it is let go."""
    async with opened(folder, HELD, queue_timeout=30) as handler, trio.open_nursery() as nursery:
        calls = Calls(handler, nursery)
        nursery.start_soon(calls.ask, 1)
        await until_async(lambda: handler.instance.begun == [1])
        yield calls


async def test_a_call_that_waits_too_long_for_a_thread_is_refused(
    tmp_path: Path, mock_clock: trio.testing.MockClock
) -> None:
    """It is never made, while the one that has the thread goes on for any time, and later calls are made."""
    mock_clock.rate = 1
    async with held(tmp_path) as calls:
        handler = calls.handler
        async with trio.open_nursery() as waiting:
            waiting.start_soon(refused, lambda: handler.call("handle_post", payload=2))
            await trio.testing.wait_all_tasks_blocked()
            mock_clock.jump(29)
            await trio.testing.wait_all_tasks_blocked()
            assert waiting.child_tasks
            mock_clock.jump(2)
        mock_clock.jump(1000)
        let(handler.instance, 1, 3)
        await until_async(lambda: calls.results == [1])
        await calls.ask(3)
    assert calls.results == [1, 3]
    assert handler.instance.begun == [1, 3]


async def test_a_call_that_gets_a_thread_in_time_is_answered(
    tmp_path: Path, mock_clock: trio.testing.MockClock
) -> None:
    """However long it runs then."""
    mock_clock.rate = 1
    async with held(tmp_path) as calls:
        handler = calls.handler
        calls.nursery.start_soon(calls.ask, 2)
        await trio.testing.wait_all_tasks_blocked()
        mock_clock.jump(29)
        let(handler.instance, 1)
        await until_async(lambda: handler.instance.begun == [1, 2])
        mock_clock.jump(1000)
        await trio.testing.wait_all_tasks_blocked()
        let(handler.instance, 2)
    assert calls.results == [1, 2]


BATCHED = """
    import threading
    class Handler:
        def __init__(self):
            self.begun = []
            self.may_end = threading.Event()
        def handle_post(self, payload):
            self.begun.append(payload)
            self.may_end.wait(60)
            return payload
    """


async def test_a_call_that_waits_too_long_for_a_batch_is_refused(
    tmp_path: Path, mock_clock: trio.testing.MockClock
) -> None:
    """The time in which batches fill is not counted."""
    mock_clock.rate = 1
    text = "server_side_batching:\n  max_batch_size: 2\n  batch_interval_seconds: 10\n"
    async with opened(tmp_path, BATCHED, text, queue_timeout=20) as handler, trio.open_nursery() as nursery:

        async def ask(payload: int) -> None:
            await handler.call("handle_post", payload=payload)

        for payload in (1, 2):
            nursery.start_soon(ask, payload)
        await until_async(lambda: handler.instance.begun != [])
        async with trio.open_nursery() as waiting:
            waiting.start_soon(refused, lambda: handler.call("handle_post", payload=3))
            await trio.testing.wait_all_tasks_blocked()
            mock_clock.jump(31)
        handler.instance.may_end.set()
    assert [sorted(batch) for batch in handler.instance.begun] == [[1, 2]]
