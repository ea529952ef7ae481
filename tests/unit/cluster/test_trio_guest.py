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


def _bridged(test: Callable[[TrioGuest], Awaitable[None]]) -> Callable[[], None]:
    """Run a test on an asyncio loop with a guest that idles."""

    async def run() -> None:
        async with _bridge() as guest:
            await test(guest)

    # A plain function: pytest would take the parameter of a wrapped one for a fixture.
    return lambda: asyncio.run(run())


@_bridged
async def test_errors_are_raised_to_the_caller(guest: TrioGuest) -> None:
    async def fail() -> None:
        await trio.lowlevel.checkpoint()
        raise Overloaded("full")

    with pytest.raises(Overloaded, match="full"):
        await guest.call(fail)


@_bridged
async def test_a_cancelled_call_is_cancelled_on_trio(guest: TrioGuest) -> None:
    ended: list[str] = []
    begun, loop = asyncio.Event(), asyncio.get_running_loop()

    async def wait() -> None:
        try:
            loop.call_soon_threadsafe(begun.set)
            await trio.sleep_forever()
        finally:
            ended.append("cancelled")

    call = asyncio.ensure_future(guest.call(wait))
    await begun.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert await guest.call(_twice, 4) == 8
    assert ended == ["cancelled"]


@_bridged
async def test_trio_can_call_asyncio(guest: TrioGuest) -> None:
    async def answer(value: int) -> int:
        assert sniffio.current_async_library() == "asyncio"
        await asyncio.sleep(0)
        if value < 0:
            raise Overloaded("negative")
        return value + 1

    async def call_host(value: int) -> int:
        return await guest.ask(answer, value)

    with pytest.raises(Overloaded, match="negative"):
        await guest.call(call_host, -1)
    assert await guest.call(call_host, 1) == 2


@_bridged
async def test_a_trio_deadline_cancels_the_asyncio_work(guest: TrioGuest) -> None:
    ended: list[str] = []

    async def answer() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    async def call_host() -> bool:
        with trio.move_on_after(0.05) as scope:
            await guest.ask(answer)
        return scope.cancelled_caught

    assert await guest.call(call_host)
    await asyncio.sleep(0)
    assert ended == ["cancelled"]


@_bridged
async def test_calls_without_checkpoints_finish_in_the_same_turn(guest: TrioGuest) -> None:
    turns: list[int] = []

    async def count() -> None:
        while True:
            turns.append(1)
            await asyncio.sleep(0)

    async def double(value: int) -> int:
        return 2 * value

    # A thread still waits for the first call, as it has waited for the start.
    await guest.call(double, 0)
    counting = asyncio.ensure_future(count())
    threads = threading.active_count()
    assert [await guest.call(double, value) for value in range(20)] == list(range(0, 40, 2))
    # Idle threads of other tests may end meanwhile.
    assert threading.active_count() <= threads
    counting.cancel()
    assert turns == []


@_bridged
async def test_concurrent_calls_with_threads_and_timers_all_return(guest: TrioGuest) -> None:
    async def double(value: int) -> int:
        await asyncio.sleep(0)
        return 2 * value

    async def work(value: int) -> int:
        threaded = await trio.to_thread.run_sync(lambda: value + 1)
        await trio.sleep(0.001 * (value % 3))
        return await guest.ask(double, threaded)

    results = await asyncio.gather(*(guest.call(work, value) for value in range(60)))
    assert results == [2 * (value + 1) for value in range(60)]


async def _failing(until: Any, *, task_status: trio.TaskStatus[str]) -> None:
    async with trio.open_nursery():
        raise ConfigError([Problem("no such model")])


@pytest.mark.parametrize(
    ("program", "error", "text", "is_cancelled"),
    [
        pytest.param(_failing, ConfigError, "no such model", False, id="a program that fails"),
        pytest.param(_idle, asyncio.CancelledError, "^$", True, id="a start that is cancelled"),
    ],
)
def test_a_guest_that_cannot_start_raises_and_ends(
    program: Any, error: type[BaseException], text: str, *, is_cancelled: bool
) -> None:
    async def run() -> None:
        guest = TrioGuest()
        async with asyncio.timeout(WAIT_SECONDS):
            starting = asyncio.ensure_future(guest.start(program))
            await asyncio.sleep(0)
            if is_cancelled:
                starting.cancel()
            with pytest.raises(error, match=text):
                await starting
            await guest.aclose()
        assert guest.has_ended

    asyncio.run(run())


def test_a_later_failure_is_logged() -> None:
    async def program(until: Any, *, task_status: trio.TaskStatus[str]) -> None:
        task_status.started("begun")
        await trio.lowlevel.checkpoint()
        raise RuntimeError("a wire was loose")

    async def run() -> None:
        async with _bridge(program) as guest:
            async with asyncio.timeout(WAIT_SECONDS):
                while not guest.has_ended:  # noqa: ASYNC110 - a guest has no event of its end
                    await asyncio.sleep(0.005)

    with structlog.testing.capture_logs() as logged:
        asyncio.run(run())
    assert [(each["event"], str(each["exc_info"])) for each in logged] == [
        ("replica server failed", "a wire was loose")
    ]


def test_calls_at_and_after_the_end_are_refused() -> None:
    async def run() -> None:
        guest = TrioGuest()
        async with asyncio.timeout(WAIT_SECONDS):
            await guest.start(_idle)
            call = asyncio.ensure_future(guest.call(trio.sleep_forever))
            assert await guest.call(_twice, 1) == 2
            await guest.aclose()
            with pytest.raises(NotReady, match="the replica has stopped"):
                await call
            with pytest.raises(NotReady, match="the replica has stopped"):
                await guest.call(_twice, 1)

    asyncio.run(run())


def test_deadlines_and_threads_wake_trio_without_calls() -> None:
    async def run() -> list[str]:
        heard: list[str] = []
        done = asyncio.Event()

        async def program(until: Any, *, task_status: trio.TaskStatus[str]) -> None:
            async def listen() -> None:
                await trio.sleep(0.01)
                heard.append("deadline")
                woken = trio.Event()
                token = trio.lowlevel.current_trio_token()
                worker = threading.Timer(0.01, token.run_sync_soon, [woken.set])
                worker.start()
                await woken.wait()
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
