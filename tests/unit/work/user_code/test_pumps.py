"""Generators that are pulled from threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextvars import copy_context

import pytest
import trio

from ovmstrio.work.threads.worker_threads import WorkerThreads
from ovmstrio.work.user_code.pumps import ThreadPump

PATIENCE_SECONDS = 60


async def test_a_generator_that_is_left_as_its_turn_has_just_ended_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The turn has not seen that it was to stop, and the event loop does not know yet that it is over."""
    may_go, is_over, is_closed = threading.Event(), threading.Event(), threading.Event()

    def numbers() -> Iterator[int]:
        try:
            yield 0
            may_go.wait(PATIENCE_SECONDS)
            number = 0
            while True:
                yield (number := number + 1)
        finally:
            is_closed.set()

    threads = WorkerThreads()
    async with trio.open_nursery() as nursery:
        await nursery.start(threads.run)
        pump = ThreadPump(numbers(), str, threads, copy_context())
        run_turn = pump._run_turn  # noqa: SLF001 - the end of a turn is observed in its thread

        def watched() -> None:
            run_turn()
            is_over.set()

        monkeypatch.setattr(pump, "_run_turn", watched)
        try:
            assert await pump.pull() == "0"
            may_go.set()
            # On the event loop, so that nothing else is done by it meanwhile.
            assert is_over.wait(PATIENCE_SECONDS)
            pump.leave()
            assert await trio.to_thread.run_sync(is_closed.wait, PATIENCE_SECONDS)
        finally:
            with trio.CancelScope(shield=True):
                await threads.aclose()
