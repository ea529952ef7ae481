"""The pool of threads for user code."""

from __future__ import annotations

import contextvars
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
import trio
import trio.testing

from ovmstrio.work.threads.worker_threads import ThreadCall, WorkerThreads
from tests.support.waits import WAIT_SECONDS, until_async


@asynccontextmanager
async def pool(**settings: Any) -> AsyncIterator[WorkerThreads]:
    """Run a pool."""
    threads = WorkerThreads(**settings)
    async with trio.open_nursery() as nursery:
        await nursery.start(threads.run)
        try:
            yield threads
        finally:
            with trio.CancelScope(shield=True):
                await threads.aclose()


def busy_threads() -> int:
    """Count the threads that are in a worker's loop."""
    count = 0
    for frame in sys._current_frames().values():  # noqa: SLF001 - threads outlive the pool that counts them
        inner: Any = frame
        while inner is not None:
            count += inner.f_code is WorkerThreads._work.__code__  # noqa: SLF001 - as above
            inner = inner.f_back
    return count


async def test_a_call_gives_what_its_function_gives() -> None:
    """In another thread, with its arguments and the caller's context."""
    variable = contextvars.ContextVar("variable", default="")
    async with pool() as threads:
        variable.set("caller's")
        given = await threads.call(lambda a, b: (a, b, variable.get(), threading.get_ident()), 1, "2")
        assert given[:3] == (1, "2", "caller's")
        assert given[3] != threading.get_ident()
        await threads.call(variable.set, "thread's")
        assert variable.get() == "caller's"


@pytest.mark.parametrize("kind", [ValueError, SystemExit, KeyboardInterrupt])
async def test_a_call_raises_what_its_function_raises(kind: type[BaseException]) -> None:
    """The thread goes on with other calls."""

    def fail() -> None:
        raise kind("text")

    async with pool(limit=1) as threads:
        raised: BaseException | None = None
        try:
            await threads.call(fail)
        except BaseException as error:  # noqa: BLE001 - any class can come
            raised = error
        assert isinstance(raised, kind)
        assert await threads.call(lambda: 1) == 1


async def test_many_calls_share_the_threads_that_are_allowed() -> None:
    """No more run at once, all come to their end, and each gets its own result."""
    running, most = 0, 0
    lock = threading.Lock()
    results = []

    def work(number: int) -> int:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0)
        with lock:
            running -= 1
        return number

    async def one(number: int) -> None:
        results.append((number, await threads.call(work, number)))

    async with pool(limit=3) as threads:
        async with trio.open_nursery() as nursery:
            for number in range(200):
                nursery.start_soon(one, number)
        assert threads.threads <= 3
    assert most <= 3
    assert sorted(results) == [(number, number) for number in range(200)]


async def test_a_waiting_call_leaves_the_queue() -> None:
    """One that is cancelled before its turn never runs."""
    gate = threading.Event()
    ran: list[int] = []
    async with pool(limit=1) as threads, trio.open_nursery() as nursery:
        nursery.start_soon(threads.call, gate.wait, WAIT_SECONDS)
        await until_async(lambda: busy_threads() == 1)
        with trio.move_on_after(0.01) as scope:
            await threads.call(ran.append, 1)
        assert scope.cancelled_caught
        gate.set()
        await threads.call(ran.append, 2)
    assert ran == [2]


async def test_a_running_call_is_told_and_waited_for() -> None:
    """A function that heeds the caller's leaving has ended when the caller goes on."""
    stop, started, ended = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        started.set()
        stop.wait()
        ended.set()

    async def caller() -> None:
        with trio.CancelScope() as scope:
            scopes.append(scope)
            await threads.call(work, on_cancel=stop.set)
        assert scope.cancelled_caught
        assert ended.is_set()

    scopes: list[trio.CancelScope] = []
    async with pool() as threads, trio.open_nursery() as nursery:
        nursery.start_soon(caller)
        await until_async(started.is_set)
        scopes[0].cancel()
    assert threads.stuck == 0


async def test_a_call_that_does_not_end_is_given_up() -> None:
    """Its thread counts as stuck and another does its work; it is forgotten when it ends after all."""
    gate, started = threading.Event(), threading.Event()

    def work() -> None:
        started.set()
        gate.wait()

    async with pool(limit=1, grace_seconds=0.02) as threads:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(threads.call, work)
            await until_async(started.is_set)
            nursery.cancel_scope.cancel()
        assert threads.stuck == 1
        assert await threads.call(lambda: "other") == "other"
        gate.set()
        await until_async(lambda: threads.stuck == 0)
        assert await threads.call(lambda: "again") == "again"
    await until_async(lambda: busy_threads() == 0)


async def give_up(threads: WorkerThreads, job: ThreadCall) -> None:
    """Lose patience with a call that runs."""
    await until_async(lambda: job.worker is not None)
    assert not await threads.finish(job)


async def test_stuck_threads_are_not_replaced_for_ever() -> None:
    """With twice the limit of threads calls wait, until one ends."""
    gate = threading.Event()
    async with pool(limit=2, grace_seconds=0) as threads:
        for _ in range(2):
            await give_up(threads, threads.start(gate.wait))
        assert threads.stuck == 2
        jobs = [threads.start(gate.wait) for _ in range(3)]
        for job in jobs[:2]:
            await give_up(threads, job)
        await trio.testing.wait_all_tasks_blocked()
        assert jobs[2].worker is None
        gate.set()
        assert await threads.finish(jobs[2], 5)
    await until_async(lambda: busy_threads() == 0)


async def test_the_pool_ends_without_a_stuck_thread() -> None:
    """Closing waits for the grace and not for what never ends."""
    gate = threading.Event()
    async with pool(grace_seconds=0.02) as threads:
        job = threads.start(gate.wait)
        await until_async(lambda: job.worker is not None)
        with trio.fail_after(WAIT_SECONDS):
            await threads.aclose()
    assert busy_threads() == 1
    gate.set()
    await until_async(lambda: busy_threads() == 0)


async def test_no_thread_is_left_after_the_end() -> None:
    """Idle threads end with the pool, or after some seconds without work."""
    async with pool(idle_seconds=0.02) as threads:
        async with trio.open_nursery() as nursery:
            for _ in range(8):
                nursery.start_soon(threads.call, time.sleep, 0)
        await until_async(lambda: threads.threads == 0)
        assert busy_threads() == 0
        await threads.call(time.sleep, 0)
    await until_async(lambda: busy_threads() == 0)


async def test_calls_come_while_threads_leave() -> None:
    """A thread that goes for want of work does not leave a call behind."""
    async with pool(limit=1, idle_seconds=0) as threads:
        with trio.fail_after(WAIT_SECONDS):
            for number in range(300):
                assert await threads.call(abs, number) == number


async def test_the_pool_outlives_the_cancellation_of_its_owner() -> None:
    """Those who clean up still have threads."""
    cleaned = []
    async with trio.open_nursery() as nursery:
        threads = WorkerThreads()
        await nursery.start(threads.run)
        nursery.cancel_scope.cancel()
        with trio.CancelScope(shield=True):
            cleaned.append(await threads.call(lambda: "cleaned"))
            await threads.aclose()
    assert cleaned == ["cleaned"]


async def test_a_pool_that_does_not_run_says_so() -> None:
    """Before its start and after its end; closing it then does nothing."""
    threads = WorkerThreads()
    await threads.aclose()
    with pytest.raises(RuntimeError, match="not loaded yet, or was closed"):
        await threads.call(print)
    async with trio.open_nursery() as nursery:
        await nursery.start(threads.run)
    async with pool() as other:
        pass
    with pytest.raises(RuntimeError, match="not loaded yet, or was closed"):
        await other.call(print)


async def test_jobs_report_their_end_on_the_event_loop() -> None:
    """Also when nobody waits for them."""
    here = threading.get_ident()
    done = trio.Event()
    seen = []

    def finished() -> None:
        seen.append(threading.get_ident())
        done.set()

    async with pool() as threads:
        job = threads.start(lambda: 7, on_done=finished)
        await done.wait()
        assert (job.is_done, job.value, seen) == (True, 7, [here])
        assert await threads.finish(job)


async def test_a_call_is_a_checkpoint() -> None:
    """Who is cancelled already calls nothing."""
    ran: list[int] = []
    async with pool() as threads:
        with trio.CancelScope() as scope:
            scope.cancel()
            await threads.call(ran.append, 1)
        assert scope.cancelled_caught
    assert ran == []


async def test_a_caller_may_leave_its_call_to_itself() -> None:
    """Which goes on in its thread, while the caller goes on at once."""
    begun, may_end = threading.Event(), threading.Event()
    ended: list[bool] = []

    def work() -> None:
        begun.set()
        ended.append(may_end.wait(60))

    async with pool(grace_seconds=60) as threads:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(threads.call, work, may_leave=True))
            await until_async(begun.is_set)
            nursery.cancel_scope.cancel()
        assert ended == []
        may_end.set()
        await until_async(lambda: ended == [True])
        assert await threads.call(lambda: 7) == 7
        assert threads.stuck == 0


async def test_a_strict_pool_has_no_more_threads_than_it_may() -> None:
    """What does not come back keeps its place; others wait for it."""
    begun, may_end = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        may_end.wait(60)

    done: list[int] = []
    async with pool(limit=1, grace_seconds=0.01, is_strict=True) as threads, trio.open_nursery() as nursery:
        async with trio.open_nursery() as leaving:
            leaving.start_soon(threads.call, wait)
            await until_async(begun.is_set)
            leaving.cancel_scope.cancel()
        nursery.start_soon(threads.call, done.append, 1)
        with trio.move_on_after(0.05):
            await until_async(lambda: done)
        assert (done, threads.stuck) == ([], 0)
        may_end.set()
    assert done == [1]


async def test_threads_may_never_go_idle() -> None:
    """So that calls always find the same ones."""
    async with pool(limit=1, idle_seconds=None) as threads:
        one = await threads.call(threading.get_ident)
        await trio.sleep(0.05)
        assert await threads.call(threading.get_ident) == one
        assert busy_threads() == 1


async def left_alone(threads: WorkerThreads, work: Callable[[], Any], **options: Any) -> None:
    """Begin a call and leave it."""
    began = threading.Event()

    def begin() -> Any:
        began.set()
        return work()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(threads.call, begin, may_leave=True, **options))
        await until_async(began.is_set)
        nursery.cancel_scope.cancel()


async def test_what_a_call_gives_whose_caller_has_left_is_discarded_once() -> None:
    """In its thread; what a caller takes is not discarded, nor is there anything if the call fails."""
    gate = threading.Event()
    discarded: list[Any] = []

    def discard(value: object) -> None:
        discarded.append((value, threading.get_ident() != here))

    def fail() -> None:
        gate.wait(WAIT_SECONDS)
        raise ValueError

    here = threading.get_ident()
    async with pool() as threads:
        assert await threads.call(lambda: "taken", may_leave=True, discard=discard) == "taken"
        await left_alone(threads, lambda: gate.wait(WAIT_SECONDS), discard=discard)
        await left_alone(threads, fail, discard=discard)
        assert (threads.abandoned, discarded) == (2, [])
        gate.set()
        with trio.fail_after(WAIT_SECONDS):
            await threads.idle()
    assert (threads.abandoned, discarded) == (0, [(True, True)])


async def test_what_is_made_while_the_caller_leaves_is_discarded_once() -> None:
    """Whichever of the two comes first, however often it is tried."""
    kept: set[int] = set()
    made: list[int] = []
    discarded: list[int] = []

    def make(number: int) -> int:
        made.append(number)
        return number

    async def take(number: int, scope: trio.CancelScope) -> None:
        with scope:
            kept.add(await threads.call(make, number, may_leave=True, discard=discarded.append))

    async with pool(limit=2) as threads:
        for number in range(300):
            scope = trio.CancelScope()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(take, number, scope)
                for _ in range(number % 3):
                    await trio.lowlevel.checkpoint()
                if number % 5:
                    while number not in made and number % 3:
                        await trio.lowlevel.checkpoint()
                scope.cancel()
        await threads.idle()
    assert sorted([*discarded, *kept]) == sorted(made)


async def test_calls_are_refused_while_too_many_go_on_without_callers() -> None:
    """In the words of the pool's user, who is told of each that is left; those that wait for a place are not."""
    gate = threading.Event()
    told: list[int] = []

    def refusal(abandoned: int) -> Exception | None:
        return TimeoutError(f"{abandoned} do not end") if abandoned >= 2 else None

    async with pool(limit=2, is_strict=True, refusal=refusal, told_of_leaving=told.append) as threads:
        for _ in range(2):
            await left_alone(threads, gate.wait)
        assert (told, threads.abandoned, threads.is_busy) == ([1, 2], 2, True)
        with pytest.raises(TimeoutError, match="2 do not end"):
            await threads.call(print)
        gate.set()
        with trio.fail_after(WAIT_SECONDS):
            await threads.idle()
        assert (threads.abandoned, threads.is_busy) == (0, False)
        assert await threads.call(lambda: 7) == 7


async def test_a_pool_may_end_with_its_owner() -> None:
    """It leaves a thread behind that is busy, which ends with what it does."""
    gate = threading.Event()
    async with trio.open_nursery() as nursery:
        threads = WorkerThreads(idle_seconds=None)
        await nursery.start(partial(threads.run, is_shielded=False))
        await threads.call(print)
        await left_alone(threads, gate.wait)
        nursery.cancel_scope.cancel()
    assert busy_threads() >= 1
    gate.set()
    await until_async(lambda: busy_threads() == 0)


async def test_who_is_cancelled_while_a_pool_starts_need_not_close_it() -> None:
    """It has not begun to outlive anybody."""
    with trio.fail_after(WAIT_SECONDS):
        async with trio.open_nursery() as nursery:
            with trio.CancelScope() as scope:
                scope.cancel()
                await nursery.start(WorkerThreads().run)
            assert scope.cancelled_caught
