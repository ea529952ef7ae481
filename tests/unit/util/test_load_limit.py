from __future__ import annotations

import threading

import pytest
import trio

from ovmstrio.util.load_limit import LOADS_AT_ONCE, run_load
from tests.support.waits import WAIT_SECONDS


async def test_load_runs_in_a_thread_and_may_be_abandoned() -> None:
    assert await run_load(threading.current_thread) is not threading.current_thread()
    release = threading.Event()
    with trio.move_on_after(0.01) as scope:
        await run_load(lambda: release.wait(WAIT_SECONDS))
    assert scope.cancelled_caught
    release.set()
    with pytest.raises(ZeroDivisionError):
        await run_load(lambda: 1 // 0)


def test_abandoned_loads_do_not_block_loads_of_the_next_event_loop() -> None:
    release = threading.Event()

    async def abandon() -> None:
        with trio.move_on_after(0.01):
            await run_load(lambda: release.wait(WAIT_SECONDS))

    async def load() -> None:
        with trio.fail_after(WAIT_SECONDS):
            assert await run_load(lambda: 1) == 1

    for _ in range(LOADS_AT_ONCE):
        trio.run(abandon)
    trio.run(load)
    release.set()
