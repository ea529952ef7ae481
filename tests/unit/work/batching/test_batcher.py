from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from ovmstrio.core.errors import DeadlineExceeded, ModelFailure, NotReady, Overloaded
from ovmstrio.core.hooks import BatchHooks
from ovmstrio.work.batching import Batcher, BatchOptions, open_batcher

Options = BatchOptions


class Runner:
    def __init__(self, seconds: float = 0.0) -> None:
        self.batches: list[tuple[float, list[int]]] = []
        self.seconds = seconds
        self.cancelled = 0

    async def __call__(self, items: Sequence[int]) -> Sequence[int | Exception]:
        self.batches.append((trio.current_time(), list(items)))
        try:
            await trio.sleep(self.seconds)
        except trio.Cancelled:
            self.cancelled += 1
            raise
        if 13 in items:
            raise RuntimeError("thirteen")
        return [ValueError(f"negative: {item}") if item < 0 else 2 * item for item in items]

    @property
    def items(self) -> list[list[int]]:
        return [batch for _, batch in self.batches]


async def gather(batcher: Batcher[int, int], items: Sequence[int], **how: Any) -> dict[int, Any]:
    """Submit items at once, in order; gives what each caller got, errors as texts."""
    got: dict[int, Any] = {}

    async def call(item: int, *, task_status: trio.TaskStatus[None]) -> None:
        task_status.started()
        try:
            got[item] = await batcher.submit(item, **how)
        except Exception as error:  # noqa: BLE001 - it is what the caller got
            got[item] = f"{type(error).__name__}: {error}"

    async with trio.open_nursery() as nursery:
        for item in items:
            await nursery.start(call, item)
    return got


async def test_a_full_batch_fires_at_once_and_a_lone_item_after_its_time(autojump_clock: MockClock) -> None:
    """Five items and batches of three: three run at the start, two when the fourth has waited long enough."""
    run = Runner()
    async with open_batcher(run, Options(3, 2.0)) as batcher:
        begin = trio.current_time()
        assert await gather(batcher, [1, 2, 3, 4, 5]) == {1: 2, 2: 4, 3: 6, 4: 8, 5: 10}
        assert [(when - begin, items) for when, items in run.batches] == [(0, [1, 2, 3]), (2, [4, 5])]
        begin = trio.current_time()
        assert await batcher.submit(7) == 14
        assert trio.current_time() - begin == 2


async def test_no_more_batches_run_at_once_than_may(autojump_clock: MockClock) -> None:
    """What waits for a worker goes on collecting; results still find their callers."""
    run = Runner(seconds=5)
    async with open_batcher(run, Options(2, 0.0), concurrency=2) as batcher:
        assert await gather(batcher, range(8)) == {item: 2 * item for item in range(8)}
        assert (batcher.running, batcher.waiting) == (0, 0)
    assert sorted(run.items) == [[0], [1], [2, 3], [4, 5], [6, 7]]
    assert [when - run.batches[0][0] for when, _ in run.batches] == [0, 0, 5, 5, 10]


async def test_errors_of_one_item_are_its_callers_alone(autojump_clock: MockClock) -> None:
    """An exception among the results is raised in one caller; the others have their results."""
    async with open_batcher(Runner(), Options(3, 1.0)) as batcher:
        assert await gather(batcher, [1, -2, 3]) == {1: 2, -2: "ValueError: negative: -2", 3: 6}


async def test_a_failing_batch_fails_all_its_callers_or_is_retried_one_by_one(autojump_clock: MockClock) -> None:
    """With the option only the item at fault fails, and without it its neighbours do, too; later batches do not."""
    async with open_batcher(Runner(), Options(3, 1.0)) as batcher:
        failed = dict.fromkeys([1, 13, 2], "RuntimeError: thirteen")
        assert await gather(batcher, [1, 13, 2, 4]) == {**failed, 4: 8}
    run = Runner()
    async with open_batcher(run, Options(3, 1.0), retry_singly=True) as batcher:
        assert await gather(batcher, [1, 13, 2]) == {1: 2, 13: "RuntimeError: thirteen", 2: 4}
        assert await gather(batcher, [13]) == {13: "RuntimeError: thirteen"}
    assert run.items == [[1, 13, 2], [1], [13], [2], [13]]


async def test_an_error_that_callers_share_has_the_same_short_traceback_for_each(autojump_clock: MockClock) -> None:
    """The traceback of the batch's error does not grow from caller to caller."""
    lengths: list[int] = []

    async def call(batcher: Batcher[int, int]) -> None:
        try:
            await batcher.submit(13)
        except RuntimeError as error:
            count, traceback = 0, error.__traceback__
            while traceback is not None:
                count, traceback = count + 1, traceback.tb_next
            lengths.append(count)

    async with open_batcher(Runner(), Options(4, 1.0)) as batcher, trio.open_nursery() as nursery:
        for _ in range(4):
            nursery.start_soon(call, batcher)
    assert len(lengths) == 4
    assert len(set(lengths)) == 1


@pytest.mark.parametrize(
    ("answer", "found"),
    [([1], "a list of 1"), ([1, 2, 3], "a list of 3"), (None, "NoneType"), ("ab", "str"), ({1: 2}, "dict")],
)
async def test_a_wrong_number_of_results_is_everyones_error(answer: Any, found: str, autojump_clock: MockClock) -> None:
    """Nobody hangs and nobody gets another one's result; the text says what was expected and what came."""

    async def run(items: Sequence[int]) -> Any:
        return answer

    async with open_batcher(run, Options(2, 1.0), retry_singly=True) as batcher:
        text = f"a batch was answered with the wrong number of results: expected a list of 2, found {found}"
        assert await gather(batcher, [1, 2]) == dict.fromkeys([1, 2], f"ModelFailure: {text}")
        assert ModelFailure(text).message == text


async def test_a_caller_that_leaves_early_is_not_in_the_batch(autojump_clock: MockClock) -> None:
    """Its item never runs, and the others do not wait for another one in its place."""
    run = Runner()
    async with open_batcher(run, Options(3, 10.0)) as batcher:
        with trio.move_on_after(1) as scope:
            await batcher.submit(1)
        assert scope.cancelled_caught
        assert batcher.waiting == 0
        assert await gather(batcher, [2, 3, 4]) == {2: 4, 3: 6, 4: 8}
    assert run.items == [[2, 3, 4]]


async def test_a_caller_that_leaves_a_running_batch_disturbs_nobody(autojump_clock: MockClock) -> None:
    """It is gone at once; the batch runs to its end for the others."""
    run = Runner(seconds=5)
    async with open_batcher(run, Options(2, 1.0)) as batcher, trio.open_nursery() as nursery:
        nursery.start_soon(gather, batcher, [1])
        await trio.testing.wait_all_tasks_blocked()
        with trio.move_on_after(2) as scope:
            await batcher.submit(2)
        assert scope.cancelled_caught
        assert trio.current_time() - run.batches[0][0] == 2
    assert (run.items, run.cancelled) == ([[1, 2]], 0)


async def test_a_batch_that_nobody_wants_is_cancelled_before_the_last_caller_is_gone(autojump_clock: MockClock) -> None:
    """The run ends inside the last caller's call, so that its item is not used behind its back; a worker is free."""
    run = Runner(seconds=5)
    ended: list[bool] = []

    async def slow_to_stop(items: Sequence[int]) -> Sequence[int | Exception]:
        try:
            return await run(items)
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(1)
            ended.append(True)

    async with open_batcher(slow_to_stop, Options(2, 1.0)) as batcher:
        begin = trio.current_time()
        with trio.move_on_after(2):
            await gather(batcher, [1, 2])
        assert (trio.current_time() - begin, ended, run.cancelled) == (3, [True], 1)
        assert await gather(batcher, [3, 4]) == {3: 6, 4: 8}


async def test_a_retry_that_nobody_wants_is_left_out_or_cancelled(autojump_clock: MockClock) -> None:
    """Of three items that run again one by one, the one whose caller has left does not, nor goes on."""
    run = Runner(seconds=5)
    async with open_batcher(run, Options(3, 1.0), retry_singly=True) as batcher:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(gather, batcher, [13]))
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(partial(gather, batcher, [1], deadline=trio.current_time() + 12))
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(partial(gather, batcher, [2], deadline=trio.current_time() + 7))
        assert (batcher.running, batcher.waiting) == (0, 0)
    assert run.items == [[13, 1, 2], [13], [1]]
    assert run.cancelled == 1


async def test_a_caller_that_leaves_its_retry_does_not_wait_for_the_others(autojump_clock: MockClock) -> None:
    """The item's own run is stopped, the next one begins, and the caller is gone at once."""
    run = Runner(seconds=5)
    gone: dict[int, float] = {}
    async with open_batcher(run, Options(3, 1.0), retry_singly=True) as batcher:
        begin = trio.current_time()

        async def call(item: int, deadline: float) -> None:
            await gather(batcher, [item], deadline=deadline)
            gone[item] = trio.current_time() - begin

        async with trio.open_nursery() as nursery:
            for item, deadline in ((13, math.inf), (1, begin + 12), (2, math.inf)):
                nursery.start_soon(call, item, deadline)
                await trio.testing.wait_all_tasks_blocked()
    assert run.items == [[13, 1, 2], [13], [1], [2]]
    assert gone == {13: 10, 1: 12, 2: 17}


async def test_deadlines_of_callers(autojump_clock: MockClock) -> None:
    """A deadline that passes in the queue, in the batch or beforehand is the caller's error and nobody else's."""
    run = Runner(seconds=5)
    async with open_batcher(run, Options(2, 10.0)) as batcher:
        begin = trio.current_time()
        for deadline in (begin + 3, begin):
            with pytest.raises(DeadlineExceeded):
                await batcher.submit(1, deadline=deadline)
        async with trio.open_nursery() as nursery:
            got: dict[int, Any] = {}

            async def call(item: int, deadline: float) -> None:
                got.update(await gather(batcher, [item], deadline=deadline))

            nursery.start_soon(call, 2, math.inf)
            nursery.start_soon(call, 3, trio.current_time() + 1)
        assert got[2] == 4
        assert got[3].startswith("DeadlineExceeded: the deadline passed before")
        alone = partial(batcher.submit, 4, deadline=trio.current_time() + 11)
        with pytest.raises(DeadlineExceeded):
            await alone()
    assert run.cancelled == 1


async def test_a_full_queue_refuses(autojump_clock: MockClock) -> None:
    """What is too much is refused at once; what waits is answered."""
    run = Runner(seconds=1)
    async with open_batcher(run, Options(1, 0.0, max_waiting=2)) as batcher:
        got = await gather(batcher, [1, 2, 3, 4])
    assert got.pop(4).startswith("Overloaded: The queue for batches is full")
    assert got == {1: 2, 2: 4, 3: 6}
    assert issubclass(Overloaded, Exception)


async def test_closing_runs_what_waits_without_delay_and_takes_nothing_more(autojump_clock: MockClock) -> None:
    """Callers that wait are answered at the end of the block, long before their time."""
    run = Runner(seconds=1)
    got: dict[int, Any] = {}

    async def call(batcher: Batcher[int, int]) -> None:
        got.update(await gather(batcher, [1, 2, 3]))

    async with trio.open_nursery() as nursery:
        begin = trio.current_time()
        async with open_batcher(run, Options(2, math.inf)) as batcher:
            nursery.start_soon(call, batcher)
            await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(trio.ClosedResourceError):
            await batcher.submit(4)
        await batcher.aclose()
        assert trio.current_time() - begin == 2
    assert got == {1: 2, 2: 4, 3: 6}


async def test_a_batcher_that_never_served_is_closed_at_once() -> None:
    """There is nothing to wait for, and who waits is told."""
    made: Batcher[int, int] = Batcher(Runner(), Options(1, 0.0))
    async with trio.open_nursery() as nursery:
        got: dict[int, Any] = {}

        async def call() -> None:
            got.update(await gather(made, [1]))

        nursery.start_soon(call)
        await trio.testing.wait_all_tasks_blocked()
        await made.aclose()
    assert got[1].startswith("NotReady")
    await made.serve()
    with pytest.raises(trio.ClosedResourceError):
        await made.submit(1)


async def test_cancelling_the_batcher_tells_everyone_who_waits(autojump_clock: MockClock) -> None:
    """Nobody hangs: neither who is in a running batch nor who waits for one, and no further batch begins."""
    run = Runner(seconds=5)
    batcher: Batcher[int, int] = Batcher(run, Options(1, 0.0), retry_singly=True)
    async with trio.open_nursery() as tasks, trio.open_nursery() as callers:
        await tasks.start(batcher.serve)
        got: dict[int, Any] = {}

        async def call() -> None:
            got.update(await gather(batcher, [1, 2, 3]))

        callers.start_soon(call)
        await trio.testing.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
        with trio.CancelScope(shield=True):
            await trio.testing.wait_all_tasks_blocked()
    assert run.items == [[1]]


@pytest.mark.parametrize("ticks", range(5))
async def test_submitting_while_the_batcher_is_cancelled(ticks: int) -> None:
    """Whenever it comes, the caller is told; nothing breaks."""
    batcher: Batcher[int, int] = Batcher(Runner(), Options(1, 0.0))
    scope = trio.CancelScope()

    async def host(*, task_status: trio.TaskStatus[None]) -> None:
        with scope:
            await batcher.serve(task_status=task_status)

    async with trio.open_nursery() as nursery:
        await nursery.start(host)
        await trio.testing.wait_all_tasks_blocked()
        scope.cancel()
        for _ in range(ticks):
            await trio.lowlevel.checkpoint()
        with pytest.raises((NotReady, trio.ClosedResourceError)):
            await batcher.submit(1)


async def test_an_item_is_not_touched_once_its_caller_is_gone() -> None:
    """A caller that leaves in the very moment in which its batch begins is either in it and waits, or not in it."""
    gone: set[int] = set()
    ran: list[list[int]] = []

    async def run(items: Sequence[int]) -> Sequence[int | Exception]:
        assert not gone.intersection(items)
        ran.append(list(items))
        return list(items)

    async with open_batcher(run, Options(2, 1000.0)) as batcher:

        async def leave(item: int, scope: trio.CancelScope) -> None:
            with scope:
                try:
                    await batcher.submit(item)
                finally:
                    gone.add(item)

        for item in range(0, 400, 2):
            scope = trio.CancelScope()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(leave, item, scope)
                await trio.testing.wait_all_tasks_blocked()
                nursery.start_soon(batcher.submit, item + 1)
                scope.cancel()
                await trio.testing.wait_all_tasks_blocked()
                if batcher.waiting:
                    nursery.start_soon(batcher.submit, -1)
    assert {item for batch in ran for item in batch} >= set(range(1, 400, 2))


async def test_an_error_of_the_block_ends_everything(autojump_clock: MockClock) -> None:
    """Who waits outside is told that there will be no answer."""
    run = Runner(seconds=5)
    got: dict[int, Any] = {}

    async def call(batcher: Batcher[int, int]) -> None:
        got.update(await gather(batcher, [1, 2]))

    async with trio.open_nursery() as nursery:
        with pytest.raises(ExceptionGroup) as caught:  # noqa: PT012 - the block is what is tested
            async with open_batcher(run, Options(1, 0.0)) as batcher:
                nursery.start_soon(call, batcher)
                await trio.testing.wait_all_tasks_blocked()
                raise ValueError("of the block")
        assert caught.group_contains(ValueError, match="of the block")
    assert [text.partition(":")[0] for text in got.values()] == [NotReady.__name__] * 2
    assert run.cancelled == 1


async def test_hooks_are_told_sizes_and_times(autojump_clock: MockClock) -> None:
    """The size of each batch that runs and the time that each item waited."""
    sizes: list[int] = []
    waits: list[float] = []

    class Hooks(BatchHooks):
        def batch_size(self, size: int) -> None:
            sizes.append(size)

        def queue_time(self, seconds: float) -> None:
            waits.append(seconds)

    async with open_batcher(Runner(), Options(6, 2.0), hooks=Hooks()) as batcher:
        await gather(batcher, [1, 2, 3], size=3)
    assert (sizes, waits) == ([6, 3], [0, 0, 2])


def test_concurrency_is_one_or_more() -> None:
    """A batcher that could never run anything is refused."""
    with pytest.raises(ValueError, match="concurrency must be 1 or more, got 0"):
        Batcher(Runner(), Options(1, 0.0), concurrency=0)


async def test_many_submitters_lose_and_double_nothing() -> None:
    """Two hundred callers with real time and small batches: every one has its own result, each item ran once."""
    run = Runner(seconds=0.0005)
    total = 0

    async def call(batcher: Batcher[int, int], number: int) -> None:
        nonlocal total
        for step in range(10):
            item = 1000 * number + step + 14
            assert await batcher.submit(item) == 2 * item
            total += 1

    async with open_batcher(run, Options(7, 0.001), concurrency=3) as batcher, trio.open_nursery() as nursery:
        for number in range(200):
            nursery.start_soon(call, batcher, number)
    ran = [item for batch in run.items for item in batch]
    assert total == len(ran) == len(set(ran)) == 2000
    assert max(map(len, run.items)) == 7
