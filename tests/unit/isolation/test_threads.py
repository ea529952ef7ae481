from __future__ import annotations

import contextvars
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import trio
import trio.testing

from ovmstrio.isolation.thread_pool import ThreadCall, WorkerThreads, release_place_while_waiting
from tests.support.waits import WAIT_SECONDS, until_async


@asynccontextmanager
async def _pool(**settings: Any) -> AsyncIterator[WorkerThreads]:
    threads = WorkerThreads(**settings)
    async with trio.open_nursery() as nursery:
        await nursery.start(threads.run)
        try:
            yield threads
        finally:
            with trio.CancelScope(shield=True):
                await threads.aclose()


def _busy_threads() -> int:
    count = 0
    for frame in sys._current_frames().values():  # noqa: SLF001 - threads outlive the pool that counts them
        inner: Any = frame
        while inner is not None:
            count += inner.f_code is WorkerThreads._work.__code__  # noqa: SLF001 - as above
            inner = inner.f_back
    return count


async def test_call_returns_the_value_of_its_function_in_the_context_of_the_caller() -> None:
    variable = contextvars.ContextVar("variable", default="")
    async with _pool() as threads:
        variable.set("caller's")
        given = await threads.call(lambda a, b: (a, b, variable.get(), threading.get_ident()), 1, "2")
        assert given[:3] == (1, "2", "caller's")
        assert given[3] != threading.get_ident()
        await threads.call(variable.set, "thread's")
        assert variable.get() == "caller's"


@pytest.mark.parametrize("kind", [ValueError, SystemExit, KeyboardInterrupt])
async def test_call_raises_the_error_of_its_function(kind: type[BaseException]) -> None:
    def fail() -> None:
        raise kind("text")

    async with _pool(limit=1) as threads:
        raised: BaseException | None = None
        try:
            await threads.call(fail)
        except BaseException as error:  # noqa: BLE001 - any class can come
            raised = error
        assert isinstance(raised, kind)
        assert await threads.call(lambda: 1) == 1


@pytest.mark.parametrize("between_turns", [nullcontext, release_place_while_waiting])
async def test_limit_bounds_concurrent_calls(between_turns: Callable[[], AbstractContextManager[object]]) -> None:
    running, most, lock = 0, 0, threading.Lock()
    results = []

    def work(number: int) -> int:
        nonlocal running, most
        for _ in range(3):
            with lock:
                running += 1
                most = max(most, running)
            time.sleep(0)
            with lock:
                running -= 1
            with between_turns():
                pass
        return number

    async def one(number: int) -> None:
        results.append((number, await threads.call(work, number)))

    async with _pool(limit=3, idle_seconds=0.001) as threads:
        with trio.fail_after(WAIT_SECONDS):
            async with trio.open_nursery() as nursery:
                for number in range(200):
                    nursery.start_soon(one, number)
        await until_async(lambda: threads.threads == 0)
    assert most <= 3
    assert sorted(results) == [(number, number) for number in range(200)]


async def test_cancelled_call_in_the_queue_never_runs() -> None:
    gate = threading.Event()
    ran: list[int] = []
    async with _pool(limit=1) as threads, trio.open_nursery() as nursery:
        nursery.start_soon(threads.call, gate.wait, WAIT_SECONDS)
        await until_async(lambda: _busy_threads() == 1)
        with trio.move_on_after(0.01) as scope:
            await threads.call(ran.append, 1)
        assert scope.cancelled_caught
        gate.set()
        await threads.call(ran.append, 2)
    assert ran == [2]


async def _begin_and_cancel(threads: WorkerThreads, work: Callable[[], Any], **options: Any) -> None:
    began = threading.Event()

    def begin() -> Any:
        began.set()
        return work()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(threads.call, begin, **options))
        await until_async(began.is_set)
        nursery.cancel_scope.cancel()


async def test_cancelled_call_ends_before_its_caller_goes_on() -> None:
    stop, ended = threading.Event(), list[bool]()
    async with _pool() as threads:
        await _begin_and_cancel(threads, lambda: ended.append(stop.wait(WAIT_SECONDS)), on_cancel=stop.set)
        assert (ended, threads.stuck) == ([True], 0)


async def test_call_that_ignores_cancellation_is_stuck_until_it_ends() -> None:
    gate = threading.Event()
    async with _pool(limit=1, grace_seconds=0.02) as threads:
        await _begin_and_cancel(threads, gate.wait)
        assert threads.stuck == 1
        assert await threads.call(lambda: "other") == "other"
        gate.set()
        await until_async(lambda: threads.stuck == 0)
        assert await threads.call(lambda: "again") == "again"
    await until_async(lambda: _busy_threads() == 0)


async def _give_up(threads: WorkerThreads, job: ThreadCall) -> None:
    await until_async(lambda: job.worker is not None)
    assert not await threads.finish(job)


async def test_stuck_threads_are_replaced_up_to_twice_the_limit() -> None:
    gate = threading.Event()
    async with _pool(limit=2, grace_seconds=0) as threads:
        for _ in range(2):
            await _give_up(threads, threads.start(gate.wait))
        assert threads.stuck == 2
        jobs = [threads.start(gate.wait) for _ in range(3)]
        for job in jobs[:2]:
            await _give_up(threads, job)
        await trio.testing.wait_all_tasks_blocked()
        assert jobs[2].worker is None
        gate.set()
        assert await threads.finish(jobs[2], 5)
    await until_async(lambda: _busy_threads() == 0)


async def test_close_does_not_wait_for_a_stuck_thread() -> None:
    gate = threading.Event()
    async with _pool(grace_seconds=0.02) as threads:
        job = threads.start(gate.wait)
        await until_async(lambda: job.worker is not None)
        with trio.fail_after(WAIT_SECONDS):
            await threads.aclose()
    assert _busy_threads() == 1
    gate.set()
    await until_async(lambda: _busy_threads() == 0)


async def test_idle_threads_end() -> None:
    async with _pool(idle_seconds=0.02) as threads:
        async with trio.open_nursery() as nursery:
            for _ in range(8):
                nursery.start_soon(threads.call, time.sleep, 0)
        await until_async(lambda: threads.threads == 0)
        assert _busy_threads() == 0
        await threads.call(time.sleep, 0)
    await until_async(lambda: _busy_threads() == 0)


async def test_idle_thread_that_ends_loses_no_call() -> None:
    async with _pool(limit=1, idle_seconds=0) as threads:
        with trio.fail_after(WAIT_SECONDS):
            for number in range(300):
                assert await threads.call(abs, number) == number


async def test_shielded_pool_outlives_the_cancellation_of_its_owner() -> None:
    cleaned = []
    async with trio.open_nursery() as nursery:
        threads = WorkerThreads()
        await nursery.start(threads.run)
        nursery.cancel_scope.cancel()
        with trio.CancelScope(shield=True):
            cleaned.append(await threads.call(lambda: "cleaned"))
            await threads.aclose()
    assert cleaned == ["cleaned"]


async def test_call_of_a_pool_that_does_not_run_raises() -> None:
    threads = WorkerThreads()
    await threads.aclose()
    with pytest.raises(RuntimeError, match="not loaded or was closed"):
        await threads.call(print)
    async with trio.open_nursery() as nursery:
        await nursery.start(threads.run)
    async with _pool() as other:
        pass
    with pytest.raises(RuntimeError, match="not loaded or was closed"):
        await other.call(print)


async def test_on_done_is_called_on_the_event_loop() -> None:
    here = threading.get_ident()
    done = trio.Event()
    seen = []

    def finished() -> None:
        seen.append(threading.get_ident())
        done.set()

    async with _pool() as threads:
        job = threads.start(lambda: 7, on_done=finished)
        await done.wait()
        assert (job.is_done, job.value, seen) == (True, 7, [here])
        assert await threads.finish(job)


async def test_cancelled_caller_calls_nothing() -> None:
    ran: list[int] = []
    async with _pool() as threads:
        with trio.CancelScope() as scope:
            scope.cancel()
            await threads.call(ran.append, 1)
        assert scope.cancelled_caught
    assert ran == []


async def test_strict_pool_does_not_replace_stuck_threads() -> None:
    gate = threading.Event()
    done: list[int] = []
    async with _pool(limit=1, grace_seconds=0.01, is_strict=True) as threads, trio.open_nursery() as nursery:
        await _begin_and_cancel(threads, gate.wait)
        nursery.start_soon(threads.call, done.append, 1)
        with trio.move_on_after(0.05):
            await until_async(lambda: done)
        assert (done, threads.stuck) == ([], 0)
        gate.set()
    assert done == [1]


async def test_threads_without_idle_time_are_kept() -> None:
    async with _pool(limit=1, idle_seconds=None) as threads:
        one = await threads.call(threading.get_ident)
        await trio.sleep(0.05)
        assert await threads.call(threading.get_ident) == one
        assert _busy_threads() == 1


async def test_value_of_an_abandoned_call_is_discarded_once() -> None:
    gate = threading.Event()
    discarded: list[Any] = []

    def discard(value: object) -> None:
        discarded.append((value, threading.get_ident() != here))

    def fail() -> None:
        gate.wait(WAIT_SECONDS)
        raise ValueError

    here = threading.get_ident()
    async with _pool() as threads:
        assert await threads.call(lambda: "taken", is_abandonable=True, discard=discard) == "taken"
        await _begin_and_cancel(threads, lambda: gate.wait(WAIT_SECONDS), is_abandonable=True, discard=discard)
        await _begin_and_cancel(threads, fail, is_abandonable=True, discard=discard)
        assert (threads.abandoned, threads.stuck, discarded) == (2, 0, [])
        gate.set()
        with trio.fail_after(WAIT_SECONDS):
            await threads.idle()
    assert (threads.abandoned, discarded) == (0, [(True, True)])


async def test_value_is_taken_or_discarded_whenever_its_caller_leaves() -> None:
    kept: set[int] = set()
    made: list[int] = []
    discarded: list[int] = []

    def make(number: int) -> int:
        made.append(number)
        return number

    async def take(number: int, scope: trio.CancelScope) -> None:
        with scope:
            kept.add(await threads.call(make, number, is_abandonable=True, discard=discarded.append))

    async with _pool(limit=2) as threads:
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


async def test_calls_are_refused_while_too_many_are_abandoned() -> None:
    gate = threading.Event()
    counts: list[int] = []

    def refusal(abandoned: int) -> Exception | None:
        return TimeoutError(f"{abandoned} do not end") if abandoned >= 2 else None

    async with _pool(limit=2, is_strict=True, refusal=refusal, on_abandoned=counts.append) as threads:
        for _ in range(2):
            await _begin_and_cancel(threads, gate.wait, is_abandonable=True)
        assert (counts, threads.abandoned, threads.is_busy) == ([1, 2], 2, True)
        with pytest.raises(TimeoutError, match="2 do not end"):
            await threads.call(print)
        gate.set()
        with trio.fail_after(WAIT_SECONDS):
            await threads.idle()
        assert (threads.abandoned, threads.is_busy) == (0, False)
        assert await threads.call(lambda: 7) == 7


async def test_unshielded_pool_ends_with_its_owner() -> None:
    gate = threading.Event()
    async with trio.open_nursery() as nursery:
        threads = WorkerThreads(idle_seconds=None)
        await nursery.start(partial(threads.run, is_shielded=False))
        await threads.call(print)
        await _begin_and_cancel(threads, gate.wait, is_abandonable=True)
        nursery.cancel_scope.cancel()
    assert _busy_threads() >= 1
    gate.set()
    await until_async(lambda: _busy_threads() == 0)


async def test_cancelled_start_needs_no_close() -> None:
    with trio.fail_after(WAIT_SECONDS):
        async with trio.open_nursery() as nursery:
            with trio.CancelScope() as scope:
                scope.cancel()
                await nursery.start(WorkerThreads().run)
            assert scope.cancelled_caught


# Lent places


class _Storage:
    """Storage that blocks calls, which release their slots meanwhile, and records their names when they continue."""

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.notes: list[str] = []
        self.waiting = 0

    def call(self, name: str) -> str:
        self.waiting += 1
        with release_place_while_waiting():
            assert self.answers.wait(WAIT_SECONDS)
        self.notes.append(name)
        return name


@pytest.mark.parametrize("is_strict", [True, False])
async def test_lent_place_is_returned_before_the_next_call_begins(*, is_strict: bool) -> None:
    storage, gate, held = _Storage(), threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        gate.wait(WAIT_SECONDS)
        storage.notes.append("held")

    async with _pool(limit=1, is_strict=is_strict) as threads:
        with trio.fail_after(WAIT_SECONDS):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(threads.call, storage.call, "waited")
                await until_async(lambda: storage.waiting == 1)
                assert await threads.call(lambda: "other") == "other"
                nursery.start_soon(threads.call, hold)
                await until_async(held.is_set)
                nursery.start_soon(threads.call, storage.notes.append, "last")
                storage.answers.set()
                await until_async(lambda: threads._places.is_wanted)  # noqa: SLF001 - a blocked thread is not observable otherwise
                gate.set()
            assert storage.notes == ["held", "waited", "last"]
            await until_async(lambda: _busy_threads() == 1)


async def test_idle_thread_returns_a_lent_place() -> None:
    storage = _Storage()
    async with _pool(limit=1, idle_seconds=None) as threads:
        with trio.fail_after(WAIT_SECONDS):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(threads.call, storage.call, "waited")
                await until_async(lambda: storage.waiting == 1)
                await threads.call(lambda: None)
                storage.answers.set()
        assert storage.notes == ["waited"]
        assert await threads.call(lambda: 1) == 1


async def test_close_does_not_wait_for_calls_that_lend_their_places() -> None:
    storage = _Storage()
    async with trio.open_nursery() as nursery:
        async with _pool(limit=1, grace_seconds=0.05) as threads:
            job = threads.start(storage.call, "waited")
            await until_async(lambda: storage.waiting == 1)
        assert not job.is_done
        storage.answers.set()
        with trio.fail_after(WAIT_SECONDS):
            await until_async(lambda: storage.notes == ["waited"])
        nursery.cancel_scope.cancel()


async def test_stuck_call_needs_no_place_to_end() -> None:
    storage = _Storage()
    async with _pool(limit=1, grace_seconds=0.01) as threads:
        job = threads.start(storage.call, "waited")
        await until_async(lambda: storage.waiting == 1)
        assert not await threads.finish(job)
        assert threads.stuck == 1
        storage.answers.set()
        with trio.fail_after(WAIT_SECONDS):
            await until_async(lambda: threads.stuck == 0)
            assert await threads.call(lambda: 1) == 1


def test_lending_does_nothing_outside_a_pool() -> None:
    ran = []
    with release_place_while_waiting():
        ran.append(threading.current_thread())
    assert ran == [threading.current_thread()]
