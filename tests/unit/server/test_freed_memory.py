"""Memory that tensors leave behind."""

from __future__ import annotations

import subprocess
import sys
import threading
from dataclasses import dataclass, field
from typing import Any

import pytest
import trio
import trio.testing

from ovmstrio.server.freed_memory import Growth, give_back_freed_memory
from tests.support.waits import WAIT_SECONDS

MIB = 2**20


_LEFT_BY_THREADS = """
from threading import Barrier, Thread
import trio
from ovmstrio.server import freed_memory

assert freed_memory.keep_freed_memory()
before = freed_memory.resident_bytes()
together = Barrier(4)

def leave():
    together.wait(60)
    held = [b"x" * 2**20 for _ in range(40)]
    together.wait(60)

async def main():
    async with trio.open_nursery() as nursery:
        nursery.start_soon(freed_memory.give_back_freed_memory, trio.sleep_forever)
        await trio.testing.wait_all_tasks_blocked()
        async with trio.open_nursery() as threads:
            for _ in range(4):
                threads.start_soon(trio.to_thread.run_sync, leave)
        with trio.move_on_after(30):
            while freed_memory.resident_bytes() > before + 40 * 2**20:
                await trio.sleep(0.1)
        nursery.cancel_scope.cancel()

import trio.testing
trio.run(main)
print(freed_memory.resident_bytes() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only glibc is told")
def test_what_threads_leave_behind_is_given_back() -> None:
    """All of it, though each had less than is kept."""
    command = [sys.executable, "-c", _LEFT_BY_THREADS]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert int(ran.stdout.splitlines()[-1]) <= 40 * MIB


def test_memory_is_given_back_once_it_grows_no_more() -> None:
    """Neither while it grows, nor for a little, nor twice."""
    growth = Growth(100 * MIB, 0)
    assert not growth.is_over(104 * MIB, 2, is_busy=False)
    assert not growth.is_over(200 * MIB, 4, is_busy=False)
    assert not growth.is_over(300 * MIB, 6, is_busy=False)
    assert growth.is_over(290 * MIB, 8, is_busy=False)
    growth.given_back(105 * MIB, 8, is_busy=False)
    assert not growth.is_over(106 * MIB, 20, is_busy=False)


def test_what_is_freed_after_memory_was_given_back_is_given_back_too() -> None:
    """Though the process has become no larger since: much of it was in use at that time, and is not now."""
    growth = Growth(100 * MIB, 0, 40 * MIB)
    growth.is_over(3_000 * MIB, 2, 50 * MIB, is_busy=True)
    assert growth.is_over(3_000 * MIB, 4, 50 * MIB, is_busy=True)
    growth.given_back(2_990 * MIB, 4, 41 * MIB, is_busy=True)
    assert not growth.is_over(2_990 * MIB, 6, 41 * MIB, is_busy=False)
    assert growth.is_over(1_800 * MIB, 8, 1_700 * MIB, is_busy=False)
    growth.given_back(110 * MIB, 8, 42 * MIB, is_busy=False)
    assert not growth.is_over(110 * MIB, 10, 42 * MIB, is_busy=False)


def test_memory_that_is_needed_again_at_once_is_given_back_ever_more_rarely() -> None:
    """A server that always has as much to do loses little time by it; one that has had rest, is as before."""
    growth = Growth(100 * MIB, 0)
    times: list[int] = []
    for now in range(2, 2_000, 2):
        if growth.is_over(300 * MIB, now, is_busy=True):
            growth.given_back(100 * MIB, now, is_busy=True)
            times.append(now)
    assert times[:5] == [4, 8, 12, 20, 36]
    assert times[-1] - times[-2] >= 500
    assert growth.is_over(300 * MIB, 9_000, is_busy=True)
    growth.given_back(100 * MIB, 9_000, is_busy=True)
    growth.is_over(300 * MIB, 9_004, is_busy=True)
    assert growth.is_over(300 * MIB, 9_006, is_busy=True)
    growth.is_over(300 * MIB, 9_008, is_busy=False)
    assert growth.is_over(300 * MIB, 9_010, is_busy=False)


@dataclass
class _Process:
    size: int
    trims: int = 0
    trimmed: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.change, self.changes = trio.open_memory_channel[None](1)

    def resident(self) -> int:
        return self.size

    def parts(self) -> tuple[Any, ...]:
        return self.changes.receive, self.resident, self.trim, lambda: 0.0

    def trim(self) -> None:
        self.size = 100 * MIB
        self.trims += 1
        self.trimmed.set()


async def test_a_server_at_rest_gives_back_what_requests_left(mock_clock: trio.testing.MockClock) -> None:
    """Within seconds, and then does no more than look."""
    process = _Process(100 * MIB)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(give_back_freed_memory, *process.parts())
        await trio.testing.wait_all_tasks_blocked()
        process.size = 500 * MIB
        for _ in range(2):
            mock_clock.jump(2)
            await trio.testing.wait_all_tasks_blocked()
        assert await trio.to_thread.run_sync(process.trimmed.wait, WAIT_SECONDS)
        for _ in range(100):
            await trio.testing.wait_all_tasks_blocked()
            mock_clock.jump(2)
        assert process.trims == 1
        nursery.cancel_scope.cancel()


async def test_what_an_unloaded_model_leaves_is_given_back(mock_clock: trio.testing.MockClock) -> None:
    """Though the process has grown no larger by it."""
    process = _Process(500 * MIB)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(give_back_freed_memory, *process.parts())
        await trio.testing.wait_all_tasks_blocked()
        for change in (False, True):
            if change:
                process.change.send_nowait(None)
            await trio.testing.wait_all_tasks_blocked()
            assert not process.trims
            mock_clock.jump(2)
            await trio.testing.wait_all_tasks_blocked()
        assert await trio.to_thread.run_sync(process.trimmed.wait, WAIT_SECONDS)
        assert process.size == 100 * MIB
        nursery.cancel_scope.cancel()
