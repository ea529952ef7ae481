"""What runs beside the event loop, as a scraper sees it."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence

import trio
import trio.testing

from ovmstrio.core.census import current_census, owned_by
from ovmstrio.observability.metrics import Metrics
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


async def test_threads_of_a_service_are_counted_while_they_are_there() -> None:
    """With calls that wait for one, under the service whose load has made the pool."""
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


async def test_requests_that_wait_for_their_batch_are_counted() -> None:
    """Under the service whose load has made what joins them, as long as that runs."""
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


async def test_threads_that_were_given_up_are_stuck() -> None:
    """For as long as they run."""
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
    """A long one is in a bucket of its own, and the sum has it."""
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
