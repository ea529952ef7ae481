"""What worker processes print is in the log, with the names of their code."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import trio
from structlog.testing import capture_logs

from ovmstrio.work.processes import WorkerEnded, WorkerProcess
from tests.support.obedient_program import PROGRAM
from tests.support.waits import WAIT_SECONDS

FILES = Path("/proc/self/fd")
NAMES = {"servable": "graph", "node": "counter"}


def _open_files() -> int:
    return len(list(FILES.iterdir()))


async def _logged_of(*requests: list[Any]) -> list[Any]:
    """Give what is logged of a process that gets these requests, the last of which may end it."""
    with capture_logs() as logged, trio.fail_after(WAIT_SECONDS):
        async with trio.open_nursery() as nursery:
            process = WorkerProcess(PROGRAM, names=NAMES)
            await process.start(nursery, "work")
            try:
                for request in requests:
                    await process.call(request)
            except WorkerEnded:
                await process.ended.wait()
            await process.close(5)
    return [(line["stream"], line["event"]) for line in logged if line["node"] == "counter"]


async def test_lines_are_logged_by_whatever_means_they_are_written() -> None:
    """In pieces; what is left open ends with the process."""
    said = await _logged_of(["write", 1, "one\ntw"], ["write", 1, "o\n"], ["write", 1, "open"])
    assert said == [("stdout", "one"), ("stdout", "two"), ("stdout", "open")]


async def test_a_process_that_crashes_leaves_its_last_words() -> None:
    """They are logged before anybody is told of its end."""
    assert await _logged_of(["write", 2, "last words"], ["die", signal.SIGKILL]) == [("stderr", "last words")]


async def test_a_process_that_prints_much_is_served_meanwhile() -> None:
    """It waits until what it has printed is read; each line is cut."""
    said = await _logged_of(["write", 1, "x" * 50_000 + "\n"], ["write", 1, "y\n" * 10_000], ["echo", 1])
    assert [len(said), said[0][1][:4], len(said[0][1]) < 4200] == [10_001, "xxxx", True]


@pytest.mark.parametrize("names", [None, NAMES])
async def test_no_pipe_is_left_open(names: dict[str, str] | None) -> None:
    """Whether what it prints is logged or not."""
    before = _open_files()
    async with trio.open_nursery() as nursery:
        process = WorkerProcess(PROGRAM, names=names)
        await process.start(nursery, "work")
        await process.close(5)
    assert _open_files() == before
