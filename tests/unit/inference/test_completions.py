from __future__ import annotations

import threading
from collections.abc import Sequence
from queue import SimpleQueue

import trio
import trio.testing

from ovmstrio.inference.infer_requests import Completion, CompletionQueue


def _started(queue: CompletionQueue, count: int) -> list[tuple[Completion, trio.Event]]:
    completions = [Completion() for _ in range(count)]
    return [(each, each.expect(queue)) for each in completions]


def _end(runs: Sequence[tuple[Completion, trio.Event]]) -> None:
    for completion, _ in runs:
        thread = threading.Thread(target=completion, args=(None,))
        thread.start()
        thread.join()


async def _notified(runs: Sequence[tuple[Completion, trio.Event]]) -> list[bool]:
    await trio.testing.wait_all_tasks_blocked(0.01)
    return [done.is_set() for _, done in runs]


async def test_each_end_is_notified_at_once_by_default() -> None:
    queue = CompletionQueue(1)
    runs = _started(queue, 4)
    for number in range(4):
        _end(runs[number : number + 1])
        assert await _notified(runs) == [place <= number for place in range(4)]
    assert queue.running == 0


async def test_ends_are_notified_together_while_the_device_has_more_work() -> None:
    queue = CompletionQueue(2)
    queue.most_waiting = 10
    runs = _started(queue, 6)
    _end(runs[:3])
    assert await _notified(runs) == [False] * 6
    _end(runs[3:4])
    assert await _notified(runs) == [True] * 4 + [False] * 2
    assert queue.running == 2


async def test_inference_begins_when_its_stream_is_free() -> None:
    queue = CompletionQueue(2, streams=2)
    runs = _started(queue, 5)
    _end(runs)
    ends = [completion.at for completion, _ in runs]
    assert ends == sorted(ends)
    assert [completion.free_at for completion, _ in runs] == [0.0, 0.0, *ends[:3]]
    queue.configure(1, 1)
    again = _started(queue, 2)
    _end(again)
    assert [completion.free_at for completion, _ in again] == [0.0, again[0][0].at]


async def test_waiting_ends_are_bounded() -> None:
    queue = CompletionQueue(1)
    queue.most_waiting = 2
    runs = _started(queue, 9)
    _end(runs[:2])
    assert await _notified(runs) == [False] * 9
    _end(runs[2:3])
    assert await _notified(runs) == [True] * 3 + [False] * 6


async def test_missed_end_notifies_the_ends_that_wait() -> None:
    queue = CompletionQueue(1)
    queue.most_waiting = 10
    runs = _started(queue, 3)
    _end(runs[:1])
    assert await _notified(runs) == [False] * 3
    queue.miss()
    assert await _notified(runs) == [True, False, False]
    _end(runs[1:2])
    assert await _notified(runs) == [True, True, False]
    assert queue.running == 0


async def test_unexpected_ends_are_not_counted() -> None:
    queue = CompletionQueue(1)
    (run,) = _started(queue, 1)
    _end([run, run, run])
    assert await _notified([run]) == [True]
    assert queue.running == 0


async def test_each_end_on_any_thread_is_notified() -> None:
    queue = CompletionQueue(4)
    queue.most_waiting = 3
    started: SimpleQueue[Completion | None] = SimpleQueue()
    notified = 0

    def end() -> None:
        while (completion := started.get()) is not None:
            completion(None)

    async def infer() -> None:
        nonlocal notified
        for _ in range(100):
            completion = Completion()
            done = completion.expect(queue)
            started.put(completion)
            await done.wait()
            notified += 1

    device = [threading.Thread(target=end) for _ in range(4)]
    for thread in device:
        thread.start()
    try:
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                for _ in range(12):
                    nursery.start_soon(infer)
    finally:
        for _ in device:
            started.put(None)
        for thread in device:
            thread.join()
    assert (notified, queue.running) == (1200, 0)
