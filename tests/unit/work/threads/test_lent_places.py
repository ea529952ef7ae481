"""Calls that wait for something else lend their places to others."""

from __future__ import annotations

import threading

import pytest
import trio

from ovmstrio.work.threads.lending import lent_place
from tests.support.waits import WAIT_SECONDS, until_async
from tests.unit.work.threads.test_worker_threads import busy_threads, pool


class _Storage:
    def __init__(self) -> None:
        self.answers = threading.Event()
        self.notes: list[str] = []
        self.waiting = 0

    def call(self, name: str) -> str:
        self.waiting += 1
        with lent_place():
            assert self.answers.wait(WAIT_SECONDS)
        self.notes.append(name)
        return name


@pytest.mark.parametrize("is_strict", [True, False])
async def test_others_are_called_while_one_waits(*, is_strict: bool) -> None:
    """With one thread: the call that waits has its place back as soon as the other one has ended, and no other runs."""
    storage, gate, held = _Storage(), threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        gate.wait(WAIT_SECONDS)
        storage.notes.append("held")

    async with pool(limit=1, is_strict=is_strict) as threads:
        with trio.fail_after(WAIT_SECONDS):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(threads.call, storage.call, "waited")
                await until_async(lambda: storage.waiting == 1)
                assert await threads.call(lambda: "other") == "other"
                nursery.start_soon(threads.call, hold)
                await until_async(held.is_set)
                nursery.start_soon(threads.call, storage.notes.append, "last")
                storage.answers.set()
                await until_async(lambda: threads._places.is_wanted)  # noqa: SLF001 - a blocked thread shows nowhere else
                gate.set()
            assert storage.notes == ["held", "waited", "last"]
            await until_async(lambda: busy_threads() == 1)


async def test_an_idle_thread_gives_the_place_back() -> None:
    """Nothing else has to be called for that."""
    storage = _Storage()
    async with pool(limit=1, idle_seconds=None) as threads:
        with trio.fail_after(WAIT_SECONDS):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(threads.call, storage.call, "waited")
                await until_async(lambda: storage.waiting == 1)
                await threads.call(lambda: None)
                storage.answers.set()
        assert storage.notes == ["waited"]
        assert await threads.call(lambda: 1) == 1


async def test_as_many_run_at_once_as_before() -> None:
    """Hundreds of calls that all wait now and then never are more than the limit at once where they do not."""
    running, most, lock = 0, 0, threading.Lock()

    def work() -> None:
        nonlocal running, most
        for _ in range(3):
            with lock:
                running += 1
                most = max(most, running)
            with lock:
                running -= 1
            with lent_place():
                pass

    async with pool(limit=2, idle_seconds=0.001) as threads:
        with trio.fail_after(WAIT_SECONDS):
            async with trio.open_nursery() as nursery:
                for _ in range(200):
                    nursery.start_soon(threads.call, work)
        assert most <= 2
        await until_async(lambda: threads.threads == 0)


async def test_a_pool_ends_while_places_are_lent() -> None:
    """The calls go on where they are, and keep nobody waiting beyond the grace."""
    storage = _Storage()
    async with trio.open_nursery() as nursery:
        async with pool(limit=1, grace_seconds=0.05) as threads:
            job = threads.start(storage.call, "waited")
            await until_async(lambda: storage.waiting == 1)
        assert not job.is_done
        storage.answers.set()
        with trio.fail_after(WAIT_SECONDS):
            await until_async(lambda: storage.notes == ["waited"])
        nursery.cancel_scope.cancel()


async def test_a_call_that_was_given_up_needs_no_place() -> None:
    """Its thread ends when what it waited for is there."""
    storage = _Storage()
    async with pool(limit=1, grace_seconds=0.01) as threads:
        job = threads.start(storage.call, "waited")
        await until_async(lambda: storage.waiting == 1)
        assert not await threads.finish(job)
        assert threads.stuck == 1
        storage.answers.set()
        with trio.fail_after(WAIT_SECONDS):
            await until_async(lambda: threads.stuck == 0)
            assert await threads.call(lambda: 1) == 1


def test_other_threads_have_no_place_to_lend() -> None:
    """The block is run as it is."""
    ran = []
    with lent_place():
        ran.append(threading.current_thread())
    assert ran == [threading.current_thread()]
