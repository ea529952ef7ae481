"""Threads, batches, turns of the event loop and memory as a scraper sees them."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence

import trio
import trio.testing

from ovmstrio.core.census import current_census, owned_by
from ovmstrio.observability.metrics import Metrics
from ovmstrio.observability.resident_memory import GrowthWatch, resident_bytes
from ovmstrio.work.batching.batcher import Batcher
from ovmstrio.work.batching.policy import BatchOptions
from ovmstrio.work.loop_load import current_loop_load
from ovmstrio.work.threads.worker_threads import WorkerThreads
from tests.support.waits import WAIT_SECONDS


def _watching() -> Metrics:
    metrics, load = Metrics(), current_loop_load()
    metrics.watch(current_census(), lambda: (tuple(load.turns), load.turn_seconds))
    return metrics


def _figures(metrics: Metrics, name: str) -> dict[str, float]:
    text = metrics.render().decode()
    found = re.findall(rf'(?m)^ovmstrio_(\w+){{name="{name}"}} (\S+)$', text)
    return {family: float(value) for family, value in found}


async def test_threads_and_waiting_calls_of_a_service_are_counted() -> None:
    metrics, go = _watching(), threading.Event()
    with owned_by("mine"):
        pool = WorkerThreads(limit=1)
    async with trio.open_nursery() as nursery:
        await nursery.start(pool.run)
        try:
            jobs = [pool.start(go.wait, WAIT_SECONDS) for _ in range(3)]
            figures = _figures(metrics, "mine")
            assert figures == {"worker_threads": 1, "stuck_threads": 0, "waiting_calls": 2}
            go.set()
            for job in jobs:
                assert await pool.finish(job, 30)
        finally:
            go.set()
            with trio.CancelScope(shield=True):
                await pool.aclose()
    assert _figures(metrics, "mine") == {}


async def test_requests_waiting_for_a_batch_are_counted() -> None:
    metrics, go = _watching(), trio.Event()

    async def run(items: Sequence[int]) -> Sequence[int]:
        await go.wait()
        return items

    with owned_by("mine"):
        async with trio.open_nursery() as nursery:
            batcher = Batcher[int, int](run, BatchOptions(max_size=1, timeout_seconds=0))
            await nursery.start(batcher.serve)
            for item in range(3):
                nursery.start_soon(batcher.submit, item)
            await trio.testing.wait_all_tasks_blocked()
            assert _figures(metrics, "mine") == {"batch_queued_requests": 2}
            go.set()
            await batcher.aclose()
    assert _figures(metrics, "mine") == {}


async def test_abandoned_threads_count_as_stuck() -> None:
    metrics, begun, go = _watching(), threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        go.wait(WAIT_SECONDS)

    with owned_by("mine"):
        pool = WorkerThreads(limit=1)
    async with trio.open_nursery() as nursery:
        await nursery.start(pool.run)
        try:
            job = pool.start(wait)
            assert await trio.to_thread.run_sync(begun.wait, WAIT_SECONDS)
            assert not await pool.finish(job, 0)
            assert _figures(metrics, "mine")["stuck_threads"] == 1
        finally:
            go.set()
            with trio.CancelScope(shield=True):
                await pool.aclose()


async def test_turns_of_the_event_loop_are_timed() -> None:
    metrics = _watching()
    await trio.lowlevel.checkpoint()
    before = metrics.render(["ovmstrio_event_loop_delay_seconds"]).decode()
    threading.Event().wait(0.06)
    await trio.sleep(0.001)
    after = metrics.render(["ovmstrio_event_loop_delay_seconds"]).decode()

    def longer(text: str) -> float:
        numbers = dict(re.findall(r'_bucket{le="(\S+)"} (\S+)', text))
        return float(numbers["+Inf"]) - float(numbers["0.05"])

    assert longer(after) > longer(before)


def test_resident_memory_has_the_size_of_an_interpreter() -> None:
    """An interpreter with the libraries of the tests has some tens of megabytes, and no terabyte."""
    assert 10 * 2**20 < resident_bytes() < 2**40


def test_growth_is_attributed_only_without_overlap() -> None:
    sizes = iter([100, 130, 50, 200, 260, 1000, 900])
    watch = GrowthWatch(lambda: next(sizes))
    with watch.watching() as grown:
        assert grown() == 30
        with watch.watching() as other:
            assert (grown(), other()) == (None, None)
        assert grown() is None
    with watch.watching() as grown:
        assert grown() == 60
    with watch.watching() as grown:
        assert grown() == 0


def test_an_unknown_size_is_no_growth_of_zero() -> None:
    with GrowthWatch(lambda: 0).watching() as grown:
        assert grown() is None
