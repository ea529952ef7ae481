"""Worker processes and what they are asked."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
import trio.testing

from ovmstrio.work.backoff import Backoff
from ovmstrio.work.messages.stack_requests import decode_samples
from ovmstrio.work.processes import KeptProcess, WorkerEnded, WorkerProcess
from tests.support.obedient_program import PROGRAM
from tests.support.waits import WAIT_SECONDS, until_async


@asynccontextmanager
async def started(**options: Any) -> AsyncIterator[WorkerProcess]:
    """Start a process and see that it has ended."""
    process = WorkerProcess(PROGRAM, **options)
    with trio.fail_after(WAIT_SECONDS):
        async with trio.open_nursery() as nursery:
            assert (await process.start(nursery, "work"))[:2] == ["work", process.pid]
            try:
                yield process
            finally:
                await process.close(5)
    assert process.ended.is_set()
    assert process.pid is not None
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


async def test_answers_come_in_any_order_and_go_to_whoever_asked() -> None:
    """Small ones and large ones."""
    async with started(calls_at_once=3) as process:
        answers: list[str] = []

        async def ask(seconds: float, text: str) -> None:
            answers.append(await process.call(["late", seconds, text]))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, 0.3, "last")
            nursery.start_soon(ask, 0, "first")
        large = np.arange(100_000)
        np.testing.assert_array_equal(await process.call(["echo", large]), large)
        assert answers == ["first", "last"]
    assert process.why == "ended with status 0"


async def test_no_more_than_so_many_are_asked_at_once() -> None:
    """The others wait until one is answered, be it for nobody."""
    async with started() as process:
        assert process.pid is not None
        os.kill(process.pid, signal.SIGSTOP)
        with trio.move_on_after(0):
            await process.call(["echo", "for nobody"])
        with trio.move_on_after(0.01):
            await process.call(["echo", "for nobody"])
        assert process.is_busy
        os.kill(process.pid, signal.SIGCONT)
        assert await process.call(["echo", 1]) == 1
        assert not process.is_busy


async def test_a_process_can_be_told_without_an_answer() -> None:
    """And get a descriptor with it."""
    async with started() as process:
        reader, writer = os.pipe()
        await process.tell(None, writer)
        os.close(writer)
        await trio.lowlevel.wait_readable(reader)
        assert int(os.read(reader, 100)) == process.pid
        os.close(reader)


async def test_what_cannot_be_sent_costs_nothing() -> None:
    """But the request that holds it."""
    async with started() as process:
        with pytest.raises(TypeError, match=r"not builtins\.object"):
            await process.call(["echo", object()])
        assert await process.call(["echo", 1]) == 1


@pytest.mark.parametrize(
    ("deed", "why"),
    [
        (["die", signal.SIGSEGV.value], "was killed by SIGSEGV"),
        (["junk"], "sent what is no answer (ValueError("),
        (["twice"], "sent what is no answer (KeyError("),
    ],
)
async def test_the_end_of_a_process_is_told_to_all_who_wait(deed: list[Any], why: str) -> None:
    """In words; nobody can ask it any more."""
    async with started(calls_at_once=2) as process:
        ends: list[WorkerEnded] = []

        async def ask(request: list[Any]) -> None:
            try:
                await process.call(request)
            except WorkerEnded as end:
                ends.append(end)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, ["hang"])
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(ask, deed)
        await process.ended.wait()
        assert process.why.startswith(why)
        assert {end.why for end in ends} == {process.why}
        assert all(end.was_called for end in ends)
        with pytest.raises(WorkerEnded) as caught:
            await process.call(["echo", 1])
        assert not caught.value.was_called
        with pytest.raises(WorkerEnded):
            await process.tell(None)


async def test_a_process_that_ends_before_it_has_answered_is_told() -> None:
    """And whoever waits for its burial."""
    buried = trio.Event()

    async def bury() -> None:
        buried.set()

    async with trio.open_nursery() as nursery:
        process = WorkerProcess(PROGRAM)
        with pytest.raises(WorkerEnded, match="ended with status 0"):
            await process.start(nursery, "leave", buried=bury)
        assert process.status == 0
    assert buried.is_set()


async def test_a_process_whose_request_does_not_end_is_killed_after_a_grace() -> None:
    """Once nobody waits for another one of its requests; that it is stuck is told at once."""
    stuck = trio.Event()
    async with started(calls_at_once=2, grace_seconds=0.05, stuck=stuck.set) as process, trio.open_nursery() as nursery:
        with trio.move_on_after(0.01):
            await process.call(["hang"])
        nursery.start_soon(process.call, ["hang"])
        await stuck.wait()
        assert process.is_retired
        assert not process.ended.is_set()
        nursery.cancel_scope.cancel()
        with trio.CancelScope(shield=True):
            await process.ended.wait()
    assert process.why == "was killed because a call did not end within 0.05 s of its caller's leaving"


async def test_a_process_ends_with_its_nursery() -> None:
    """At once, whatever it does."""
    process = WorkerProcess(PROGRAM, own_group=True)
    async with trio.open_nursery() as nursery:
        _, pid, group = await process.start(nursery, "work")
        assert group == pid
        nursery.cancel_scope.cancel()
    assert process.status == -signal.SIGKILL


@pytest.mark.parametrize("_", range(6))
async def test_callers_may_be_cancelled_with_the_process(_: int) -> None:
    """In whatever order they and the tasks of the process come to know of it."""
    with trio.fail_after(WAIT_SECONDS):
        async with trio.open_nursery() as nursery:
            process = WorkerProcess(PROGRAM)
            await process.start(nursery, "work")
            async with trio.open_nursery() as asking:
                asking.start_soon(process.call, ["hang"])
                await trio.testing.wait_all_tasks_blocked()
                nursery.cancel_scope.cancel()
    assert process.ended.is_set()


async def test_a_kept_process_is_started_again_until_it_is_to_stop() -> None:
    """What it is given goes to the one that is ready; a dismissed one ends by itself."""
    stopping, ends = trio.Event(), list[str]()
    make = partial(WorkerProcess, PROGRAM, own_group=True)
    reader, writer = os.pipe()
    kept = KeptProcess(
        0, make, "work", writer, backoff=Backoff(0, 0), stopping=stopping,
        changed=lambda: None, ended=lambda _, process: ends.append(process.why),
    )  # fmt: skip
    pids = []
    with trio.fail_after(WAIT_SECONDS):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(kept.keep)
            for _ in range(2):
                await until_async(lambda: kept.is_ready)
                assert await kept.give(None, writer)
                await trio.lowlevel.wait_readable(reader)
                pids.append(int(os.read(reader, 100)))
                assert kept.given == 1
                if len(pids) == 1:
                    os.kill(pids[0], signal.SIGKILL)
                    await until_async(lambda: bool(ends))
            stopping.set()
            kept.dismiss()
    assert ends == ["was killed by SIGKILL", "ended with status 0"]
    assert not await kept.give(None, writer)
    assert pids[0] != pids[1]
    os.close(reader)
    os.close(writer)


async def test_what_notices_an_end_may_end_the_keeping() -> None:
    """By what it raises."""

    def refuse(_: KeptProcess, process: WorkerProcess) -> None:
        raise LookupError(process.why)

    with Path(os.devnull).open() as file:  # noqa: ASYNC230 - takes no time worth a thread
        kept = KeptProcess(
            0, partial(WorkerProcess, PROGRAM), "leave", file.fileno(), backoff=Backoff(0, 0), stopping=trio.Event(),
            changed=lambda: None, ended=refuse,
        )  # fmt: skip
        with pytest.raises(LookupError, match="ended with status 0"):
            await kept.keep()
    assert kept.process is None


async def test_its_threads_are_sampled_beside_what_it_is_asked() -> None:
    """It has no more than one request at a time, which this is none of."""
    async with started() as process, trio.open_nursery() as nursery:
        nursery.start_soon(process.call, ["hang"])
        await trio.testing.wait_all_tasks_blocked()
        sampled = {threads.name: threads for threads in await process.sample(0.2, 100)}
        assert process.is_busy
        main = sampled["main thread"]
        assert main.samples == main.waiting + main.stacks.total() > 0
        assert await process.sample(0.01, 100)
        nursery.cancel_scope.cancel()


async def test_samples_that_come_when_nobody_waits_for_them_do_no_harm() -> None:
    """As of a process that was being started, or whose code let nothing else run, or once the profile was left."""
    async with started() as process:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(process.sample, 0.1, 100)
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        assert await process.call(["late", 0.5, "asked"]) == "asked"
        assert await process.sample(0.01, 100)


async def test_each_gets_the_samples_that_it_has_asked_for() -> None:
    """Though others are asked for meanwhile, and come before."""
    async with started() as process:
        counts: dict[str, int] = {}

        async def sample(name: str, seconds: float, rate: float) -> None:
            counts[name] = next(each.samples for each in await process.sample(seconds, rate) if "main" in each.name)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(sample, "few", 0.5, 1)
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(sample, "many", 0.2, 100)
    assert counts["few"] == 1
    assert counts["many"] >= 1


async def test_the_status_that_a_program_ends_with_is_its_own() -> None:
    """Rather than that of a failure, with a group of exceptions in the log."""
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            process = WorkerProcess(PROGRAM)
            with pytest.raises(WorkerEnded):
                await process.start(nursery, "exit")
            assert process.status == 3


async def test_samples_of_a_process_that_ends_are_not_waited_for() -> None:
    """Nor are they asked for of one that has."""
    async with started() as process:
        failures: list[WorkerEnded] = []

        async def sample() -> None:
            try:
                await process.sample(60, 1)
            except WorkerEnded as error:
                failures.append(error)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(sample)
            await trio.testing.wait_all_tasks_blocked()
            process.kill()
        assert len(failures) == 1
        with pytest.raises(WorkerEnded):
            await process.sample(0.01, 1)


@pytest.mark.parametrize(
    "nonsense",
    [
        None,
        {},
        {"frames": [["a", "b"]], "threads": []},
        {"frames": [], "threads": [["a", 1, 1, None, [[[0], 1]]]]},
        {"frames": [["a", "b", float("inf")]], "threads": []},
    ],
)
def test_what_is_no_sample_is_refused(nonsense: Any) -> None:
    """Code of users can send it in its process."""
    with pytest.raises(ValueError, match="no samples"):
        decode_samples(nonsense)


async def test_a_process_that_is_stopped_is_killed_and_its_calls_fail_with_the_reason() -> None:
    """SIGKILL works on a stopped process."""
    async with started(stopped_seconds=0.4) as process:
        assert process.pid is not None
        os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(WorkerEnded, match=r"was stopped \(SIGSTOP\) for 0.4 s and was killed"):
            await process.call(["echo", 1])


async def test_a_process_that_is_continued_in_time_goes_on() -> None:
    """Also where it is stopped again and again."""
    async with started(stopped_seconds=2) as process:
        assert process.pid is not None
        for number in range(3):
            os.kill(process.pid, signal.SIGSTOP)
            await trio.sleep(0.9)
            os.kill(process.pid, signal.SIGCONT)
            await trio.sleep(0.6)
            assert await process.call(["echo", number]) == number


async def test_time_in_which_the_server_is_stopped_itself_does_not_count() -> None:
    """As where a terminal stops the group of all processes, or a computer sleeps."""
    async with started(stopped_seconds=0.8) as process:
        assert process.pid is not None
        for number in range(4):
            os.kill(process.pid, signal.SIGSTOP)
            time.sleep(1)  # noqa: ASYNC251 - nothing else may run
            await trio.sleep(0.3)
            os.kill(process.pid, signal.SIGCONT)
            assert await process.call(["echo", number]) == number
