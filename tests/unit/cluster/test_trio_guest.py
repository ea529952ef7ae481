"""The bridge between Ray's loop and trio's: results, errors, cancellation both ways, and the end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import sniffio
import structlog
import structlog.testing
import trio

from ovmstrio.cluster.ray.trio_guest import TrioGuest
from ovmstrio.core.errors import ConfigError, NotReady, Overloaded, Problem
from tests.support.waits import WAIT_SECONDS


async def _idle(until: Callable[[], Awaitable[None]], *, task_status: trio.TaskStatus[str]) -> None:
    task_status.started("begun")
    await until()


@asynccontextmanager
async def _bridge(program: Any = _idle) -> AsyncIterator[TrioGuest]:
    guest = TrioGuest()
    async with asyncio.timeout(WAIT_SECONDS):
        assert await guest.start(program) == "begun"
        try:
            yield guest
        finally:
            await guest.aclose()


async def _twice(value: int) -> int:
    await trio.lowlevel.checkpoint()
    assert sniffio.current_async_library() == "trio"
    return 2 * value


def test_calls_run_on_trio_and_their_results_come_back() -> None:
    """Many side by side, each with its own result."""

    async def run() -> list[int]:
        async with _bridge() as guest:
            return await asyncio.gather(*(guest.call(_twice, value) for value in range(50)))

    assert asyncio.run(run()) == [2 * value for value in range(50)]


def test_an_error_is_raised_where_the_call_came_from() -> None:
    """As it was raised there."""

    async def fail() -> None:
        await trio.lowlevel.checkpoint()
        raise Overloaded("full")

    async def run() -> None:
        async with _bridge() as guest:
            with pytest.raises(Overloaded, match="full"):
                await guest.call(fail)

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
        async with _bridge() as guest:
            begun = asyncio.Event()
            call = asyncio.ensure_future(guest.call(wait, begun, asyncio.get_running_loop()))
            await begun.wait()
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            return await guest.call(_twice, 4)

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
        async with _bridge() as guest:

            async def ask(value: int) -> int:
                return await guest.ask(answer, value)

            with pytest.raises(Overloaded, match="negative"):
                await guest.call(ask, -1)
            return await guest.call(ask, 1)

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
        async with _bridge() as guest:

            async def ask() -> bool:
                with trio.move_on_after(0.05) as scope:
                    await guest.ask(answer)
                return scope.cancelled_caught

            is_late = await guest.call(ask)
            await asyncio.sleep(0)
            return is_late

    assert asyncio.run(run())
    assert ended == ["cancelled"]


def test_what_cannot_start_says_so_where_it_was_started() -> None:
    """Not as a group of groups, and the loop has ended."""

    async def program(until: Any, *, task_status: trio.TaskStatus[str]) -> None:
        async with trio.open_nursery():
            raise ConfigError([Problem("no such model")])

    async def run() -> None:
        guest = TrioGuest()
        async with asyncio.timeout(WAIT_SECONDS):
            with pytest.raises(ConfigError, match="no such model"):
                await guest.start(program)
            await guest.aclose()
        assert guest.has_ended

    asyncio.run(run())


def test_what_fails_later_is_told_in_the_log() -> None:
    """Nobody waits for it any more, and Ray starts another replica in its place."""

    async def program(until: Any, *, task_status: trio.TaskStatus[str]) -> None:
        task_status.started("begun")
        await trio.lowlevel.checkpoint()
        raise RuntimeError("a wire was loose")

    async def run() -> None:
        async with _bridge(program) as guest:
            async with asyncio.timeout(WAIT_SECONDS):
                while not guest.has_ended:  # noqa: ASYNC110 - a guest has no event of its end
                    await asyncio.sleep(0.005)

    with structlog.testing.capture_logs() as told:
        asyncio.run(run())
    assert [(each["event"], str(each["exc_info"])) for each in told] == [
        ("the server of a replica has failed", "a wire was loose")
    ]


def test_who_leaves_before_the_start_is_done_has_it_ended() -> None:
    """No loop is left behind, however early that is."""

    async def run() -> None:
        guest = TrioGuest()
        async with asyncio.timeout(WAIT_SECONDS):
            starting = asyncio.ensure_future(guest.start(_idle))
            await asyncio.sleep(0)
            starting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await starting
            await guest.aclose()
        assert guest.has_ended

    asyncio.run(run())


def test_calls_that_are_left_at_the_end_are_told_that_it_has_come() -> None:
    """And so are those that come later."""

    async def run() -> None:
        guest = TrioGuest()
        async with asyncio.timeout(WAIT_SECONDS):
            await guest.start(_idle)
            call = asyncio.ensure_future(guest.call(trio.sleep_forever))
            assert await guest.call(_twice, 1) == 2
            await guest.aclose()
            with pytest.raises(NotReady, match="the replica has ended"):
                await call
            with pytest.raises(NotReady, match="the replica has ended"):
                await guest.call(_twice, 1)

    asyncio.run(run())


def test_work_that_does_not_wait_is_done_before_the_host_has_another_turn() -> None:
    """And by no other thread."""

    async def run() -> tuple[list[int], int]:
        turns: list[int] = []

        async def count() -> None:
            while True:
                turns.append(1)
                await asyncio.sleep(0)

        async def at_once(value: int) -> int:
            return 2 * value

        async with _bridge() as guest:
            # A thread waits for the first one still, as it has waited for the start.
            await guest.call(at_once, 0)
            counting = asyncio.ensure_future(count())
            threads = threading.active_count()
            found = [await guest.call(at_once, value) for value in range(20)]
            # Idle ones of others may end meanwhile.
            assert threading.active_count() <= threads
            counting.cancel()
            return found, len(turns)

    assert asyncio.run(run()) == ([2 * value for value in range(20)], 0)


def test_deadlines_and_other_threads_are_heard_while_nobody_calls() -> None:
    """What runs beside the calls needs none of them."""

    async def run() -> list[str]:
        heard: list[str] = []
        done = asyncio.Event()

        async def program(until: Any, *, task_status: trio.TaskStatus[str]) -> None:
            async def listen() -> None:
                await trio.sleep(0.01)
                heard.append("deadline")
                told = trio.Event()
                token = trio.lowlevel.current_trio_token()
                worker = threading.Timer(0.01, token.run_sync_soon, [told.set])
                worker.start()
                await told.wait()
                heard.append("thread")
                await trio.to_thread.run_sync(worker.join)
                done.set()

            async with trio.open_nursery() as nursery:
                nursery.start_soon(listen)
                task_status.started("begun")
                await until()

        async with _bridge(program):
            await done.wait()
        return heard

    assert asyncio.run(run()) == ["deadline", "thread"]


def test_calls_that_wait_for_threads_and_questions_side_by_side_all_come_back() -> None:
    """Whatever the loop waits by: a thread that waits for events, or the host's timers."""

    async def double(value: int) -> int:
        await asyncio.sleep(0)
        return 2 * value

    async def run() -> list[int]:
        async with _bridge() as guest:

            async def work(value: int) -> int:
                threaded = await trio.to_thread.run_sync(lambda: value + 1)
                await trio.sleep(0.001 * (value % 3))
                return await guest.ask(double, threaded)

            return await asyncio.gather(*(guest.call(work, value) for value in range(60)))

    assert asyncio.run(run()) == [2 * (value + 1) for value in range(60)]
