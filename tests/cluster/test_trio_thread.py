"""The bridge between Ray's loop and trio's: results, errors, cancellation both ways, and the end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import sniffio
import structlog
import structlog.testing
import trio

from ovmstrio.cluster.ray.trio_thread import TrioThread
from ovmstrio.core.errors import ConfigError, NotReady, Overloaded, Problem

PATIENCE_SECONDS = 30


async def _idle(until: Callable[[], Awaitable[None]], *, task_status: trio.TaskStatus[str]) -> None:
    task_status.started("begun")
    await until()


@asynccontextmanager
async def _bridge(program: Any = _idle) -> AsyncIterator[TrioThread]:
    thread = TrioThread()
    async with asyncio.timeout(PATIENCE_SECONDS):
        assert await thread.start(program) == "begun"
        try:
            yield thread
        finally:
            await thread.aclose()


async def _twice(value: int) -> int:
    await trio.lowlevel.checkpoint()
    assert sniffio.current_async_library() == "trio"
    return 2 * value


def test_calls_run_on_trio_and_their_results_come_back() -> None:
    """Many side by side, each with its own result."""

    async def run() -> list[int]:
        async with _bridge() as thread:
            return await asyncio.gather(*(thread.call(_twice, value) for value in range(50)))

    assert asyncio.run(run()) == [2 * value for value in range(50)]


def test_an_error_is_raised_where_the_call_came_from() -> None:
    """As it was raised there."""

    async def fail() -> None:
        await trio.lowlevel.checkpoint()
        raise Overloaded("full")

    async def run() -> None:
        async with _bridge() as thread:
            with pytest.raises(Overloaded, match="full"):
                await thread.call(fail)

    asyncio.run(run())


def test_a_cancelled_call_has_its_work_cancelled() -> None:
    """And the loop goes on."""
    ended: list[str] = []

    async def wait(begun: asyncio.Event, loop: asyncio.AbstractEventLoop) -> None:
        try:
            loop.call_soon_threadsafe(begun.set)
            await trio.sleep_forever()
        finally:
            ended.append("cancelled")

    async def run() -> int:
        async with _bridge() as thread:
            begun = asyncio.Event()
            call = asyncio.ensure_future(thread.call(wait, begun, asyncio.get_running_loop()))
            await begun.wait()
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            return await thread.call(_twice, 4)

    assert asyncio.run(run()) == 8
    assert ended == ["cancelled"]


def test_questions_from_trio_are_answered_on_asyncio() -> None:
    """With results, and errors as they were raised."""

    async def answer(value: int) -> int:
        assert sniffio.current_async_library() == "asyncio"
        await asyncio.sleep(0)
        if value < 0:
            raise Overloaded("negative")
        return value + 1

    async def run() -> int:
        async with _bridge() as thread:

            async def ask(value: int) -> int:
                return await thread.ask(answer, value)

            with pytest.raises(Overloaded, match="negative"):
                await thread.call(ask, -1)
            return await thread.call(ask, 1)

    assert asyncio.run(run()) == 2


def test_who_stops_asking_has_the_answer_cancelled() -> None:
    """A deadline on the trio side ends the work on the other."""
    ended: list[str] = []

    async def answer() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    async def run() -> bool:
        async with _bridge() as thread:

            async def ask() -> bool:
                with trio.move_on_after(0.05) as scope:
                    await thread.ask(answer)
                return scope.cancelled_caught

            is_late = await thread.call(ask)
            await asyncio.sleep(0)
            return is_late

    assert asyncio.run(run())
    assert ended == ["cancelled"]


def test_what_cannot_start_says_so_where_it_was_started() -> None:
    """Not as a group of groups, and the thread has ended."""

    async def program(until: Any, *, task_status: trio.TaskStatus[str]) -> None:
        async with trio.open_nursery():
            raise ConfigError([Problem("no such model")])

    async def run() -> None:
        thread = TrioThread()
        async with asyncio.timeout(PATIENCE_SECONDS):
            with pytest.raises(ConfigError, match="no such model"):
                await thread.start(program)
            await thread.aclose()
        assert thread.has_ended

    asyncio.run(run())


def test_what_fails_later_is_told_in_the_log() -> None:
    """Nobody waits for it any more, and Ray starts another replica in its place."""

    async def program(until: Any, *, task_status: trio.TaskStatus[str]) -> None:
        task_status.started("begun")
        await trio.lowlevel.checkpoint()
        raise RuntimeError("a wire was loose")

    async def run() -> None:
        async with _bridge(program) as thread:
            await asyncio.shield(thread._ended)
            assert thread.has_ended

    with structlog.testing.capture_logs() as told:
        asyncio.run(run())
    assert [(each["event"], str(each["exc_info"])) for each in told] == [
        ("the server of a replica has failed", "a wire was loose")
    ]


def test_who_leaves_before_the_start_is_done_has_it_ended() -> None:
    """No thread is left behind, however early that is."""

    async def run() -> None:
        thread = TrioThread()
        async with asyncio.timeout(PATIENCE_SECONDS):
            starting = asyncio.ensure_future(thread.start(_idle))
            await asyncio.sleep(0)
            starting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await starting
            await thread.aclose()
        assert thread.has_ended

    asyncio.run(run())


def test_calls_that_are_left_at_the_end_are_told_that_it_has_come() -> None:
    """And so are those that come later."""

    async def run() -> None:
        thread = TrioThread()
        async with asyncio.timeout(PATIENCE_SECONDS):
            await thread.start(_idle)
            call = asyncio.ensure_future(thread.call(trio.sleep_forever))
            assert await thread.call(_twice, 1) == 2
            await thread.aclose()
            with pytest.raises(NotReady, match="the replica has ended"):
                await call
            with pytest.raises(NotReady, match="the replica has ended"):
                await thread.call(_twice, 1)

    asyncio.run(run())
