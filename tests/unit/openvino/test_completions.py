"""When the event loop hears of inferences that have ended on OpenVINO's threads."""

from __future__ import annotations

import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING

import trio
import trio.testing

from ovmstrio.openvino.completions import Completion, CompletionQueue

if TYPE_CHECKING:
    from collections.abc import Sequence


def _begun(queue: CompletionQueue, count: int) -> list[tuple[Completion, trio.Event]]:
    completions = [Completion() for _ in range(count)]
    return [(each, each.expect(queue)) for each in completions]


def _end(runs: Sequence[tuple[Completion, trio.Event]]) -> None:
    """Have inferences end, each on a thread of its own, as OpenVINO's are none of Python's."""
    for completion, _ in runs:
        thread = threading.Thread(target=completion, args=(None,))
        thread.start()
        thread.join()


async def _heard(runs: Sequence[tuple[Completion, trio.Event]]) -> list[bool]:
    await trio.testing.wait_all_tasks_blocked(0.01)
    return [done.is_set() for _, done in runs]


async def test_every_end_is_heard_of_at_once_unless_some_may_wait() -> None:
    """As where one call comes after the other."""
    queue = CompletionQueue(1)
    runs = _begun(queue, 4)
    for number in range(4):
        _end(runs[number : number + 1])
        assert await _heard(runs) == [place <= number for place in range(4)]
    assert queue.running == 0


async def test_ends_wait_for_each_other_while_the_device_has_more_than_it_can_run() -> None:
    """They are heard of together as soon as it has not: it would idle until the loop brings more."""
    queue = CompletionQueue(2)
    queue.most_waiting = 10
    runs = _begun(queue, 6)
    _end(runs[:3])
    assert await _heard(runs) == [False] * 6
    _end(runs[3:4])
    assert await _heard(runs) == [True] * 4 + [False] * 2
    assert queue.running == 2


async def test_an_inference_began_when_its_stream_was_done_with_the_one_before() -> None:
    """Of two streams that is the end before the last, in whichever order tasks go on that hear of several at once."""
    queue = CompletionQueue(2, streams=2)
    runs = _begun(queue, 5)
    _end(runs)
    ends = [completion.at for completion, _ in runs]
    assert ends == sorted(ends)
    assert [completion.free_at for completion, _ in runs] == [0.0, 0.0, *ends[:3]]
    queue.be_of(1, 1)
    again = _begun(queue, 2)
    _end(again)
    assert [completion.free_at for completion, _ in again] == [0.0, again[0][0].at]


async def test_no_more_ends_wait_than_may() -> None:
    """Who has waited longest for an answer waits for so many others at the most."""
    queue = CompletionQueue(1)
    queue.most_waiting = 2
    runs = _begun(queue, 9)
    _end(runs[:2])
    assert await _heard(runs) == [False] * 9
    _end(runs[2:3])
    assert await _heard(runs) == [True] * 3 + [False] * 6


async def test_who_waits_for_a_run_that_ends_without_a_word_is_heard_of_with_it() -> None:
    """OpenVINO says nothing of one that fails or is cancelled, and no further end might come."""
    queue = CompletionQueue(1)
    queue.most_waiting = 10
    runs = _begun(queue, 3)
    _end(runs[:1])
    assert await _heard(runs) == [False] * 3
    queue.miss()
    assert await _heard(runs) == [True, False, False]
    _end(runs[1:2])
    assert await _heard(runs) == [True, True, False]
    assert queue.running == 0


async def test_a_run_that_nobody_expects_is_told_to_nobody() -> None:
    """As those that mend a model after a failure: they must not count as ends of others."""
    queue = CompletionQueue(1)
    (run,) = _begun(queue, 1)
    _end([run, run, run])
    assert await _heard([run]) == [True]
    assert queue.running == 0


async def test_whatever_threads_do_every_end_is_heard_of() -> None:
    """Threads end inferences at their own speed while the loop begins others; none is forgotten."""
    queue = CompletionQueue(4)
    queue.most_waiting = 3
    started: SimpleQueue[Completion | None] = SimpleQueue()
    heard = 0

    def end() -> None:
        while (completion := started.get()) is not None:
            completion(None)

    async def infer() -> None:
        nonlocal heard
        for _ in range(100):
            completion = Completion()
            done = completion.expect(queue)
            started.put(completion)
            await done.wait()
            heard += 1

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
    assert (heard, queue.running) == (1200, 0)
